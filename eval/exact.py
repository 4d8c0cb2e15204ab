"""The exact paired test: how probable answers as good as those seen would be, if the loss were a given one.

The loss is P(lost) - P(gained), where a question is lost if only the baseline answers it and gained if only the other
model does. The test is the exact unconditional test of non-inferiority for matched pairs (Hsueh, Liu and Chen,
Biometrics 57 (2001) 478-483; Sidik, Statistics in Medicine 22 (2003) 265-278): results are ordered by Tango's score
statistic (Statistics in Medicine 17 (1998) 891-908), and the p-value is the exact trinomial probability of the observed
result and all better ones, at the worst case of what the margin leaves open, P(gained). The worst case is sought within
a confidence set of P(gained), whose error is added (Berger and Boos, JASA 89 (1994) 1012-1016). Bounds are those losses
that the same test does not reject, so they are always within [-1, 1]. docs/accuracy.md explains all this.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

# Whether a model knows more than guessing would: the exact one-sided binomial test behind NOT MEASURED.
#
# A model that guesses has nothing to lose, and one that is better by no more than the margin cannot lose the margin.
# Such a baseline gives GO to anything, so its questions measure no loss. Standard library only, unless the numbers of
# choices differ.

Parts = tuple[tuple[float, int], ...]
"""(probability of a right answer, number of such questions)."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How many questions a model answered right, and how likely each was to be guessed.

    Attributes:
        chances: (probability of guessing right, number of such questions); 0 where an answer is written.
    """

    right: int
    chances: Parts

    @classmethod
    def of(cls, answers: Iterable[tuple[bool, float]]) -> Answered:
        """Count (whether it is right, probability of guessing right) of each question."""
        listed = list(answers)
        return cls(sum(right for right, _ in listed), tuple(sorted(Counter(chance for _, chance in listed).items())))

    @property
    def questions(self) -> int:
        """Number of questions."""
        return sum(count for _, count in self.chances)

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing, 0..1."""
        return sum(chance * count for chance, count in self.chances) / self.questions

    def p_above(self, margin: float = 0.0) -> float:
        """Return the exact p-value of "it is better than guessing by the margin or less".

        It is the probability of as many right answers or more if each question were answered right with its own
        probability of guessing plus the margin.
        """
        return _at_least(self.right, tuple((min(1.0, chance + margin), count) for chance, count in self.chances))

    def is_hopeless(self, most: int, margin: float, level: float, share: float = 1.0) -> bool:
        """Return whether asking `most` questions would not show that it is better than guessing by the margin either.

        That is so if the accuracy that would show it at the last interim analysis is too high for the answers so far,
        by the same test. This only stops the asking; it claims nothing about the model.

        Args:
            most: questions that may be asked.
            margin: a fraction.
            level: probability of error, also of ending too early.
            share: of the probability of error that the last interim analysis has.
        """
        worst = min(1.0, self.chance + margin)
        spread = math.sqrt(worst * (1 - worst) / most)
        needed = min(1.0, worst + NormalDist().inv_cdf(1 - level * share) * spread)
        return 1 - _at_least(self.right + 1, ((needed, self.questions),)) <= level


def _at_least(right: int, parts: Parts) -> float:
    """Return the probability of so many right answers or more."""
    if right <= 0:
        return 1.0
    if len(parts) == 1:
        return min(1.0, math.fsum(_counts(*parts[0])[right:]))
    import numpy as np

    total = np.ones(1)
    for each in parts:
        total = np.convolve(total, _counts(*each))
    return min(1.0, math.fsum(total[right:]))


def _counts(p: float, n: int) -> list[float]:
    """Return the binomial probabilities of 0..n right answers."""
    if p in (0.0, 1.0):
        return [float(k == p * n) for k in range(n + 1)]
    log_p, log_q, whole = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    return [
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_q)
        for k in range(n + 1)
    ]


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


@dataclass(frozen=True, slots=True)
class Changed:
    """How many answers changed."""

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
    n, quantile = changed.questions, NormalDist().inv_cdf(1 - level)
    tango = brentq(
        lambda loss: float(score(changed.lost, changed.gained, n, loss)) + quantile,
        max(changed.loss, -ALMOST_ALL),
        ALMOST_ALL,
    )
    start = float(tango)
    step = max((start - changed.loss) / 50, 1e-4)
    low = high = start
    while p_below(changed, high) > level:
        low, high = high, min(high + step, ALMOST_ALL)
        step *= 2
    while low > changed.loss and p_below(changed, low) <= level:
        low, high = max(low - step, changed.loss), low
        step *= 2
    return float(brentq(lambda loss: p_below(changed, loss) - level, low, high, xtol=1e-6)) if low < high else high


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
    from scipy.special import betainc, gammaln, xlog1py, xlogy

    # the probability of each count (rows) at each rate (columns)
    ways = gammaln(questions + 1) - gammaln(lost + 1) - gammaln(questions - lost + 1)
    losing = np.clip(rates + loss, 0.0, 1.0)
    chance = np.exp(ways[:, None] + xlogy(lost[:, None], losing) + xlog1py((questions - lost)[:, None], -losing))
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

    rate = gain_rate(lost, gained, questions, loss)
    variance = questions * np.maximum(2 * rate + loss * (1 - loss), 0.0)
    beyond = lost - gained - questions * loss
    return np.where(np.abs(beyond) < 1e-12, 0.0, beyond / np.sqrt(np.maximum(variance, 1e-300)))


def gain_rate(lost: Any, gained: Any, questions: float, loss: float) -> Any:
    """Return the most likely P(gained) if the loss is `loss`: a root of 2n q^2 - linear q - constant."""
    import numpy as np

    linear = lost * (1 + loss) + gained * (1 - loss) - 2 * questions * loss
    constant = gained * loss * (1 - loss)
    root = np.sqrt(np.maximum(linear * linear + 8 * questions * constant, 0.0))
    return np.maximum((linear + root) / (4 * questions), max(0.0, -loss))


# Stop as soon as the verdict is known: order of the questions, interim analyses, and their evidence.
#
# The loss is judged at a few interim analyses, after 1/16, 1/8, 1/4, 1/2 and all of the questions, say. To look often
# and to stop at the first good result makes a wrong verdict likelier, so each may use only a share of the probability
# of error: as large as the share of all questions that is new at it (the spending function a(t) = a t of Lan and
# DeMets, Biometrika 70 (1983) 659-663). The p-value of all of them is the least of p / share. By the union bound
#
#     P(min p_k / share_k <= a) <= sum P(p_k <= a share_k) <= a sum share_k <= a
#
# for every level a and wherever asking stops, since each p_k is that of an exact test of a fixed number of questions,
# the shares are fixed beforehand, and they add up to 1 (Slud and Wei, JASA 77 (1982) 862-868, spend the error of
# discrete tests in the same way). It is an ordinary p-value, so Holm's correction applies to it. Bounds are repeated
# confidence bounds (Jennison and Turnbull, JRSS B 51 (1989) 305-361): the closest of all, each with its share.

FEWEST = 30
"""There is no interim analysis at fewer questions: hardly anything could be decided."""
SEED = 20261123
"""Of the order of the questions. It is no setting, so that nobody can try another order until a verdict is good."""


@dataclass(frozen=True, slots=True)
class PlannedInterim:
    """When the loss is judged, and what that costs.

    Attributes:
        questions: asked until then.
        share: of the probability of error, 0..1.
    """

    questions: int
    share: float


@dataclass(frozen=True, slots=True)
class Interim:
    """Answers at one interim analysis.

    Attributes:
        share: of the probability of error that judging them uses up, 0..1.
        before: what the baseline answered; None where that is not known.
    """

    changed: Changed
    share: float
    before: Answered | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of a verdict.

    Attributes:
        interims: that were taken, in order; one with a share of 1 where all questions were asked at once.
        of: questions that could have been asked, where asking may have stopped before; None otherwise.
    """

    interims: tuple[Interim, ...]
    of: int | None = None

    @classmethod
    def once(cls, changed: Changed, before: Answered | None = None) -> Evidence:
        """Return the evidence of an evaluation of a fixed number of questions."""
        return cls((Interim(changed, 1.0, before),))

    @property
    def changed(self) -> Changed:
        """All answers together."""
        return self.interims[-1].changed

    @property
    def mirrored(self) -> Evidence:
        """The same with lost and gained swapped."""
        return replace(self, interims=tuple(replace(each, changed=each.changed.mirrored) for each in self.interims))

    def p_below(self, loss: float) -> float:
        """Return the p-value of "the true loss is `loss` or more", valid wherever asking stopped."""
        return min(1.0, *(p_below(each.changed, loss) / each.share for each in self.interims))

    def p_guessing(self, margin: float) -> float:
        """Return the p-value of "the baseline is better than guessing by the margin or less"; 0 if it is not known."""
        counted = [(each.before, each.share) for each in self.interims if each.before is not None]
        return min(1.0, *(before.p_above(margin) / share for before, share in counted)) if counted else 0.0

    def bounds(self, level: float) -> tuple[float, float]:
        """Return (lower, upper) bound of the loss; each is wrong with a probability of at most `level`."""
        least, most = zip(*(bounds(each.changed, level * each.share) for each in self.interims), strict=True)
        return max(least), min(most)


def planned_interims(questions: int) -> tuple[PlannedInterim, ...]:
    """Return the interim analyses of a number of questions: the last at all, each other one at half of the next."""
    at = [questions]
    while at[-1] >= 2 * FEWEST:
        at.append(at[-1] // 2)
    at.reverse()
    before = [0, *at[:-1]]
    return tuple(PlannedInterim(n, (n - m) / questions) for n, m in zip(at, before, strict=True))


def order(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return all questions as (subject, index), so that every beginning has its share of each subject.

    Within a subject the order is random, and its j-th question comes at a random place of the j-th of equal sections;
    a beginning has at most one question more or less of a subject than its share. Larger numbers of questions of a
    subject keep nothing of the order of smaller ones.
    """
    places = []
    for subject, size in sizes.items():
        draw = random.Random(f"{SEED} {subject}")
        indices = list(range(size))
        draw.shuffle(indices)
        places += [((j + draw.random()) / size, subject, index) for j, index in enumerate(indices)]
    return [(subject, index) for _, subject, index in sorted(places)]
