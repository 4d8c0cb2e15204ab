"""Whether a model knows more than guessing would: the exact one-sided binomial test behind NOT MEASURED.

A model that guesses has nothing to lose, and one that is better by no more than the margin cannot lose the margin.
Such a baseline gives GO to anything, so its questions measure no loss. Standard library only, unless the numbers of
choices differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

Parts = tuple[tuple[float, int], ...]
"""(probability of a right answer, number of such questions)."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How many questions a model answered right, and how likely each was to be guessed.

    Attributes:
        right: questions answered right.
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

        So it is where the accuracy that would show it at the last look is too high for the answers so far, by the same
        test. This only ends the asking: nothing is claimed of the model.

        Args:
            most: questions that may be asked.
            margin: a fraction.
            level: probability of error, also of ending too early.
            share: of the probability of error that the last look has.
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
