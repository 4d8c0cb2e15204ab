"""Answers of two evaluations that differ, by direction, and how sure the reference was of them.

Flips show what equal accuracies hide (Dutta et al., Accuracy is Not All You Need, NeurIPS 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from eval.results import EvalResult, QuestionRecord


@dataclass(frozen=True, slots=True)
class Flips:
    """Questions that two models answer differently.

    A margin is the difference between the probabilities of the best and the second choice, among the choices.

    Attributes:
        questions: asked of both.
        to_wrong: right under the reference, wrong under the other.
        to_right: the reverse.
        wrong_to_wrong: wrong under both, with another choice.
        margin_kept: median margin of the reference on questions with equal choices; None without any, and for written
            answers.
        margin_flipped: likewise on those with different choices.
    """

    questions: int
    to_wrong: int
    to_right: int
    wrong_to_wrong: int
    margin_kept: float | None
    margin_flipped: float | None

    @property
    def flipped(self) -> int:
        """All questions with different choices."""
        return self.to_wrong + self.to_right + self.wrong_to_wrong


def flips(reference: EvalResult, other: EvalResult) -> Flips:
    """Compare the answers of two evaluations of the same questions, in the same order."""
    pairs = list(zip(reference.records, other.records, strict=True))
    flipped = [(a, b) for a, b in pairs if a.choice != b.choice]
    kept = [margin(a) for a, b in pairs if a.choice == b.choice and len(a.logprobs) > 1]
    changed = [margin(a) for a, _ in flipped if len(a.logprobs) > 1]
    return Flips(
        questions=len(pairs),
        to_wrong=sum(a.correct and not b.correct for a, b in flipped),
        to_right=sum(b.correct and not a.correct for a, b in flipped),
        wrong_to_wrong=sum(not a.correct and not b.correct for a, b in flipped),
        margin_kept=median(kept) if kept else None,
        margin_flipped=median(changed) if changed else None,
    )


def margin(record: QuestionRecord) -> float:
    """Return the probability of the likeliest choice minus that of the second, among the choices."""
    best, second = sorted(record.logprobs, reverse=True)[:2]
    total = sum(math.exp(each - best) for each in record.logprobs)
    return (1 - math.exp(second - best)) / total
