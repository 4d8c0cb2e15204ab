"""Ask two engines the same questions in random order, and stop as soon as the verdict is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.adapter import OnOneBar
from eval.answer_cache import AnswerLog, AskedEngine, CachedSession
from eval.exact import SEED, Answered, PlannedInterim, planned_interims
from eval.harness import ask, note_truncated
from eval.metric import Questions
from eval.results import EvalResult, Sequential, answers_of, compare_pair
from eval.verdict import Criteria, Verdict, judge
from pipelines.document.show import count
from pipelines.domain.progress import Progress


@dataclass(frozen=True, slots=True)
class Asked:
    """Results of both engines on the same questions."""

    baseline: EvalResult
    result: EvalResult
    raw: Mapping[str, Any]


def ask_in_turns(
    baseline: AskedEngine,
    other: AskedEngine,
    tokenizer_dir: Path,
    questions: Questions,
    criteria: Criteria,
    progress: Progress,
    *,
    most: int,
    together: int = 1,
    model: str,
    engine: str,
) -> Asked:
    """Ask until the verdict is known or no question is left.

    Args:
        baseline: the 16-bit engine.
        other: the compressed one.
        tokenizer_dir: folder with the tokenizer of both.
        questions: what may be asked.
        criteria: which loss is acceptable, and how sure the verdict has to be.
        progress: shows the questions asked, and at each interim analysis what is known.
        most: asks so many questions at most.
        together: models that are judged together; the verdict has to hold among so many.
        model: name of the model, for the results.
        engine: what executes both, for the results.
    """
    strict, progress_text = replace(criteria, false_go=criteria.false_go / together), ""
    taken: list[PlannedInterim] = []
    for interim in planned_interims(most):
        taken.append(interim)
        how = Sequential(most, questions.count, SEED, tuple(taken))
        title = f"{interim.questions:,} of {count(most, 'question')}{progress_text}"
        with progress.task(title, 2 * interim.questions, "answers") as advance:
            both = []
            for side in (baseline, other):  # opened only if it has not answered everything before
                with CachedSession(side.opened, AnswerLog(side.answers)) as session:
                    both.append(
                        ask(
                            session, tokenizer_dir, questions, OnOneBar(advance, progress), first=interim.questions,
                            model=model, qformat=side.qformat, engine=engine,
                        )
                    )  # fmt: skip
        before, after = (replace(result, sequential=how) for result, _ in both)
        evidence = compare_pair(before, after).evidence
        changed, (least, most_lost) = evidence.changed, evidence.bounds(strict.false_go)
        progress_text = (
            f", {changed.lost} lost, {changed.gained} gained, loss {100 * least:+.2f} to {100 * most_lost:+.2f}"
        )
        progress.note(f"{interim.questions:,} of {count(most, 'question')} asked{progress_text}")
        verdict = judge([evidence], strict)[0].verdict
        if verdict in (Verdict.GO, Verdict.NO_GO):
            break
        share = planned_interims(most)[-1].share  # would further questions make a baseline one that beats guessing?
        answered = Answered.of(answers_of(before))
        if verdict is Verdict.NOT_MEASURED and answered.is_hopeless(most, strict.margin, strict.false_go, share):
            break
    note_truncated(after, progress)
    return Asked(before, after, both[1][1])
