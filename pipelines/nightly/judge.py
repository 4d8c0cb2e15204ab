"""Judge whether tonight is worse than before, against the noise of the series itself. Pure; see docs/benchmarking.md.

Values are compared as logarithms, because the noise of rates and latencies is relative: doubling and halving weigh the
same. Earlier nights are summarized by their median `m` and standard deviation `s`. If nothing changed, the mean of `k`
future nights follows roughly Student's t around `m` with scale `s * sqrt(1/k + pi/2n)` (the median of n values has
variance pi/2n). A night is worse if it lies beyond the quantile that matches the configured rate of false alarms, and
by more than a floor below which a change does not matter. Two tests are made:

* jump: is tonight alone (k = 1) beyond the limit?
* shift: are the last four nights (k = 4) together beyond their limit, and each of them beyond half of it? This finds
  changes smaller than the noise of one night, and a single slow night cannot trigger it.

A worse night does not become part of what later nights are compared with, so a regression stays one until it is
repaired or accepted. After a lasting gain only the nights since then count, so losing the gain is found.
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
    """Rule for what counts as a change.

    Attributes:
        higher_is_better: True for throughput; False for latency, size and seconds.
        floor: relative change that never counts, e.g. 0.05.
        chance: probability that one test of an unchanged series says "worse".
        window: how many earlier nights are considered at most.
        least: how many earlier nights are needed; with fewer, the noise is unknown.
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
        state: "learning" while there are too few earlier nights.
        before: median of the earlier nights; None while learning.
        limit: value beyond which one night is worse; None while learning.
        since: index of the first night of the worse stretch; None if this night is not worse.
    """

    state: State
    before: float | None = None
    limit: float | None = None
    since: int | None = None


def replay(
    values: Sequence[float | None], rule: ChangeRule, restarts: frozenset[int] = frozenset()
) -> list[JudgedNight]:
    """Judge every night by the nights before it.

    Args:
        values: one per night, oldest first; None or 0 if nothing could be measured.
        rule: for what counts as a change.
        restarts: indices of nights from which a new level was accepted; earlier nights no longer count.

    Returns:
        one entry per night.
    """
    sign = -1.0 if rule.higher_is_better else 1.0
    badness = [sign * math.log(value) if value else None for value in values]
    good: list[int] = []  # nights that later nights are compared with
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
    """Return (state, first night of the change or tonight, centre, limit of a single night)."""
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
    """Return how far the mean of `nights` nights may lie from the known median, as the natural logarithm of a ratio."""
    n = len(known)
    noise = statistics.stdev(known) * math.sqrt(1 / nights + math.pi / 2 / n)
    return max(math.log1p(rule.floor), quantile(n - 1, rule.chance) * noise)


@cache
def quantile(freedom: int, chance: float) -> float:
    """Return the value that Student's t exceeds with this probability."""
    from scipy.stats import t

    return float(t.isf(chance, freedom))
