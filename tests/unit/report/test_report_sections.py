"""What the sections of a report say: the protocol in sentences, and the commands that repeat the results."""

import json
import shlex

import pytest

from pipelines.document.blocks import Code, Fold, Terms
from pipelines.report.collect import collect
from pipelines.report.protocol import protocol_text, workload_text
from pipelines.report.sections import document
from pipelines.store.manifest import sealed
from pipelines.store.store import Store
from tests.support.report_store import add_benchmark, add_format

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
            {"num_requests": 64, "window": "whole"},
            "Each load: 64 requests measured, from the first request to the last.",
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
