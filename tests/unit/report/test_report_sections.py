"""What the sections of a report say: the protocol in sentences, and the commands that repeat the results."""

import json
import shlex
from dataclasses import asdict, replace

import pytest

from eval.perplexity import PerplexityResult
from pipelines.document.blocks import Code, Figure, Fold, Table, Terms
from pipelines.loadgen.config import WorkloadSettings
from pipelines.report.collect import collect
from pipelines.report.sections import document
from pipelines.report.tables_load import protocol_text, workload_text
from pipelines.store.manifest import sealed
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format, commit

FIXED = {"distribution": "fixed", "file": None, "max": None, "mean": 128.0, "min": None}
WIDE = {"distribution": "lognormal", "mean": 300.0, "stdev": 100.0, "max": 900, "file": None}
STEADY = {"warmup_s": 3.0, "duration_s": 12.0, "min_requests": 10, "num_requests": None, "window": "steady",
          "streaming": True}  # fmt: skip


def section(store, name):
    return next(each for each in document(collect(store)).sections if each.id == name)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            {"name": "fixed", "isl": FIXED, "osl": 64, "arrival": "closed", "think_time_s": 0.5, "seed": 1},
            "fixed: 128 input tokens and 64 output tokens per request; each user sends the next request when the "
            "answer is complete (closed loop), after a pause of 0.5 s.",
        ),
        (
            {"name": "chat", "isl": WIDE, "osl": 64, "arrival": "poisson", "shared_prefix_share": 0.25, "turns": 3},
            "chat: lognormal (mean 300, stdev 100, max 900) input tokens and 64 output tokens per request; requests "
            "arrive at random, as in a Poisson process (open loop); 25 % of each prompt is the same in all prompts; "
            "conversations of 3 turns.",
        ),
        (
            WorkloadSettings(name="seen", isl=128, osl=64, images=1).model_dump(mode="json"),
            "seen: 128 input tokens and 64 output tokens per request, 1 picture of 336 x 336 pixels among the input "
            "tokens; each user sends the next request when the answer is complete (closed loop).",
        ),
        (
            WorkloadSettings(name="seen", isl=128, osl=64, images=2, image_side=48).model_dump(mode="json"),
            "seen: 128 input tokens and 64 output tokens per request, 2 pictures of 48 x 48 pixels among the input "
            "tokens; each user sends the next request when the answer is complete (closed loop).",
        ),
        ({}, "unnamed: lengths not recorded per request."),
    ],
)
def test_a_workload_is_a_sentence(workload, said):
    assert workload_text(workload) == said


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (STEADY, "Each load: 3 s of warm-up, 12 s measured, at least 10 requests, in steady state, answers streamed."),
        (
            STEADY | {"duration_s": 6.0, "most_duration_s": 12.0, "enough_requests": 100, "enough_per_user": 5},
            "Each load: 3 s of warm-up, 6 to 12 s measured, until 100 requests and 5 of each user have finished, at "
            "least 10 requests, in steady state, answers streamed.",
        ),
        (
            {"num_requests": 64, "window": "whole"},
            "Each load: 64 requests measured, from the first request to the last.",
        ),
        (
            STEADY | {"duration_s": 6.0, "most_duration_s": 12.0, "num_requests": 500},
            "Each load: 3 s of warm-up, 500 requests measured, or as many as finish in 12 s, at least 10 requests, in "
            "steady state, answers streamed.",
        ),
        (
            STEADY | {"duration_s": 60.0, "num_requests": 5},
            "Each load: 3 s of warm-up, 5 requests measured, or as many as finish in 60 s, at least 5 requests, in "
            "steady state, answers streamed.",
        ),
        ({}, "not recorded"),
    ],
)
def test_a_protocol_is_a_sentence(recorded, said):
    assert protocol_text(recorded) == said


def test_recorded_settings_are_folded(two_formats):
    terms, folded, *_ = section(two_formats, "load").blocks
    assert isinstance(terms, Terms)
    assert not any("warmup_requests" in text or "server_version" in text for _, text in terms.items)
    assert isinstance(folded, Fold)
    assert ("protocol", "warmup_requests", "2") in folded.blocks[0].rows


def test_commands_of_artifacts_that_others_make_anyway_are_not_listed(two_formats):
    """A benchmark makes its checkpoint, engine and repository; only the accuracy needs a command of its own."""
    code = next(block for block in section(two_formats, "repeat").blocks if isinstance(block, Code))
    assert code.lines == (
        "python -m pipelines evaluate quant=none", "python -m pipelines evaluate quant=fp8",
        "python -m pipelines benchmark quant=none", "python -m pipelines benchmark quant=fp8",
        "python -m pipelines report",
    )  # fmt: skip


@pytest.mark.parametrize(("word", "listed"), [("eval.limit=5", 2), ("report.folder=here", 1)])
def test_all_repeats_an_evaluation_with_the_same_questions(tmp_path, monkeypatch, word, listed):
    """An evaluation of other questions than those of `all` needs its own command."""
    from tests.support import report_store

    real = report_store.commit

    def commit(store, stage, *rest):
        made = real(store, stage, *rest)
        path = made.path / "manifest.json"
        words = ["evaluate", "experiment=mine", word] if stage == "evaluate" else ["all", "experiment=mine"]
        old = f"python -m pipelines {stage} quant=fp8"
        altered = path.read_text().replace(old, shlex.join(["python", "-m", "pipelines", *words]))
        path.write_text(json.dumps(sealed(json.loads(altered))))
        return made

    monkeypatch.setattr(report_store, "commit", commit)
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "fp8"), "fp8")
    code = next(block for block in section(store, "repeat").blocks if isinstance(block, Code))
    assert len(code.lines) == listed + 1
    assert code.lines[-2:] == ("python -m pipelines all experiment=mine", "python -m pipelines report experiment=mine")


def test_published_accuracies_stand_beside_the_measured_ones(two_formats):
    """NVIDIA has 66.06 % for Llama-3.1-8B in 16 bit; 100 % were measured here on 200 questions."""
    data = collect(two_formats)
    assert not _published(data)
    results = [replace(item.accuracy.result, model="llama_3_1_8b", task="mmlu") for item in data.formats]
    formats = tuple(
        replace(item, accuracy=replace(item.accuracy, result=result))
        for item, result in zip(data.formats, results, strict=True)
    )
    (table,) = _published(replace(data, formats=formats))
    assert [column.group for column in table.columns[4:]] == ["measured - published"] * 2
    assert table.rows[1] == ("measured", "fp8", "–", "100.00", "–", "–")
    assert ("published", "none", "16 bit", "66.06", "+33.94", "+33.94") in table.rows
    assert "200 here and 4,104 there" in table.notes[1]


def _published(data):
    blocks = next(each for each in document(data).sections if each.id == "accuracy").blocks
    return [block for block in blocks if isinstance(block, Table) and "NVIDIA" in block.caption]


def test_perplexity_stands_beside_the_baselines_and_is_no_evaluation_of_answers(tmp_path):
    """Per word 20 against 16 is 1.25; the accuracy of the format stays that of the questions."""
    store = Store(tmp_path)
    for number, (variant, perplexity) in enumerate({"none": 16.0, "fp8": 20.0}.items()):
        repository = add_format(store, variant, minute=10 * number)
        result = PerplexityResult(
            "synthetic", variant, "openvino", "wikitext", None, 512, "0.4.13", "ab" * 32, 62, perplexity, 1.75, 0.8
        )
        commit(
            store, "evaluate", f"synthetic-{variant}", {"word_perplexity": perplexity, "documents": 62},
            {"engine": repository.manifest["made_from"]["inputs"]["engine"]},
            {"model": "synthetic", "variant": variant, "task": "wikitext"}, {"perplexity.json": asdict(result)},
            10 * number + 5,
        )  # fmt: skip
    data = collect(store)
    assert [item.accuracy.result.task for item in data.formats] == ["mini_mmlu", "mini_mmlu"]
    table = next(
        block
        for each in document(data).sections
        for block in each.blocks
        if isinstance(block, Table) and "Perplexity of texts" in block.caption
    )
    assert table.rows == (
        ("none", "wikitext", "62", "-", "16", "-", "1.7500", "0.8000"),
        ("fp8", "wikitext", "62", "16", "20", "1.2500", "1.7500", "0.8000"),
    )


def test_formats_that_were_asked_different_tasks_have_the_task_beside_their_name(two_formats):
    data = collect(two_formats)
    none, fp8 = data.formats
    row = {**fp8.accuracy.row, "task": "passkey", "questions": 60, "format": "int4_wo"}
    other = replace(
        fp8, variant="int4_wo",
        accuracy=replace(fp8.accuracy, result=replace(fp8.accuracy.result, task="passkey"), row=row),
    )  # fmt: skip
    found = document(replace(data, formats=(none, fp8, other)))
    blocks = next(each for each in found.sections if each.id == "accuracy").blocks
    table = next(block for block in blocks if isinstance(block, Table))
    assert [cells[0] for cells in table.rows] == ["none, mini_mmlu", "fp8, mini_mmlu", "int4_wo, passkey"]
    figure = next(block for block in blocks if isinstance(block, Figure))
    assert "mini_mmlu, 5-shot, 200 questions; passkey, 5-shot, 60 questions, engine openvino" in figure.caption
    assert "int4_wo, passkey +0.00" in figure.alt
