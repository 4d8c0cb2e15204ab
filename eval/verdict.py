"""Decide GO, NO-GO or UNDECIDED from the answers that changed: exact paired test, bounds of the loss, questions to ask.

The loss is P(lost) - P(gained), where a question is lost if only the baseline answers it and gained if only the other
model does. One test decides both words, once in each direction:

    GO         the loss is proven to be below the margin,
    NO-GO      the loss is proven to be above the margin,
    UNDECIDED  neither is proven.

The test is the exact unconditional test of non-inferiority for matched pairs (Hsueh, Liu and Chen, Biometrics 57
(2001) 478-483; Sidik, Statistics in Medicine 22 (2003) 265-278): results are ordered by Tango's score statistic
(Statistics in Medicine 17 (1998) 891-908), and the p-value is the exact trinomial probability of the observed result
and all better ones, at the worst case of what the margin leaves open, P(gained). The worst case is sought within a
confidence set of P(gained), whose error is added (Berger and Boos, JASA 89 (1994) 1012-1016). Bounds are those losses
that the same test does not reject, so they are always within [-1, 1]. docs/accuracy-evidence.md explains all this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.settings.engine import EvalSettings

OUTSIDE = 1e-7
"""Probability that P(gained) is outside the confidence set in which the worst case is sought; added to each p-value."""

GRID = 48
"""Values of P(gained) that are tried first."""

REFINED = 33
"""Values tried between the neighbours of the worst of them; more change a p-value by less than 0.05 % of it."""

TAIL_SD = 7.0
"""Counts further from their mean than this many standard deviations (and 30) are left out: less than 1e-10."""

NEGLIGIBLE = 1e-13
"""Counts that are less likely than this are left out: less than 1e-9 for any number of questions asked here."""

ALMOST_ALL = 1 - 1e-9
"""Largest loss that is tested; at a loss of exactly 1 every count has probability 0 or 1."""


class Verdict(StrEnum):
    """The three words, and what a baseline has instead."""

    GO = "GO"
    NO_GO = "NO-GO"
    UNDECIDED = "UNDECIDED"


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
    def of(cls, settings: EvalSettings) -> Criteria:
        """Return the criteria that the settings state."""
        return cls(settings.margin_points, settings.false_go, settings.power)


USUAL = Criteria()
"""Criteria of conf/eval, for callers without settings."""


@dataclass(frozen=True, slots=True)
class Changed:
    """How many answers changed.

    Attributes:
        questions: number of questions.
        lost: right before and wrong after.
        gained: wrong before and right after.
    """

    questions: int
    lost: int
    gained: int

    @property
    def loss(self) -> float:
        """Net loss as a fraction of the questions; negative for a gain."""
        return (self.lost - self.gained) / self.questions

    @property
    def mirrored(self) -> Changed:
        """The same with lost and gained swapped: what is proven of its loss is proven of our gain."""
        return Changed(self.questions, self.gained, self.lost)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with what it rests on.

    Attributes:
        verdict: GO, NO-GO or UNDECIDED.
        least: lower bound of the loss, a fraction; the true loss is below it with a probability of at most `false_go`.
        most: upper bound of the loss, likewise.
        p_go: probability of answers as good as these if the loss were the margin, corrected for `compared`.
        p_no_go: probability of answers as bad as these if the loss were the margin, corrected for `compared`.
        compared: models that were judged together.
        needed: questions that would decide with the probability `Criteria.power` if answers go on changing at the rate
            seen; None if decided, or if the loss seen equals the margin, so that no number is known.
    """

    verdict: Verdict
    least: float
    most: float
    p_go: float
    p_no_go: float
    compared: int
    needed: int | None


def judge(pairs: Sequence[Changed], criteria: Criteria) -> list[Judgement]:
    """Judge models that are compared with each other, usually formats of one model.

    The probability that any of them gets a false GO is at most `false_go`, and the same holds for NO-GO: p-values are
    corrected by Holm's method (Scandinavian Journal of Statistics 6 (1979) 65-70). The bounds are those of each model
    alone; the number of further questions allows for the correction.
    """
    margin, level = criteria.margin, criteria.false_go
    go = holm([p_below(pair, margin) for pair in pairs])
    no_go = holm([p_below(pair.mirrored, -margin) for pair in pairs])
    found = []
    for pair, good, bad in zip(pairs, go, no_go, strict=True):
        verdict = verdict_of(good, bad, level)
        needed = questions_needed(pair, criteria, len(pairs)) if verdict is Verdict.UNDECIDED else None
        least, most = bounds(pair, level)
        found.append(Judgement(verdict, least, most, good, bad, len(pairs), needed))
    return found


def verdict_of(p_go: float, p_no_go: float, level: float) -> Verdict:
    """Return the word that two p-values of opposite directions give at this level."""
    return Verdict.GO if p_go <= level else Verdict.NO_GO if p_no_go <= level else Verdict.UNDECIDED


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def bounds(changed: Changed, level: float) -> tuple[float, float]:
    """Return (lower, upper) bound of the loss; each is wrong with a probability of at most `level`."""
    return -_upper(changed.mirrored, level), _upper(changed, level)


@lru_cache(maxsize=4096)
def _upper(changed: Changed, level: float) -> float:
    """Return the greatest loss that is not rejected at this level."""
    from scipy.optimize import brentq

    if changed.lost == changed.questions or p_below(changed, ALMOST_ALL) > level:
        return 1.0
    # An exact p-value is expensive for thousands of questions, so the search starts at Tango's own bound.
    start = float(brentq(_beyond_normal(changed, level), max(changed.loss, -ALMOST_ALL), ALMOST_ALL))
    step = max((start - changed.loss) / 50, 1e-4)
    low = high = start
    while p_below(changed, high) > level:
        low, high = high, min(high + step, ALMOST_ALL)
        step *= 2
    while low > changed.loss and p_below(changed, low) <= level:
        low, high = max(low - step, changed.loss), low
        step *= 2
    return float(brentq(lambda loss: p_below(changed, loss) - level, low, high, xtol=1e-6)) if low < high else high


def _beyond_normal(changed: Changed, level: float) -> Callable[[float], float]:
    """Return a function of the loss that is positive where the score test with normal quantiles does not reject it."""
    quantile = NormalDist().inv_cdf(1 - level)
    return lambda loss: float(score(changed.lost, changed.gained, changed.questions, loss)) + quantile


@lru_cache(maxsize=65536)
def p_below(changed: Changed, loss: float) -> float:
    """Return the p-value of "the true loss is `loss` or more": if it is small, the true loss is smaller.

    It is the probability of an equal or better result (Tango's statistic), with the least favourable P(gained).
    """
    import numpy as np

    n = changed.questions
    rates = _possible_gains(changed, loss)
    means = n * np.clip(rates + loss, 0.0, 1.0)
    far = TAIL_SD * np.sqrt(means) + 30
    lost = np.arange(max(0, int((means - far).min())), min(n, int((means + far).max())) + 1)
    least = _least_gained(changed, lost, loss)
    coarse = _chance_of_better(n, lost, least, rates, loss)
    worst = int(coarse.argmax())
    between = np.linspace(rates[max(worst - 1, 0)], rates[min(worst + 1, GRID - 1)], REFINED)
    fine = _chance_of_better(n, lost, least, between, loss)
    return min(1.0, float(max(coarse.max(), fine.max())) + OUTSIDE)


def _chance_of_better(questions: int, lost: Any, least_gained: Any, rates: Any, loss: float) -> Any:
    """Return, for each P(gained), the probability that as many answers are gained as each number of lost ones needs."""
    import numpy as np
    from scipy.special import betainc

    chance = _binomial(questions, lost, np.clip(rates + loss, 0.0, 1.0))
    share = np.clip(rates / np.maximum(1 - rates - loss, 1e-300), 0.0, 1.0)  # of gained among those not lost
    row, column = np.nonzero((chance > NEGLIGIBLE) & (least_gained <= questions - lost)[:, None])
    needed = least_gained[row]
    enough = betainc(np.maximum(needed, 1), questions - lost[row] - needed + 1, share[column])
    enough[needed <= 0] = 1.0
    return np.bincount(column, weights=chance[row, column] * enough, minlength=len(rates))


def _possible_gains(changed: Changed, loss: float) -> Any:
    """Return values of P(gained) within its exact (Clopper-Pearson) interval, as far as this loss allows them."""
    import numpy as np
    from scipy.special import betaincinv

    n, gained = changed.questions, changed.gained
    low = betaincinv(gained, n - gained + 1, OUTSIDE / 2) if gained else 0.0
    high = betaincinv(gained + 1, n - gained, 1 - OUTSIDE / 2) if gained < n else 1.0
    smallest, greatest = max(0.0, -loss), (1 - loss) / 2
    low, high = (min(max(float(end), smallest), greatest) for end in (low, high))
    # Even on the scale of the square root, on which a rate's standard error is the same everywhere.
    return np.clip(np.linspace(math.sqrt(low), math.sqrt(high), GRID) ** 2, smallest, greatest)


def _least_gained(changed: Changed, lost: Any, loss: float) -> Any:
    """Return, for each number of lost answers, how many gained ones make the result as good as the one observed."""
    import numpy as np

    n = changed.questions
    observed = float(score(changed.lost, changed.gained, n, loss)) + 1e-9
    low, high = np.zeros_like(lost), n - lost + 1  # high: not possible
    while (low < high).any():
        middle = (low + high) // 2
        inside = (middle <= n - lost) & (score(lost, np.minimum(middle, n - lost), n, loss) <= observed)
        low, high = np.where(inside | (low >= high), low, middle + 1), np.where(inside, middle, high)
    return low


def score(lost: Any, gained: Any, questions: int, loss: float) -> Any:
    """Return Tango's score statistic of arrays of counts: positive if more was lost than `loss`."""
    import numpy as np

    rate = _gain_rate(lost, gained, questions, loss)
    variance = questions * np.maximum(2 * rate + loss * (1 - loss), 0.0)
    beyond = lost - gained - questions * loss
    return np.where(np.abs(beyond) < 1e-12, 0.0, beyond / np.sqrt(np.maximum(variance, 1e-300)))


def _gain_rate(lost: Any, gained: Any, questions: float, loss: float) -> Any:
    """Return the most likely P(gained) if the loss is `loss`: a root of 2n q^2 - linear q - constant."""
    import numpy as np

    linear = lost * (1 + loss) + gained * (1 - loss) - 2 * questions * loss
    constant = gained * loss * (1 - loss)
    root = np.sqrt(np.maximum(linear * linear + 8 * questions * constant, 0.0))
    return np.maximum((linear + root) / (4 * questions), max(0.0, -loss))


def _binomial(trials: int, counts: Any, rates: Any) -> Any:
    """Return the probability of each count (rows) at each rate (columns)."""
    import numpy as np
    from scipy.special import gammaln, xlog1py, xlogy

    ways = gammaln(trials + 1) - gammaln(counts + 1) - gammaln(trials - counts + 1)
    return np.exp(ways[:, None] + xlogy(counts[:, None], rates) + xlog1py((trials - counts)[:, None], -rates))


def least_for_no_go(criteria: Criteria, compared: int = 1) -> int:
    """Return the fewest questions for a NO-GO if all answers are lost: then P(lost) <= (1 + margin) / 2."""
    return math.ceil(math.log(criteria.false_go / compared - OUTSIDE) / math.log((1 + criteria.margin) / 2))


def least_for_go(criteria: Criteria, compared: int = 1) -> int:
    """Return the fewest questions with which GO is possible, if not one answer changes: (1 - margin)^n = false_go."""
    return math.ceil(math.log(criteria.false_go / compared - OUTSIDE) / math.log1p(-criteria.margin))


def questions_needed(changed: Changed, criteria: Criteria, compared: int = 1) -> int | None:
    """Return how many questions would decide with the probability `power`, if answers go on changing at the rate seen.

    Normal approximation of the score test (Liu, Hsueh, Hsieh and Chen, Statistics in Medicine 21 (2002) 231-245), and
    at least the number that GO needs if no answer changes, which is exact.

    Returns:
        None if the loss seen equals the margin: then no number of questions is known to decide.
    """
    if abs(changed.loss - criteria.margin) < 1e-12:
        return None
    if changed.loss < criteria.margin:
        margin, least = criteria.margin, least_for_go(criteria, compared)
    else:
        changed, margin, least = changed.mirrored, -criteria.margin, least_for_no_go(criteria, compared)
    apart, least = margin - changed.loss, max(least, changed.questions + 1)
    if not changed.lost + changed.gained:
        return least
    lost, gained = changed.lost / changed.questions, changed.gained / changed.questions
    at_margin = 2 * float(_gain_rate(lost, gained, 1.0, margin)) + margin * (1 - margin)
    as_seen = lost + gained - changed.loss**2
    normal = NormalDist()
    false, missed = normal.inv_cdf(1 - criteria.false_go / compared), normal.inv_cdf(criteria.power)
    return max(least, math.ceil(((false * math.sqrt(at_margin) + missed * math.sqrt(as_seen)) / apart) ** 2))
