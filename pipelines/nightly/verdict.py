"""Find regressions from history and expectations. Pure: the same history always gives the same verdict."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from eval.verdict import UNMEASURED, Verdict
from pipelines.domain.formats import QFormat
from pipelines.domain.metrics import FIGURES
from pipelines.nightly.accuracy import (
    Record,
    Regression,
    accuracy_fell,
    accuracy_limit,
    base_name,
    higher_is_better,
    limit_verdict,
)
from pipelines.nightly.config import ExpectSettings, NightlySettings

# Judge whether tonight is worse than before, against the noise of the series itself. Pure; see docs/benchmarking.md.
#
# Values are compared as logarithms, because the noise of rates and latencies is relative: doubling and halving weigh
# the same. Earlier nights are summarized by their median `m` and standard deviation `s`. If nothing changed, the mean
# of `k` future nights follows roughly Student's t around `m` with scale `s * sqrt(1/k + pi/2n)` (the median of n values
# has variance pi/2n). A night is worse if it lies beyond the quantile that matches the configured rate of false alarms,
# and by more than a floor below which a change does not matter. Two tests are made:
#
# * jump: is tonight alone (k = 1) beyond the limit?
# * shift: are the last four nights (k = 4) together beyond their limit, and each of them beyond half of it? This finds
#   changes smaller than the noise of one night, and a single slow night cannot trigger it.
#
# A worse night does not become part of what later nights are compared with, so a regression stays one until it is
# repaired or accepted. After a lasting gain only the nights since then count, so losing the gain is found.

SHIFT_NIGHTS = 4
LEAST_NIGHTS = 4
"""How many earlier nights are needed; with fewer, the noise is unknown."""
State = Literal["learning", "level", "worse", "better", "no value"]


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """Rule that decides whether a difference counts as a change.

    Attributes:
        higher_is_better: True for throughput; False for latency, size and seconds.
        floor: relative change that never counts, e.g. 0.05.
        chance: probability that one test of an unchanged series says "worse".
        window: nights that later ones are compared with, at most: the first of a level, so that it cannot creep away.
    """

    higher_is_better: bool
    floor: float
    chance: float
    window: int


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
    judged: list[JudgedNight] = []
    start, since = 0, None
    for night, value in enumerate(badness):
        if night in restarts:
            good, start, since = [], night, None
        if value is None:
            judged.append(JudgedNight("no value"))
            continue
        recent = [i for i in range(start, night + 1) if badness[i] is not None][-SHIFT_NIGHTS:]
        state, first, centre, limit = _judge(badness, good[: rule.window], recent, rule)
        if state == "worse":
            since = first if since is None else min(since, first)
            good = [i for i in good if i < since]
        else:
            since = None
            good = recent if first != night else [*good, night]
        before, edge = (None, None) if centre is None else (math.exp(sign * centre), math.exp(sign * (centre + limit)))
        judged.append(JudgedNight(state, before, edge, since))
    return judged


def _judge(
    badness: Sequence[float | None], good: list[int], recent: list[int], rule: ChangeRule
) -> tuple[State, int, float | None, float]:
    """Return (state, first night of the change or tonight, centre, limit of a single night)."""
    night = recent[-1]
    values = [value for i in good if (value := badness[i]) is not None]
    if len(values) < LEAST_NIGHTS:
        return "learning", night, None, 0.0
    centre = statistics.median(values)
    jump = _limit(values, 1, rule)
    away = [value - centre for i in recent if (value := badness[i]) is not None]
    older = [value for i in good if i not in recent and (value := badness[i]) is not None]
    if away[-1] > jump:
        return "worse", night, centre, jump
    if len(recent) == SHIFT_NIGHTS and len(older) >= LEAST_NIGHTS:
        middle, shift = statistics.median(older), _limit(older, SHIFT_NIGHTS, rule)
        away = [value + centre - middle for value in away]
        if statistics.fmean(away) > shift and min(away) > shift / 2:
            return "worse", recent[0], middle, jump
        if statistics.fmean(away) < -shift and max(away) < -shift / 2:
            return "better", recent[0], middle, jump
    return ("better" if away[-1] < -jump else "level"), night, centre, jump


def _limit(values: Sequence[float], nights: int, rule: ChangeRule) -> float:
    """Return how far the mean of `nights` nights may lie from the known median, as the natural logarithm of a ratio."""
    n = len(values)
    noise = statistics.stdev(values) * math.sqrt(1 / nights + math.pi / 2 / n)
    return max(math.log1p(rule.floor), quantile(n - 1, rule.chance) * noise)


@cache
def quantile(freedom: int, chance: float) -> float:
    """Return the value that Student's t exceeds with this probability."""
    from scipy.stats import t

    return float(t.isf(chance, freedom))


PAIRED = ("accuracy", "error_share")
"""Metrics that are judged by separate rules."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one cell over the nights, oldest first; the last night is the run being judged."""

    cell: str
    metric: str
    nights: tuple[Record, ...]
    values: tuple[float | None, ...]
    judged: tuple[JudgedNight, ...]


@dataclass(frozen=True, slots=True)
class NightVerdict:
    """Verdict on one run.

    Attributes:
        records: lines of this run.
        series: one series per judged metric of a cell.
        failures: cells that failed, or that are refused but were possible before: (cell, reason).
        questions: comparisons made; the chance of each is `false_alarms` divided by it.
        unmeasured: cells whose limit of accuracy could not be judged.
    """

    run: str
    records: tuple[Record, ...]
    series: tuple[Series, ...]
    regressions: tuple[Regression, ...]
    failures: tuple[tuple[str, str], ...]
    questions: int
    unmeasured: tuple[str, ...] = ()

    def chance(self, settings: NightlySettings) -> float:
        """Return the chance of a false alarm of each comparison, which together have that of the settings."""
        return settings.false_alarms / max(1, self.questions)

    @property
    def exit_code(self) -> int:
        """Return 3 for a regression, 1 if a cell failed or none could run, 4 if a loss was not measured, else 0."""
        if self.regressions:
            return 3
        return 1 if self.failures else UNMEASURED if self.unmeasured else 0


def judge(records: Sequence[Record], run: str, settings: NightlySettings) -> NightVerdict:
    """Judge one run by the runs before it."""
    ours = [record for record in records if record.run == run]
    before = {record.key: nights_before(records, record) for record in ours}
    questions = 2 * sum(len(judged_metrics(r, settings.expect)) for r in ours) + sum(
        r.accuracy is not None for r in ours
    )
    chance = settings.false_alarms / max(1, questions)
    series: list[Series] = []
    regressions: list[Regression] = []
    failures: list[tuple[str, str]] = []
    for record in ours:
        nights = before[record.key]
        if record.status != "done":
            failures += _failure(record, nights, settings.expect)
            continue
        for metric in judged_metrics(record, settings.expect):
            line = judge_series([*nights, record], metric, settings, chance)
            series.append(line)
            regressions += _worse(line)
        regressions += _beyond(record, settings.expect)
        recorded = [*nights, record]
        since = max(restarts_of(recorded, "accuracy", settings.expect), default=0)
        regressions += accuracy_limit(record, settings.expect, chance) + accuracy_fell(
            recorded[since:], settings, chance
        )
    if not any(record.status == "done" for record in ours):
        failures.append(("the run", "no cell could be measured here"))
    unmeasured = tuple(
        record.cell
        for record in ours
        if record.status == "done" and limit_verdict(record, settings.expect, chance) is Verdict.NOT_MEASURED
    )
    return NightVerdict(run, tuple(ours), tuple(series), tuple(regressions), tuple(failures), questions, unmeasured)


def nights_before(records: Sequence[Record], record: Record) -> list[Record]:
    """List finished nights of the same series: same overrides, machine class and protocol."""
    return [
        other
        for other in records
        if other.key == record.key
        and other.machine_class == record.machine_class
        and other.run < record.run
        and other.status == "done"
        # a setting that one of them did not have yet does not count
        and all(other.protocol[key] == record.protocol[key] for key in other.protocol.keys() & record.protocol.keys())
    ]


def judged_metrics(record: Record, expect: ExpectSettings) -> list[str]:
    """Return the metrics of a line that are compared with earlier nights."""
    names = record.metrics if record.status == "done" else {}
    return [name for name in names if base_name(name) in expect.floor_percent and base_name(name) not in PAIRED]


def judge_series(nights: Sequence[Record], metric: str, settings: NightlySettings, chance: float) -> Series:
    """Judge every night of one metric of one cell."""
    base = base_name(metric)
    floor = settings.expect.floor_percent[base] / 100
    rule = ChangeRule(higher_is_better(base), floor, chance, settings.window)
    values = tuple(night.metrics.get(metric) for night in nights)
    restarts = restarts_of(nights, metric, settings.expect)
    return Series(nights[-1].cell, metric, tuple(nights), values, tuple(replay(values, rule, restarts)))


def restarts_of(nights: Sequence[Record], metric: str, expect: ExpectSettings) -> frozenset[int]:
    """Return the first night of every accepted level."""
    firsts = (
        next((place for place, night in enumerate(nights) if night.at >= accepted.since), None)
        for accepted in expect.accepted
        if fnmatchcase(nights[-1].cell, accepted.cell) and fnmatchcase(metric, accepted.metric)
    )
    return frozenset(place for place in firsts if place is not None)


def without_effect(records: Sequence[Record], expect: ExpectSettings) -> tuple[str, ...]:
    """Describe the expectations that match nothing in a history: a mistyped one would be met every night."""
    metrics = {(record.cell, metric) for record in records for metric in (*record.metrics, "status", "accuracy")}
    faults = [
        f"{kind} {{cell: {each.cell}, metric: {each.metric}}}"
        for kind, entries in (("accepted", expect.accepted), ("pinned", expect.pinned))
        for each in entries
        if not any(fnmatchcase(cell, each.cell) and fnmatchcase(metric, each.metric) for cell, metric in metrics)
    ]
    known = {base_name(metric) for _, metric in metrics} | ExpectSettings().floor_percent.keys() | FIGURES.keys()
    faults += [f"floor_percent.{name}" for name in expect.floor_percent if name not in known]
    formats = {name for record in records for name in (record.precision, f"{record.model} {record.precision}")}
    bare = {name.partition("-")[0] for name in formats}  # a limit of fp8 is none of fp8-kv_fp8
    faults += [
        f"accuracy_loss_percent.{name}"
        for name in expect.accuracy_loss_percent
        if name not in formats and (name in bare or name.split()[-1].partition("-")[0] not in set(QFormat))
    ]
    return tuple(f"nightly.expect.{fault} matches nothing in the history, so it has no effect." for fault in faults)


def _worse(line: Series) -> list[Regression]:
    last = line.judged[-1]
    if last.state != "worse" or last.before is None or last.limit is None or last.since is None:
        return []
    now = line.values[-1]
    assert now is not None, "a night without a value is not judged"
    base = base_name(line.metric)
    beyond = now < last.limit if higher_is_better(base) else now > last.limit
    reason = "tonight" if beyond else "the last four nights together"
    good = line.nights[last.since - 1] if last.since else None
    return [Regression(line.cell, line.metric, last.before, now, last.limit, reason, line.nights[last.since], good)]


def _beyond(record: Record, expect: ExpectSettings) -> list[Regression]:
    """Find the metrics beyond a limit that does not depend on earlier nights."""
    pinned = [
        Regression(record.cell, metric, pin.worst, now, pin.worst, f"pinned: {pin.reason}", record, None)
        for pin in expect.pinned
        if fnmatchcase(record.cell, pin.cell)
        for metric, now in record.metrics.items()
        if fnmatchcase(metric, pin.metric) and (now < pin.worst if higher_is_better(metric) else now > pin.worst)
    ]
    percent = expect.floor_percent.get("error_share")
    most = math.inf if percent is None else percent / 100
    return pinned + [
        Regression(record.cell, metric, most, now, most, "requests failed", record, None)
        for metric, now in record.metrics.items()
        if base_name(metric) == "error_share" and now > most
    ]


def _failure(record: Record, nights: list[Record], expect: ExpectSettings) -> list[tuple[str, str]]:
    """Describe a failed cell; a refused cell counts only if it was possible before."""
    if record.status == "failed":
        return [(record.cell, record.reason)]
    start = max(restarts_of([*nights, record], "status", expect), default=0)
    if nights[start:]:
        last = nights[-1]
        return [(record.cell, f"no longer possible (it was with {last.commit[:12]}, {last.at[:10]}): {record.reason}")]
    return []


def is_suspect(records: Sequence[Record], record: Record, settings: NightlySettings, cells: int) -> bool:
    """Return whether to measure a cell again, because something that a benchmark measures looks worse."""
    metrics = [name for name in judged_metrics(record, settings.expect) if " at " in name]
    chance = settings.false_alarms / max(1, 2 * cells * len(metrics))
    nights = [*nights_before(records, record), record]
    return any(judge_series(nights, metric, settings, chance).judged[-1].state == "worse" for metric in metrics)
