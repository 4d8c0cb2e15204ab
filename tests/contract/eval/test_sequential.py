"""Asking two engines in turns: the questions, when asking stops, and that nothing is asked twice."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eval.answer_cache import AskedEngine
from eval.compare import loss_rows, loss_table
from eval.harness import Asked, ask_in_turns, evaluate, load_questions
from eval.results import EvalResult
from eval.spec import EvalSpec
from eval.verdict import Criteria
from pipelines.domain.progress import Progress, SilentProgress
from pipelines.engines.port import Generation, SamplingParams

pytestmark = pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
"""Whether a tokenizer adds BOS, in which the two differ, is nothing to asking in turns."""
SPEC = EvalSpec(task="mini_mmlu", max_length=1024, num_fewshot=0, limit=20)
QUESTIONS = 240
CRITERIA = Criteria(margin_points=10)
Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]


class Scores:
    """An engine that mostly knows the answer; the rest of its scores is drawn from the tokens.

    `noise` is how much of what is drawn is its own.
    """

    is_right: Callable[[Sequence[int], Sequence[int]], bool]

    def __init__(self, name: str, noise: float = 0.0, dies_after: int | None = None) -> None:
        self.name, self.noise, self.dies_after = name, noise, dies_after
        self.asked: list[tuple[Any, Any]] = []
        self.opened = 0

    def __enter__(self) -> Scores:
        self.opened += 1
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def loglikelihood(self, pairs: Pairs, progress: Progress) -> list[tuple[float, bool]]:
        if self.dies_after is not None and len(self.asked) + len(pairs) > self.dies_after:
            raise KeyboardInterrupt
        self.asked += [(tuple(context), tuple(continuation)) for context, continuation in pairs]
        return [(self._score(str((list(a), list(b)))) + 0.7 * self.is_right(a, b), False) for a, b in pairs]

    def _score(self, text: str) -> float:
        shared, own = (zlib.crc32(f"{name} {text}".encode()) / 2**32 for name in ("all", self.name))
        return -1 - (1 - self.noise) * shared - self.noise * own

    def generate(self, prompts: Any, limits: SamplingParams, progress: Progress) -> list[Generation]:
        raise NotImplementedError


@cache
def letters() -> dict[str, str]:
    """The right answer by the text of its question."""
    tasks = load_questions(SPEC).tasks["tasks"].values()
    return {task.doc_to_text(doc).strip(): "ABCD"[doc["answer"]] for task in tasks for doc in task.eval_docs}


@pytest.fixture
def ask(checkpoint: tuple[Any, Any, Path], tmp_path: Path) -> Callable[..., Asked]:
    """Ask two engines; answers are kept under their names."""
    tokenizer, right = Tokenizer.from_file(str(checkpoint[2] / "tokenizer.json")), letters()

    def is_right(context: Sequence[int], continuation: Sequence[int]) -> bool:
        prompt = "\n".join(tokenizer.decode(list(context)).strip().splitlines()[-6:])
        return right[prompt] == tokenizer.decode(list(continuation)).strip()

    def run(baseline: Scores, other: Scores, progress: Progress | None = None, **changes: Any) -> Asked:
        baseline.is_right = other.is_right = is_right
        sides = [
            AskedEngine(qformat, lambda engine=engine: engine, tmp_path / f"{engine.name}.jsonl")
            for engine, qformat in ((baseline, "none"), (other, other.name))
        ]
        return ask_in_turns(
            *sides,
            checkpoint[2],
            load_questions(SPEC),
            CRITERIA,
            progress or SilentProgress(),
            model="tiny",
            engine="drawn",
            **{"most": QUESTIONS, **changes},
        )

    return run


def test_asking_stops_when_the_verdict_is_known(ask, recorder) -> None:
    """GO for a margin of 10 points, with 1/8 of 5 % and no change, takes more than 30 questions and fewer than 60."""
    found = ask(Scores("none"), Scores("fp8"), recorder)
    went = found.result.sequential
    assert went is not None
    assert (went.of, went.available, [interim.questions for interim in went.looks]) == (QUESTIONS, QUESTIONS, [30, 60])
    assert found.result.questions == len(found.result.records) == 60
    assert found.baseline.sequential == went
    (row,) = loss_rows([(found.baseline, found.result)], CRITERIA)
    assert row["verdict"] == "GO"
    shown = " ".join(loss_table([row]).split())
    assert "Asked in random order until the verdict was known: fp8 60 of 240, looked at after 30, 60." in shown
    assert [note.partition(", 0 lost")[0] for note in recorder.notes] == [
        "30 of 240 questions asked",
        "60 of 240 questions asked",
    ]
    titles = {title.partition(",")[0]: done for title, (*_, done) in recorder.bars.items()}
    assert titles == {"30 of 240 questions": pytest.approx(60), "60 of 240 questions": pytest.approx(120)}
    assert EvalResult.from_json(found.result.to_json()) == found.result


def test_the_looks_are_beginnings_of_what_was_asked(ask) -> None:
    """Half of the looks' questions are those of the look before; subjects have their share at each."""
    found = ask(Scores("none"), Scores("fp8", noise=0.05))
    records = found.result.records
    assert len({(record.subject, record.index) for record in records}) == len(records)
    subjects = [sum(record.subject == name for record in records[:30]) for name in {r.subject for r in records}]
    assert len(subjects) == 12
    assert all(1 <= number <= 4 for number in subjects)  # 30 of 240: 2.5 of each


def test_the_same_questions_have_the_same_answers_as_in_a_whole_evaluation(ask, checkpoint) -> None:
    """Also the index of each question is that of the data set, and the prompt is the same."""
    other = Scores("fp8", noise=0.05)
    found = ask(Scores("none"), other, most=60).result
    names = {"model": "tiny", "qformat": "fp8", "engine": "drawn"}
    whole = evaluate(other, checkpoint[2], SPEC, SilentProgress(), **names)
    known = {(record.subject, record.index): record for record in whole.records}
    assert [known[record.subject, record.index] for record in found.records] == list(found.records)


def test_a_stopped_run_goes_on_where_it_was(ask, monkeypatch) -> None:
    monkeypatch.setattr("eval.answer_cache.SCORED_AT_ONCE", 16)
    baseline, other = Scores("none"), Scores("fp8", noise=0.05, dies_after=200)
    with pytest.raises(KeyboardInterrupt):
        ask(baseline, other)
    before, other.dies_after = len(other.asked), None
    assert 100 < before <= 200
    found = ask(baseline, other)
    for engine in (baseline, other):
        assert len(engine.asked) == len(set(engine.asked)) == 4 * found.result.questions
    assert found == ask(Scores("none"), Scores("fp8", noise=0.05))


def test_the_baseline_is_asked_once_for_all_formats(ask) -> None:
    baseline = Scores("none")
    first = ask(baseline, Scores("fp8"))
    opened, asked = baseline.opened, len(baseline.asked)
    second = ask(baseline, Scores("int8"))
    assert first.result.questions == second.result.questions == 60
    assert (baseline.opened, len(baseline.asked)) == (opened, asked)
    assert first.baseline == second.baseline


@pytest.mark.thorough
def test_among_several_formats_asking_goes_on(ask) -> None:
    """A verdict that has to hold among a hundred needs more questions, which begin with the same ones."""
    alone = ask(Scores("none"), Scores("fp8"))
    among = ask(Scores("none"), Scores("fp8"), together=100)
    assert (alone.result.questions, among.result.questions) == (60, 120)
    assert among.result.records[: alone.result.questions] == alone.result.records


def test_too_few_questions_are_said_before_the_first_one(checkpoint, recorder) -> None:
    """For tasks whose number of questions is known only after reading them."""
    engine = Scores("fp8", dies_after=0)
    names = {"model": "tiny", "qformat": "fp8", "engine": "drawn"}
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, checkpoint[2], SPEC, recorder, **names, criteria=Criteria())
    assert recorder.notes == [
        "warning: 240 questions are too few for GO even if every answer stays the same: with eval.margin_points=1 and "
        "eval.false_go=0.05, it takes 299 or more."
    ]


@pytest.mark.thorough
def test_a_torn_line_of_a_killed_run_is_asked_again(ask, tmp_path) -> None:
    found = ask(Scores("none"), Scores("fp8", noise=0.05))
    file = tmp_path / "fp8.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    again = Scores("fp8", noise=0.05)
    assert ask(Scores("none"), again) == found
    assert len(again.asked) == 1
