"""Collecting: what belongs together by digest, what is absent, what is broken."""

import gzip
import json
from dataclasses import replace

import pytest

from eval.compare import loss_rows
from eval.exact import PlannedInterim
from eval.results import Sequential
from eval.verdict import Criteria
from pipelines.document.blocks import render_markdown
from pipelines.domain.errors import UserError
from pipelines.report.collect import collect
from pipelines.report.sections import document
from pipelines.store.manifest import sealed
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format, commit, evaluation, full_store


def test_a_format_is_the_chain_of_its_newest_benchmark(two_formats):
    data = collect(two_formats)
    assert [item.variant for item in data.formats] == ["none", "fp8"]
    assert [artifact.stage for artifact in data.formats[1].chain] == [
        "quantize", "build", "evaluate", "repository", "benchmark",
    ]  # fmt: skip
    by_stage = {artifact.stage: artifact for artifact in data.formats[1].chain}
    assert {source.name: source.source for source in by_stage["benchmark"].inputs} == {
        "repository": by_stage["repository"].place,
        "model": "model",
    }
    assert by_stage["build"].inputs[0].digest == by_stage["quantize"].digest


def test_servers_elsewhere_stand_side_by_side(tmp_path):
    """Of one format, behind one address or several: none is taken for another run of the others, or of our own."""
    store = full_store(tmp_path, ["fp8"])
    asked = [{"url": "http://gpu7:8000/v1", "api": "chat"}, {"url": "http://gpu7:8000/v1"}, {"url": "gpu7:8001"}]
    for minute, how in enumerate(asked, 20):
        add_benchmark(store, None, "fp8", minute, how=how)
    (workload,) = collect(store).workloads
    assert sorted(run.result.precision for run in workload.runs) == [
        "fp8", "fp8 at gpu7:8000 (chat)", "fp8 at gpu7:8000 (completions)", "fp8 at gpu7:8001 (gRPC)",
    ]  # fmt: skip
    assert not any(run.repeats for run in workload.runs)


def test_the_notes_of_a_load_are_in_its_table(tmp_path):
    """They say what a number does not, e.g. that answers without text have no TTFT."""
    note = "5 of 18 answers had no text, so they have no TTFT."
    add_benchmark(Store(tmp_path), None, "fp8", how={"url": "gpu7:8001"}, notes=(note,))
    assert f"concurrency 4: {note}" in render_markdown(document(collect(Store(tmp_path)))).replace("\\", "")


def test_requests_of_every_level_are_there(two_formats):
    run = collect(two_formats).workloads[0].runs[0]
    assert [len(run.requests[level.requests_file][0].due) for level in run.result.levels] == [24, 24, 24]


def test_the_accuracy_is_paired_with_the_baseline_of_the_same_questions(two_formats):
    none, fp8 = collect(two_formats).formats
    assert none.accuracy.row is None
    assert fp8.accuracy.row["loss_percent"] == 0
    assert fp8.accuracy.baseline == none.accuracy.artifact.place
    assert (fp8.accuracy.row["verdict"], fp8.accuracy.row["compared"]) == ("UNDECIDED", 1)


def test_formats_of_a_report_are_judged_together(tmp_path):
    """Four formats with a baseline: each p-value is corrected for four, and other criteria change the verdict."""
    store = full_store(tmp_path)
    rows = [item.accuracy.row for item in collect(store).formats if item.accuracy.row]
    assert [row["compared"] for row in rows] == [4] * 4
    loose = collect(store, criteria=Criteria(margin_points=5)).formats
    assert [item.accuracy.row["verdict"] for item in loose if item.accuracy.row] == ["GO", "GO", "GO", "NO-GO"]


def test_a_later_evaluation_on_another_task_stands_beside_the_one_that_all_formats_have(tmp_path):
    """None and fp8 were also asked to write answers, after all three were asked mini_mmlu."""
    store = Store(tmp_path)
    for minute, variant in enumerate(("none", "fp8", "int4_wo")):
        add_format(store, variant, minute=10 * minute)
    engines = {path.name.split("-")[1]: path for path in (store.root / "build").iterdir()}
    for variant, wrong in (("none", 0), ("fp8", 20)):
        commit(
            store, "evaluate", f"synthetic-{variant}", {"accuracy": 1 - wrong / 200, "questions": 200},
            {"engine": json.loads((engines[variant] / "manifest.json").read_text())["digest"], "model": "cd" * 32},
            {"model": "synthetic", "variant": variant, "task": "mini_answers"},
            {"evaluation.json": replace(evaluation(variant, wrong), task="mini_answers").to_json()}, 50,
        )  # fmt: skip
    data = collect(store)
    assert {item.variant: item.accuracy.result.task for item in data.formats} == dict.fromkeys(
        ("none", "fp8", "int4_wo"), "mini_mmlu"
    )
    others = {item.variant: [each.result.task for each in item.other_tasks] for item in data.formats}
    assert others == {"none": ["mini_answers"], "fp8": ["mini_answers"], "int4_wo": []}
    (written,) = data.formats[1].other_tasks
    assert (written.row["lost"], written.row["compared"]) == (20, 1)
    assert data.formats[1].left_out == ()
    text = render_markdown(document(data))
    assert "Other tasks: model synthetic; mini_answers, 5-shot, engine openvino" in text
    assert "mini_answers: NO-GO: synthetic fp8 loses at least" in text


def test_an_evaluation_that_stopped_early_has_its_baseline_beside_it(tmp_path):
    """The 16-bit engine that was asked in turns is not among what the format was made from."""
    store = Store(tmp_path)
    add_format(store, "none")
    add_format(store, "fp8", minute=10)
    engines = {path.name.split("-")[1]: path for path in (store.root / "build").iterdir()}
    digests = {name: json.loads((path / "manifest.json").read_text())["digest"] for name, path in engines.items()}
    went = Sequential(1104, 1104, 1, (PlannedInterim(100, 0.25), PlannedInterim(200, 0.25)))
    before, after = (replace(evaluation(name, wrong=0), sequential=went) for name in ("none", "fp8"))
    commit(
        store, "evaluate", "synthetic-fp8", {"accuracy": 1.0, "questions": 200},
        {"engine": digests["fp8"], "baseline": digests["none"]}, {"model": "synthetic", "variant": "fp8"},
        {"evaluation.json": after.to_json(), "baseline.json": before.to_json()}, 30,
    )  # fmt: skip
    fp8 = collect(store).formats[1]
    assert fp8.accuracy.baseline == f"{fp8.accuracy.artifact.place}/baseline.json"
    assert [artifact.label for artifact in fp8.chain if artifact.stage == "build"] == ["synthetic-fp8"]
    (alone,) = loss_rows([(replace(before, sequential=None), replace(after, sequential=None))], Criteria())
    assert fp8.accuracy.row["loss_most"] > alone["loss_most"]  # the looks have their price
    text = render_markdown(document(collect(store)))
    assert "fp8 200 of 1,104, looked at after 100, 200. Bounds and p-values allow for looking" in text


def test_two_engines_of_one_label_are_not_mixed(tmp_path):
    """The newest benchmark is of TP 2, so the evaluation of the TP 1 engine is left out and said so."""
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "fp8", minute=0), "fp8", minute=10)
    add_benchmark(store, add_format(store, "fp8", minute=20, tp=2), "fp8", minute=30)
    (fp8,) = collect(store).formats
    assert fp8.artifact("quantize").settings["tp_size"] == 2
    assert fp8.accuracy.artifact.created.endswith("03:22:00+00:00")
    assert sorted(text.split("/")[0] for text in fp8.left_out) == [
        "benchmark", "build", "evaluate", "quantize", "repository",
    ]  # fmt: skip


def test_an_evaluation_of_another_engine_is_named_not_used(tmp_path):
    store = Store(tmp_path)
    add_format(store, "fp8")
    repository = add_format(store, "fp8", minute=20, tp=2)
    evaluations = sorted((tmp_path / "evaluate").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    for file in evaluations[-1].iterdir():
        file.unlink()
    add_benchmark(store, repository, "fp8", minute=30)
    (fp8,) = collect(store).formats
    assert fp8.accuracy is None
    assert "another engine build" in fp8.missing[0]


def test_other_workloads_stand_alone_newest_first(tmp_path):
    store = Store(tmp_path)
    repository = add_format(store, "fp8")
    add_benchmark(store, repository, "fp8", minute=10, name="chat")
    add_benchmark(store, repository, "fp8", minute=11, name="summary")
    data = collect(store)
    assert [(item.title, len(item.runs)) for item in data.workloads] == [("summary", 1), ("chat", 1)]


def test_workloads_of_one_name_are_told_apart_by_what_differs_and_not_by_their_time(tmp_path):
    """A report of the next day finds them again by their titles (`report.against`), whatever other models it has."""
    store = Store(tmp_path)
    repository = add_format(store, "fp8")
    for minute, model, lengths in ((10, "small", 64), (11, "large", 64), (12, "large", 512)):
        add_benchmark(store, repository, "fp8", minute=minute, name="chat", model=model, isl=lengths)
    titles = [(item.model, item.title) for item in collect(store).workloads]
    assert titles == [
        ("large", "chat (workload.isl 512)"), ("large", "chat (workload.isl 64)"), ("small", "chat"),
    ]  # fmt: skip


def test_a_second_benchmark_of_the_same_engine_is_a_repeat(tmp_path):
    store = Store(tmp_path)
    repository = add_format(store, "fp8")
    add_benchmark(store, repository, "fp8", minute=10)
    add_benchmark(store, repository, "fp8", minute=11, speed=1.3)
    (run,) = collect(store).workloads[0].runs
    assert run.artifact.created.endswith("03:11:00+00:00")
    assert len(run.repeats) == 1


def test_an_incomplete_benchmark_replaces_no_complete_one(tmp_path):
    """It is mentioned; where there is no other, it is shown."""
    store = Store(tmp_path)
    repository = add_format(store, "fp8")
    add_benchmark(store, repository, "fp8", minute=10)
    add_benchmark(store, repository, "fp8", minute=11, cut=4)
    add_benchmark(store, add_format(store, "none", minute=20), "none", minute=30, cut=4)
    none, fp8 = collect(store).formats
    assert none.runs[0].artifact.created.endswith("03:30:00+00:00")
    assert fp8.runs[0].artifact == fp8.chain[-1]
    assert fp8.runs[0].artifact.created.endswith("03:10:00+00:00")
    assert fp8.missing == ("A newer benchmark of synthetic fp8 is incomplete: the server died.",)
    assert [text.partition("): ")[2] for text in fp8.left_out] == ["it is incomplete"]


@pytest.mark.parametrize("name", ["chat", "summary"])
@pytest.mark.parametrize(("minute", "which"), [(9, "Another"), (11, "A newer")])
def test_a_benchmark_without_a_load_makes_no_group_beside_others(name, minute, which, tmp_path):
    store = Store(tmp_path)
    repository = add_format(store, "fp8")
    add_benchmark(store, repository, "fp8", minute=10)
    add_benchmark(store, repository, "fp8", minute=minute, name=name, concurrencies=(), cut=1)
    data = collect(store)
    assert [item.title for item in data.workloads] == ["chat"]
    assert data.formats[0].missing == (f"{which} benchmark of synthetic fp8 is incomplete: the server died.",)


def test_the_interval_of_repeated_loads_is_beside_the_figure(tmp_path):
    """Where there is one."""
    store = Store(tmp_path)
    add_benchmark(store, add_format(store, "fp8"), "fp8", notes=("3 runs",), intervals={"ttft_p50_s": (0.01, 0.0125)})
    text = render_markdown(document(collect(store)))
    assert "(10.0 to 12.5)" in text
    assert "In parentheses: 95 % interval of the mean of 3 runs" in text


def test_without_a_benchmark_it_is_named_as_absent(tmp_path):
    store = Store(tmp_path)
    add_format(store, "none")
    data = collect(store)
    assert data.workloads == ()
    assert data.formats[0].missing == ("synthetic none was not benchmarked yet.",)


def test_a_store_without_the_large_files_is_enough(tmp_path):
    """Engines and checkpoints need not travel: their manifests do."""
    store = full_store(tmp_path, ("none", "fp8"))
    for path in [*tmp_path.glob("build/*/config.json"), *tmp_path.glob("quantize/*/config.json")]:
        path.unlink()
    assert len(collect(store).formats) == 2


def test_formats_come_in_the_order_asked_for(two_formats):
    assert [item.variant for item in collect(two_formats, "synthetic", ["fp8", "none"]).formats] == ["fp8", "none"]


def test_what_is_not_there_is_refused(two_formats, tmp_path):
    with pytest.raises(UserError, match=r"nothing to report in .*empty"):
        collect(Store(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"model 'syntetic'.*Did you mean 'synthetic'"):
        collect(two_formats, "syntetic")
    with pytest.raises(UserError, match=r"format nvfp4.*none"):
        collect(two_formats, "synthetic", ["nvfp4"])


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        ("benchmark/*/manifest.json", b"{", "manifest.json is not readable JSON"),
        ("benchmark/*/benchmark.json", b"{}", "benchmark.json was changed"),
        ("benchmark/*/requests-0.json.gz", gzip.compress(b"{}", mtime=0), "requests-0.json.gz was changed"),
        ("evaluate/*/evaluation.json", None, "evaluation.json cannot be read"),
    ],
)
def test_a_broken_artifact_is_one_clear_error(tmp_path, place, content, message):
    store = full_store(tmp_path, ("fp8",))
    (path,) = tmp_path.glob(place)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        collect(store)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    store = full_store(tmp_path, ("fp8",))
    (path,) = tmp_path.glob("build/*/manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["made_from"]
    path.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(UserError, match=r"build/synthetic-fp8.*not a manifest of this version: 'made_from'"):
        collect(store)


def test_an_unfinished_folder_is_not_an_artifact(two_formats, tmp_path):
    store = full_store(tmp_path, ("fp8",))
    (tmp_path / "build" / "synthetic-fp8-unfinished").mkdir()
    assert len(collect(store).formats) == 1


def test_formats_are_shown_against_the_model_itself_if_it_was_evaluated(tmp_path):
    """The 16-bit engine is a conversion too: 2 of its answers are wrong, and the model itself knew them."""
    store = full_store(tmp_path, ("none", "fp8"))
    result = replace(evaluation("hugging_face", 2), engine="transformers")
    settings = {"model": "synthetic", "task": "mini_mmlu"}
    files = {"evaluation.json": result.to_json()}
    commit(store, "reference", "synthetic-hugging_face", {}, {"model": "cd" * 32}, settings, files)
    data = collect(store)
    assert [item.variant for item in data.formats] == ["none", "fp8"]  # the model itself is no format
    row = data.formats[0].accuracy.original
    assert (row["flips"], row["gained"], row["baseline_engine"]) == (2, 2, "transformers")
    text = " ".join(render_markdown(document(data)).split())
    assert "synthetic none against Hugging Face: 2 of 200 answers differ" in text
