"""Decide GO, NO-GO, UNDECIDED or NOT MEASURED from two models' answers: the words, and the questions still to ask.

The loss is P(lost) - P(gained), where a question is lost if only the baseline answers it and gained if only the other
model does. One test decides both words, once in each direction:

    GO         the loss is proven to be below the margin,
    NO-GO      the loss is proven to be above the margin,
    UNDECIDED  neither is proven.

Each is the exact paired test, over all interim analyses where asking may have stopped early. Before that, the baseline
has to be better than guessing by more than the margin, else it cannot lose the margin, and the word is NOT MEASURED.
The tests are in `eval.exact`.
docs/accuracy.md explains all this.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from eval.exact import OUTSIDE, Changed, Evidence, gain_rate, p_below, planned_interims

if TYPE_CHECKING:
    from eval.config import EvalSettings


class Verdict(StrEnum):
    """Every word that may stand as a verdict."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNDECIDED = "UNDECIDED"
    NOT_MEASURED = "NOT MEASURED"


UNMEASURED = 4
"""Exit code of a command that was to judge a loss of accuracy and could not measure any."""
WHAT_MEASURES = (
    "Ask questions that the model can answer: another task (eval=mmlu, from the Hub or eval.dataset_path=/a/copy), or "
    "your own (eval=local eval.path=questions.csv)."
)


@dataclass(frozen=True, slots=True)
class Criteria:
    """When a loss is acceptable, and how sure a verdict has to be.

    Attributes:
        margin_points: smallest loss that is not acceptable, in percentage points of all questions.
        false_go: highest probability of GO for a model whose loss is the margin or more; also of NO-GO for one whose
            loss is the margin or less.
        power: probability of a verdict that the number of further questions is chosen for.
    """

    margin_points: float = 1.0
    false_go: float = 0.05
    power: float = 0.8

    @property
    def margin(self) -> float:
        """The margin as a fraction of all questions."""
        return self.margin_points / 100

    @classmethod
    def of(cls, settings: "EvalSettings") -> "Criteria":
        """Return the criteria that the settings state."""
        return cls(settings.margin_points, settings.false_go)


USUAL = Criteria()
"""Criteria of conf/eval, for callers without settings."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with what it rests on.

    Attributes:
        least: lower bound of the loss, a fraction; the true loss is below it with a probability of at most `false_go`.
        most: upper bound of the loss, likewise.
        p_go: probability of answers as good as these if the loss were the margin, corrected for `compared`.
        p_no_go: probability of answers as bad as these if the loss were the margin, corrected for `compared`.
        compared: models that were judged together.
        needed: questions that would decide with the probability `Criteria.power` if answers go on changing at the rate
            seen; None if decided or not measured, or if the loss seen equals the margin, so that no number is known.
        p_guessing: probability of as many right answers of the baseline, or more, if it were better than guessing by
            the margin; above `false_go`, nothing was measured.
    """

    verdict: Verdict
    least: float
    most: float
    p_go: float
    p_no_go: float
    compared: int
    needed: int | None
    p_guessing: float = 0.0


def judge(pairs: Sequence[Evidence], criteria: Criteria) -> list[Judgement]:
    """Judge models that are compared with each other, usually formats of one model.

    The probability that any of them gets a false GO is at most `false_go`, and the same holds for NO-GO: p-values are
    corrected by Holm's method (Scandinavian Journal of Statistics 6 (1979) 65-70). The bounds are those of each model
    alone; the number of further questions allows for the correction.
    """
    margin, level = criteria.margin, criteria.false_go
    go = holm([pair.p_below(margin) for pair in pairs])
    no_go = holm([pair.mirrored.p_below(-margin) for pair in pairs])
    judgements = []
    for pair, good, bad in zip(pairs, go, no_go, strict=True):
        guessing = pair.p_guessing(margin)
        verdict = verdict_of(good, bad, level, guessing)
        needed = questions_needed(pair, criteria, len(pairs)) if verdict is Verdict.UNDECIDED else None
        least, most = pair.bounds(level)
        judgements.append(Judgement(verdict, least, most, good, bad, len(pairs), needed, guessing))
    return judgements


def verdict_of(p_go: float, p_no_go: float, level: float, p_guessing: float = 0.0) -> Verdict:
    """Return the word that two p-values of opposite directions give at this level, if the baseline beats guessing."""
    if p_guessing > level:
        return Verdict.NOT_MEASURED
    return Verdict.GO if p_go <= level else Verdict.NO_GO if p_no_go <= level else Verdict.UNDECIDED


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def least_for_no_go(criteria: Criteria, compared: float = 1) -> int:
    """Return the fewest questions for a NO-GO if all answers are lost: then P(lost) <= (1 + margin) / 2."""
    return math.ceil(math.log(criteria.false_go / compared - OUTSIDE) / math.log((1 + criteria.margin) / 2))


@lru_cache
def least_for_go(criteria: Criteria, compared: float = 1) -> int:
    """Return the fewest questions with which GO is possible, if not one answer changes."""
    level = criteria.false_go / compared
    low = high = _least_possible(criteria, level)
    while not _unchanged_is_go(high, criteria, level):
        low, high = high, high + max(high // 8, 1)
    return low + bisect_left(range(low, high), True, key=lambda n: _unchanged_is_go(n, criteria, level))


def _least_possible(criteria: Criteria, level: float) -> int:
    """Return a number of questions without which GO is not possible: the chance of no change is (1 - margin)^n."""
    return math.ceil(math.log(level - OUTSIDE) / math.log1p(-criteria.margin))


def _unchanged_is_go(questions: int, criteria: Criteria, level: float) -> bool:
    return p_below(Changed(questions, 0, 0), criteria.margin) <= level


def least_to_stop(criteria: Criteria) -> int:
    """Return the fewest questions of a task with which GO is possible where asking may stop early.

    At its last interim analysis, only a share of the probability of error is left, half of it or little more.
    """
    questions = least_for_go(criteria)
    if not go_is_possible(questions, criteria):
        questions = least_for_go(criteria, 2) - 1
    while not go_is_possible(questions, criteria):
        questions += 1
    return questions


def go_is_possible(questions: int, criteria: Criteria) -> bool:
    """Return whether any interim analysis of so many questions at most gives GO if not one answer changes."""
    for interim in reversed(planned_interims(questions)):
        level = criteria.false_go * interim.share
        if level <= 2 * OUTSIDE or interim.questions < _least_possible(criteria, level):
            continue
        if _unchanged_is_go(interim.questions, criteria, level):
            return True
    return False


def too_few(questions: int, criteria: Criteria, *, stops: bool) -> str:
    """Explain why a number of questions is too small for GO; empty if it is not."""
    if questions >= 2 * _least_possible(criteria, criteria.false_go / 2):  # enough, and no need to load SciPy
        return ""
    least = least_to_stop(criteria) if stops else least_for_go(criteria)
    if questions >= least:
        return ""
    early = " where asking may stop early" if stops else ""
    return (
        f"{questions:,} question{' is' if questions == 1 else 's are'} too few for GO even if every answer stays"
        f" the same: with eval.margin_points={criteria.margin_points:g} and eval.false_go={criteria.false_go:g}, it"
        f" takes {least:,} or more{early}."
    )


def questions_needed(evidence: Evidence, criteria: Criteria, compared: int = 1) -> int | None:
    """Return how many questions would decide with the probability `power`, if answers go on changing at the rate seen.

    Normal approximation of the score test (Liu, Hsueh, Hsieh and Chen, Statistics in Medicine 21 (2002) 231-245), and
    at least the number that GO needs if no answer changes, which is exact. Where asking may stop early, they are for
    the last interim analysis alone, which has half of the probability of error or more.

    Returns:
        None if the loss seen equals the margin: then no number of questions is known to decide.
    """
    changed, parts = evidence.changed, compared if evidence.of is None else 2 * compared
    if abs(changed.loss - criteria.margin) < 1e-12:
        return None
    if changed.loss < criteria.margin:
        margin, least = criteria.margin, least_for_go(criteria, parts)
    else:
        changed, margin, least = changed.mirrored, -criteria.margin, least_for_no_go(criteria, parts)
    apart, least = margin - changed.loss, max(least, changed.questions + 1)
    if not changed.lost + changed.gained:
        return least
    lost, gained = changed.lost / changed.questions, changed.gained / changed.questions
    at_margin = 2 * float(gain_rate(lost, gained, 1.0, margin)) + margin * (1 - margin)
    as_seen = lost + gained - changed.loss**2
    normal = NormalDist()
    false, missed = normal.inv_cdf(1 - criteria.false_go / parts), normal.inv_cdf(criteria.power)
    return max(least, math.ceil(((false * math.sqrt(at_margin) + missed * math.sqrt(as_seen)) / apart) ** 2))
