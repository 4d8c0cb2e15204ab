"""Stop asking as soon as the answer is known: the order of the questions, the looks, and what is proven at them.

The loss is judged at a few *looks*, after 1/16, 1/8, 1/4, 1/2 and all of the questions, say. To look often and to stop
at the first good result makes a wrong verdict likelier, so each look may use only a share of the probability of error:
as large as the share of all questions that is new at it (the spending function a(t) = a t of Lan and DeMets,
Biometrika 70 (1983) 659-663). The p-value of all looks is the least of p / share over them. By the union bound

    P(min p_k / share_k <= a) <= sum P(p_k <= a share_k) <= a sum share_k <= a

for every level a and wherever asking stops, since each p_k is that of an exact test of a fixed number of questions, the
shares are fixed beforehand, and they add up to 1 (Slud and Wei, JASA 77 (1982) 862-868, spend the error of discrete
tests in the same way). It is an ordinary p-value, so Holm's correction applies to it. Bounds are repeated confidence
bounds (Jennison and Turnbull, JRSS B 51 (1989) 305-361): the closest of those of the looks, each with its share.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eval.chance import Answered
from eval.exact import Changed, bounds, p_below

FEWEST = 30
"""No look is taken at fewer questions: hardly anything could be decided."""
SEED = 20261123
"""Of the order of the questions. It is no setting, so that nobody can try another order until a verdict is good."""


@dataclass(frozen=True, slots=True)
class PlannedLook:
    """When the loss is judged, and what that costs.

    Attributes:
        questions: asked until then.
        share: of the probability of error, 0..1.
    """

    questions: int
    share: float


@dataclass(frozen=True, slots=True)
class Look:
    """Answers at one look.

    Attributes:
        changed: answers of the two models.
        share: of the probability of error that judging them uses up, 0..1.
        before: what the baseline answered; None where that is not known.
    """

    changed: Changed
    share: float
    before: Answered | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on.

    Attributes:
        looks: that were taken, in order; one with a share of 1 where all questions were asked before anyone looked.
        of: questions that could have been asked, where asking may have stopped before; None otherwise.
    """

    looks: tuple[Look, ...]
    of: int | None = None

    @classmethod
    def once(cls, changed: Changed, before: Answered | None = None) -> Evidence:
        """Return the evidence of an evaluation of a fixed number of questions."""
        return cls((Look(changed, 1.0, before),))

    @property
    def changed(self) -> Changed:
        """All answers together."""
        return self.looks[-1].changed

    @property
    def mirrored(self) -> Evidence:
        """The same with lost and gained swapped."""
        return replace(self, looks=tuple(replace(each, changed=each.changed.mirrored) for each in self.looks))

    def p_below(self, loss: float) -> float:
        """Return the p-value of "the true loss is `loss` or more", valid wherever asking stopped."""
        return min(1.0, *(p_below(each.changed, loss) / each.share for each in self.looks))

    def p_guessing(self, margin: float) -> float:
        """Return the p-value of "the baseline is better than guessing by the margin or less"; 0 if it is not known."""
        known = [(each.before, each.share) for each in self.looks if each.before is not None]
        return min(1.0, *(before.p_above(margin) / share for before, share in known)) if known else 0.0

    def bounds(self, level: float) -> tuple[float, float]:
        """Return (lower, upper) bound of the loss; each is wrong with a probability of at most `level`."""
        least, most = zip(*(bounds(each.changed, level * each.share) for each in self.looks), strict=True)
        return max(least), min(most)


def planned_looks(questions: int) -> tuple[PlannedLook, ...]:
    """Return the looks at a number of questions: the last at all, each other one at half of the next."""
    at = [questions]
    while at[-1] >= 2 * FEWEST:
        at.append(at[-1] // 2)
    at.reverse()
    before = [0, *at[:-1]]
    return tuple(PlannedLook(n, (n - m) / questions) for n, m in zip(at, before, strict=True))


def order(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return all questions as (subject, index), so that every beginning has its share of each subject.

    Within a subject the order is random, and its j-th question comes at a random place of the j-th of equal sections;
    a beginning has at most one question more or less of a subject than its share. Larger numbers of questions of a
    subject keep nothing of the order of smaller ones.

    Args:
        sizes: number of questions of each subject.
    """
    places = []
    for subject, size in sizes.items():
        draw = random.Random(f"{SEED} {subject}")
        indices = list(range(size))
        draw.shuffle(indices)
        places += [((j + draw.random()) / size, subject, index) for j, index in enumerate(indices)]
    return [(subject, index) for _, subject, index in sorted(places)]
