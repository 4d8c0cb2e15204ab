"""Compare two results on the same questions: which answers changed. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.exact import Answered, Changed, Evidence, Look
from eval.results import PLAIN_PROMPTS, EvalResult, Sequential
from pipelines.domain.errors import UserError


@dataclass(frozen=True, slots=True)
class Paired:
    """The same questions, answered before and after.

    Attributes:
        questions: number of questions.
        baseline_accuracy: fraction right before, 0..1.
        accuracy: fraction right after, 0..1.
        lost: questions right before and wrong after.
        gained: questions wrong before and right after.
        flips: questions answered differently, right or wrong.
        difference: accuracy after minus before; the mean of the per-question differences.
        evidence: what a verdict is made from.
    """

    questions: int
    baseline_accuracy: float
    accuracy: float
    lost: int
    gained: int
    flips: int
    difference: float
    evidence: Evidence

    @property
    def loss_percent(self) -> float | None:
        """Loss in percent of the baseline's accuracy, negative for a gain; None when the baseline got nothing right.

        60 % -> 57 % is a loss of 5 %.
        """
        right_before = self.baseline_accuracy * self.questions
        return 100 * (self.lost - self.gained) / right_before if right_before else None


def mcnemar_exact(lost: int, gained: int) -> float:
    """Return the two-sided exact p-value of McNemar's test.

    If only luck changed, each changed question is lost or gained like the toss of a fair coin:
    p = 2 * P(Binomial(lost + gained, 1/2) <= min(lost, gained)), at most 1.
    6 lost, 0 gained: 2 / 64 = 0.03125.
    """
    changed, fewer = lost + gained, min(lost, gained)
    term = total = 1  # C(changed, 0); integers, so that nothing is rounded before the division
    for k in range(1, fewer + 1):
        term = term * (changed - k + 1) // k
        total += term
    return min(1.0, 2 * total / int(2**changed))


def compare_pair(baseline: EvalResult, other: EvalResult) -> Paired:
    """Pair two results question by question.

    Raises:
        UserError: the two did not answer the same questions.
    """
    _check_same_questions(baseline, other)
    before, after = baseline.records, other.records
    changes = [int(b.correct) - int(a.correct) for a, b in zip(before, after, strict=True)]
    return Paired(
        questions=len(changes),
        baseline_accuracy=sum(a.correct for a in before) / len(before),
        accuracy=sum(b.correct for b in after) / len(after),
        lost=changes.count(-1),
        gained=changes.count(1),
        flips=sum(a.choice != b.choice for a, b in zip(before, after, strict=True)),
        difference=sum(changes) / len(changes),
        evidence=evidence_of(changes, answers_of(baseline), other.sequential),
    )


def answers_of(result: EvalResult) -> list[tuple[bool, float]]:
    """Return, per question, whether it was answered right and how probable that is by guessing among its choices."""
    return [(each.correct, 1 / len(each.logprobs) if len(each.logprobs) > 1 else 0.0) for each in result.records]


def evidence_of(
    changes: Sequence[int], before: Sequence[tuple[bool, float]], sequential: Sequential | None
) -> Evidence:
    """Return what a verdict is made from.

    Args:
        changes: per question, in the order asked, -1 if it was lost, 1 if it was gained, 0 otherwise.
        before: what the baseline answered, as `answers_of` returns it.
        sequential: how asking went, if it could stop early.
    """
    if sequential is None:
        return Evidence.once(_counted(changes), Answered.of(before))
    looks = (
        Look(_counted(changes[: look.questions]), look.share, Answered.of(before[: look.questions]))
        for look in sequential.looks
    )
    return Evidence(tuple(looks), sequential.of)


def _counted(changes: Sequence[int]) -> Changed:
    return Changed(len(changes), changes.count(-1), changes.count(1))


def logprob_shift(baseline: EvalResult, other: EvalResult) -> tuple[float | None, float | None]:
    """Return mean and maximum of the distance between the log probabilities of a choice in two results.

    It shows a change of the model's output that is too small to change an answer. Written answers have none.

    Raises:
        UserError: the two did not answer the same questions.
    """
    _check_same_questions(baseline, other)
    both = zip(baseline.records, other.records, strict=True)
    shifts = [abs(new - old) for a, b in both for old, new in zip(a.logprobs, b.logprobs, strict=True)]
    return (sum(shifts) / len(shifts), max(shifts)) if shifts else (None, None)


def above_chance(result: EvalResult) -> bool:
    """Return whether the model answers better than by guessing among the choices (exact one-sided test, 5 %)."""
    return Answered.of(answers_of(result)).p_above() <= 0.05


def _check_same_questions(baseline: EvalResult, other: EvalResult) -> None:
    for name in ("task", "metric", "num_fewshot", "limit", "sequential", *PLAIN_PROMPTS, "prompts_sha256"):
        ours, theirs = getattr(baseline, name), getattr(other, name)
        if ours != theirs:
            raise UserError(
                f"{baseline.model} {baseline.qformat} and {other.model} {other.qformat} were not asked the same"
                f" questions: {name} is {ours!r} and {theirs!r}.",
                todo="Evaluate both with the same eval settings.",
            )
