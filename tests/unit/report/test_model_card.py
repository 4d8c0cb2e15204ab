"""Model cards: what they say is what the store holds, and what it does not hold is said to be unknown."""

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from eval.compare import verdict_sentence
from eval.spec import LOCAL, EvalSpec
from eval.verdict import Verdict
from pipelines.document.blocks import escape
from pipelines.domain.errors import UserError
from pipelines.report.collect import collect
from pipelines.report.model_card import model_card, write_model_cards
from pipelines.report.report_command import write_report
from pipelines.store.store import Store
from tests.support.report_store import commit

COMMIT = "9cf48e52b224239de00d483ec8eb84fb8d0f3a3a"


def fp8_of(store):
    return next(item for item in collect(store).formats if item.variant == "fp8")


def card_of(item):
    return ModelCard(model_card(item))


@pytest.fixture(scope="module")
def downloaded(tmp_path_factory):
    """A store whose fp8 checkpoint was made from a model of the Hub."""
    store = Store(tmp_path_factory.mktemp("store"))
    model = commit(
        store, "download", "google--gemma-2b", {"commit": COMMIT, "bytes": 1, "license": "gemma"}, {},
        {"repo_id": "google/gemma-2b", "revision": "main", "repo_type": "model"}, {"config.json": {}},
    )  # fmt: skip
    checkpoint = commit(
        store, "quantize", "synthetic-fp8", {"total_bytes": 6 * 2**20, "source_bytes": 8 * 2**20, "quant_algo": "FP8"},
        {"model": model}, {"qformat": "fp8", "kv_cache": "fp8", "tp_size": 1, "pp_size": 1}, {"config.json": {"a": 1}},
    )  # fmt: skip
    commit(
        store, "build", "synthetic-fp8", {"engine_bytes": 5 * 2**20}, {"checkpoint": checkpoint},
        {"engine": "openvino"}, {"config.json": {"b": 1}},
    )  # fmt: skip
    return store


def test_the_hub_reads_accuracy_from_the_metadata(two_formats):
    """huggingface_hub is the judge: it reads the result that the evaluation holds."""
    item = fp8_of(two_formats)
    (found,) = card_of(item).data.eval_results
    assert (found.task_type, found.dataset_type) == ("text-generation", "mini_mmlu")
    assert found.metric_value == item.accuracy.result.accuracy == 1.0
    assert found.metric_type == "acc"
    assert found.metric_name == "acc (none, 5-shot, 200 questions)"


def test_weights_that_the_engine_build_quantizes_are_not_said_to_stay_in_16_bit(tmp_path):
    """The checkpoint of int4_wo holds them in 16 bit, and its engine none of them."""
    label, inputs, files = "synthetic-int4_wo", {"model": "cd" * 32}, {"config.json": {}}
    commit(
        Store(tmp_path),
        "quantize",
        label,
        {"linears_16bit": ["layers.*.mlp.fc"]},
        inputs,
        {"qformat": "int4_wo"},
        files,
    )
    (item,) = collect(Store(tmp_path)).formats
    assert "**Linears left in 16 bit**: all in this checkpoint; the engine build quantizes them" in model_card(item)


def test_own_questions_have_the_users_name_in_the_metadata(two_formats, tmp_path):
    """Whatever data set is usual for the task's form: the Hub must not list the score among those of arc_easy."""
    item = fp8_of(two_formats)
    spec = EvalSpec(
        task=LOCAL, max_length=1024, num_fewshot=0, dataset_path=tmp_path, path=tmp_path / "q.csv", name="arc_easy"
    )
    own = replace(item.accuracy, result=replace(item.accuracy.result, task=spec.label, num_fewshot=0))
    for changed in (replace(item, accuracy=own), replace(item, other_tasks=(own,))):
        *_, found = card_of(changed).data.eval_results
        assert (found.dataset_name, found.dataset_type) == ("arc_easy (own)", "arc_easy (own)")
        assert found.metric_name == "acc (none, 0-shot, 200 questions)"


def test_a_score_that_measures_nothing_is_not_in_the_metadata(two_formats):
    """The baseline only guesses: the card says so in words, and gives the Hub no score to list."""
    item = fp8_of(two_formats)
    row = {**item.accuracy.row, "verdict": Verdict.NOT_MEASURED, "p_guessing": 0.5}
    card = card_of(replace(item, accuracy=replace(item.accuracy, row=row)))
    assert card.data.eval_results is None
    assert "model-index" not in card.data.to_dict()
    assert escape(verdict_sentence(row)) in card.text
    assert "NOT MEASURED" in card.text


def test_the_hub_reads_source_licence_and_format_from_the_metadata(downloaded):
    data = card_of(fp8_of(downloaded)).data
    assert (data.base_model, data.license) == ("google/gemma-2b", "gemma")
    assert data.to_dict()["base_model_relation"] == "quantized"
    assert {"quantized", "fp8", "tensorrt-llm"} <= set(data.tags)


def test_the_card_names_the_commits_of_source_and_tool(downloaded):
    text = model_card(fp8_of(downloaded))
    assert f"google/gemma-2b at commit {COMMIT}" in text
    assert "0123456789abcdef0123456789abcdef01234567" in text


def test_what_nobody_measured_is_not_in_the_metadata_and_said_in_the_text(downloaded):
    card = card_of(fp8_of(downloaded))
    assert card.data.eval_results is None
    assert card.text.count("Not measured.") == 2


def test_the_card_has_the_verdict_that_the_report_has(two_formats):
    item = fp8_of(two_formats)
    assert f"- {escape(verdict_sentence(item.accuracy.row))}\n" in model_card(item)


def test_a_local_source_has_the_licence_of_its_own_card(two_formats, tmp_path):
    item = fp8_of(two_formats)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# a model\n")
    assert card_of(_from(item, tmp_path)).data.license == "mit"


@pytest.mark.parametrize(
    "text", ["# no metadata", "---\nlicense: [a, b]\n---\n", "---\n: : :\n---\n", "---\nlicense: 'x\\ny: 1'\n---\n", ""]
)
def test_a_licence_that_a_card_does_not_state_is_unknown(two_formats, tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    item = _from(fp8_of(two_formats), tmp_path)
    assert card_of(item).data.license is None
    assert "unknown: see the source" in model_card(item)


def _from(item, folder):
    """Return a format whose source is a local folder."""
    chain = [
        replace(artifact, inputs=tuple(replace(each, path=str(folder)) for each in artifact.inputs))
        for artifact in item.chain
    ]
    return replace(item, chain=tuple(chain))


def test_the_command_to_serve_has_no_folder_of_this_machine(two_formats):
    item = fp8_of(two_formats)
    chain = tuple(
        replace(p, repeat=f"{p.repeat} paths.store=/secret report.folder=/secret benchmark.concurrency=[3]")
        for p in item.chain
    )
    text = model_card(replace(item, chain=chain))
    assert "python -m pipelines serve quant=fp8" in text
    assert "/secret" not in text
    assert "benchmark." not in text.split("pipelines serve", 1)[1].splitlines()[0]


def test_every_compressed_format_of_a_report_gets_a_card_and_the_baseline_none(two_formats, tmp_path):
    data = collect(two_formats)
    write_report(data, tmp_path)
    cards = write_model_cards(data, tmp_path)
    assert list(cards) == ["synthetic fp8"]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("README.md")] == [
        "model_cards/synthetic-fp8/README.md"
    ]


def test_a_folder_that_cannot_be_written_is_named(two_formats, tmp_path):
    (tmp_path / "model_cards").write_text("in the way")
    with pytest.raises(UserError, match=str(tmp_path / "model_cards")):
        write_model_cards(collect(two_formats), tmp_path)
