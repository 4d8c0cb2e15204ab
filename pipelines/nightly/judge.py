"""Is tonight worse than before? A series of nights judged against its own noise. Pure; see docs/nightly.md.

Values are compared as logarithms, because noise of rates and latencies is relative: doubled and halved weigh the same.
Nights before are summed up by their median `m` and standard deviation `s`. If nothing changed, the mean of `k` nights
to come is about Student-t distributed around `m` with scale `s * sqrt(1/k + pi/2n)` (a median of n varies by pi/2n). A
night is worse when it lies beyond the quantile that chance passes once in so many runs, and by more than a floor below
which nobody cares. Two questions are asked:

* jump: is tonight alone (k = 1) beyond the limit?
* shift: are the last four nights (k = 4) together, and each of them by at least half of the limit? That finds what is
  smaller than one night's noise, and a single slow night never answers it.

A night that is worse does not become part of what later nights are compared with, so a regression stays one until it is
repaired or accepted. After a lasting gain only the nights since then count, so losing it again is found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

SHIFT_NIGHTS = 4
State = Literal["learning", "level", "worse", "better", "no value"]


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """What counts as a change.

    Attributes:
        higher_is_better: throughput; False for latency, size and seconds.
        floor: relative change that is never worth a word, e.g. 0.05.
        chance: probability that one question about an unchanged series is answered "worse".
        window: nights before that are looked at, at most.
        least: nights before that are needed; with fewer the noise is not known.
    """

    higher_is_better: bool
    floor: float
    chance: float
    window: int
    least: int


@dataclass(frozen=True, slots=True)
class JudgedNight:
    """One night of a series.

    Attributes:
        state: "learning" while there are too few nights before.
        before: median of the nights before; None while learning.
        limit: value beyond which one night is worse; None while learning.
        since: index of the first night of the stretch that is worse; None when this night is not.
    """

    state: State
    before: float | None = None
    limit: float | None = None
    since: int | None = None


def replay(
    values: Sequence[float | None], rule: ChangeRule, restarts: frozenset[int] = frozenset()
) -> list[JudgedNight]:
    """Judge every night by those before it.

    Args:
        values: one per night, oldest first; None or 0 where nothing could be measured.
        rule: what counts.
        restarts: indices of nights from which on the level was accepted: what was before no longer counts.

    Returns:
        one entry per night.
    """
    sign = -1.0 if rule.higher_is_better else 1.0
    badness = [sign * math.log(value) if value else None for value in values]
    good: list[int] = []  # nights that later ones are compared with
    found: list[JudgedNight] = []
    start, since = 0, None
    for night, value in enumerate(badness):
        if night in restarts:
            good, start, since = [], night, None
        if value is None:
            found.append(JudgedNight("no value"))
            continue
        recent = [i for i in range(start, night + 1) if badness[i] is not None][-SHIFT_NIGHTS:]
        state, first, centre, limit = _judge(badness, good[-rule.window :], recent, rule)
        if state == "worse":
            since = first if since is None else min(since, first)
            good = [i for i in good if i < since]
        else:
            since = None
            good = recent if first != night else [*good, night]
        before, edge = (None, None) if centre is None else (math.exp(sign * centre), math.exp(sign * (centre + limit)))
        found.append(JudgedNight(state, before, edge, since))
    return found


def _judge(
    badness: Sequence[float | None], good: list[int], recent: list[int], rule: ChangeRule
) -> tuple[State, int, float | None, float]:
    """(state, first night of the change or tonight, centre, limit of a single night)."""
    night = recent[-1]
    known = [value for i in good if (value := badness[i]) is not None]
    if len(known) < rule.least:
        return "learning", night, None, 0.0
    centre = statistics.median(known)
    jump = _limit(known, 1, rule)
    away = [value - centre for i in recent if (value := badness[i]) is not None]
    older = [value for i in good if i not in recent and (value := badness[i]) is not None]
    if away[-1] > jump:
        return "worse", night, centre, jump
    if len(recent) == SHIFT_NIGHTS and len(older) >= rule.least:
        middle, shift = statistics.median(older), _limit(older, SHIFT_NIGHTS, rule)
        away = [value + centre - middle for value in away]
        if statistics.fmean(away) > shift and min(away) > shift / 2:
            return "worse", recent[0], middle, jump
        if statistics.fmean(away) < -shift and max(away) < -shift / 2:
            return "better", recent[0], middle, jump
    return ("better" if away[-1] < -jump else "level"), night, centre, jump


def _limit(known: Sequence[float], nights: int, rule: ChangeRule) -> float:
    """How far the mean of `nights` nights may lie from the median of the known ones; natural logarithm of a ratio."""
    n = len(known)
    noise = statistics.stdev(known) * math.sqrt(1 / nights + math.pi / 2 / n)
    return max(math.log1p(rule.floor), quantile(n - 1, rule.chance) * noise)


@cache
def quantile(freedom: int, chance: float) -> float:
    """Value that Student's t with so many degrees of freedom exceeds with this probability."""
    from scipy.stats import t

    return float(t.isf(chance, freedom))
