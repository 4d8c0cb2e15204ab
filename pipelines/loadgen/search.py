"""Search the largest load within the limits: few probes, an interval, and the limit that binds.

A load is within the limits if in the long run at least a share of its requests, the attainment, meets every limit. Near
that load the log odds of a good request fall in a line with the logarithm of the load, and the capacity is where the
line crosses the attainment. Requests near each other in time wait in the same queue, so they are not independent: the
bad share of stretches of time varies by a factor more, which batches estimate and which widens the interval.

The search goes through three stages. Short probes find the order of magnitude, longer ones a first line. Then loads and
lengths of the final probes are fixed before the first of them runs, and the answer is computed from these alone: a
probe that was chosen because of a lucky result does not count, so the error is that of a planned experiment. If the
interval is too wide, another planned set follows, twice at most.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import numpy as np

from pipelines.domain.benchmark import LargestLoad, Slo
from pipelines.domain.summary import RequestColumns, Window, met
from pipelines.loadgen.config import MOST_CONCURRENCY, BenchmarkSettings

Stage = Literal["coarse", "explore", "final"]
CONFIDENCE = 0.95
COARSE_SECONDS = (6.0, 20.0)
LONGEST_SECONDS = 120.0
"""Longest window of a probe where `duration_s` is "auto"."""
_STEP, _BRACKET = 4.0, 1.4
_COARSE_BAD, _BAD = 5, 20
"""Bad requests that a probe at the capacity should see."""
_COARSE_SPANS, _SPANS = 6, 20
"""Shortest window, in durations of a request."""
_SETTLE, _COARSE_SETTLE_S = 0.4, 3.0
"""Warm-up of a longer probe, as a share of its window; of a short one, up to half of it."""
_NEAR = 0.4
"""Distance, as a logarithm of the load, up to which the line is trusted."""
_BATCHES = 8
_CORRELATED = 20
"""Shortest window of a final probe, in requests whose sum says as much as one independent request."""
_EVENTS = 4
"""Independent bad requests that exploring must have seen before the final probes are planned."""
_DESIGN = (0.0, 1.0, -1.0, 0.5)
"""Where the final probes are, in distances over which the odds change by a factor e."""
_SETS = 3
_GROW = 1.5
"""Factor by which a probe that explores is longer than the one before."""
_SPARE, _WIDER, _BEYOND, _BELOW = 1.2, 2.0, 1.1, 0.97
_SLOPES = np.geomspace(0.4, 300.0, 80)
_USUAL_SLOPE, _SLOPE_SPREAD = 12.0, 1.2
"""What is known of slopes beforehand: the usual one, and the standard deviation of its logarithm. Without it, two noisy
probes can make a line so flat that it meets the attainment nowhere near."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """A load to try: requests per second or concurrency, the length of warm-up and window in seconds."""

    load: float
    seconds: float
    warmup_s: float
    stage: Stage


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Outcome of a load that was tried.

    Attributes:
        good: bool[n], whether each request that was due in the window met every limit, in the order due.
        missed: requests that missed each limit, or failed ("errors").
        rate: finished requests per second.
        e2e_s: mean duration of a request; None if none finished.
        client_bound: the client was the limit, so the probe says nothing about the server.
    """

    plan: ProbePlan
    good: Any
    missed: Mapping[str, int]
    rate: float
    e2e_s: float | None
    client_bound: bool = False

    @property
    def load(self) -> float:
        """The load."""
        return self.plan.load

    @property
    def bad(self) -> int:
        """Requests that missed a limit."""
        return len(self.good) - int(np.sum(self.good))

    @property
    def bad_share(self) -> float:
        """Share of the requests that missed a limit; 1 if nothing was measured."""
        return self.bad / len(self.good) if len(self.good) else 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through probes: capacity, its interval, d log odds / d log load, and by how much chance is enlarged."""

    load: float
    low: float
    high: float
    slope: float
    dispersion: float
    probes: tuple[Probe, ...]

    @property
    def half_width(self) -> float:
        """Half of the interval, as a logarithm; infinite if a side is open."""
        return math.log(self.high / self.low) / 2 if self.low > 0 and self.high < math.inf else math.inf


def fit(probes: Sequence[Probe], attainment: float) -> Fit:
    """Fit the line by quasi-likelihood; the interval holds the capacities that an F test does not reject.

    Args:
        probes: at least one, each with requests.
        attainment: share of good requests that is enough.
    """
    from scipy.special import fdtri  # scipy.stats takes 0.6 s longer to import

    loads = np.log([probe.load for probe in probes])
    count = np.array([len(probe.good) for probe in probes], dtype=float)
    bad = np.array([probe.bad for probe in probes], dtype=float)
    start = math.log((1 - attainment) / attainment)
    capacities = np.linspace(loads.min() - 0.7, loads.max() + 0.7, 701)
    odds = start + _SLOPES[None, :, None] * (loads - capacities[:, None, None])
    deviance = 2 * (count * np.logaddexp(0, odds) - bad * odds).sum(axis=-1)
    best, slope = np.unravel_index(np.argmin(deviance), deviance.shape)
    dispersion, freedom = _dispersion(probes, 1 / (1 + np.exp(-odds[best, slope])))
    deviance += dispersion * (np.log(_SLOPES / _USUAL_SLOPE) / _SLOPE_SPREAD) ** 2
    best, slope = np.unravel_index(np.argmin(deviance), deviance.shape)
    profile = deviance.min(axis=1)
    limit = profile.min() + dispersion * fdtri(1, freedom, CONFIDENCE)
    inside = np.flatnonzero(profile <= limit)
    low, high = inside[0], inside[-1]
    return Fit(
        load=math.exp(capacities[best]),
        low=math.exp(_crossing(capacities, profile, limit, low, low - 1)) if low else 0.0,
        high=math.exp(_crossing(capacities, profile, limit, high, high + 1)) if high < 700 else math.inf,
        slope=float(_SLOPES[slope]),
        dispersion=dispersion,
        probes=tuple(probes),
    )


def _crossing(grid: Any, profile: Any, limit: float, inner: int, outer: int) -> float:
    part = (limit - profile[inner]) / (profile[outer] - profile[inner])
    return float(grid[inner] + part * (grid[outer] - grid[inner]))


def _dispersion(probes: Sequence[Probe], shares: Any) -> tuple[float, float]:
    """Return variance of bad counts / that of independent requests, and its degrees of freedom.

    Short consecutive batches are correlated and underestimate the variance. Even shorter ones show by how much, so the
    difference is added once more (lugsail batch means, Vats and Flegal).
    """
    long, short = (_pearson(probes, shares, batches) for batches in (_BATCHES, 3 * _BATCHES))
    freedom = 0.6 * (len(probes) * _BATCHES - 2)  # by simulation: the correction costs precision
    return max(long + max(long - short, 0.0), 1.0), freedom


def _pearson(probes: Sequence[Probe], shares: Any, batches: int) -> float:
    """Return the variance of the bad counts of batches around the line, over that of independent requests."""
    squares = expected = 0.0
    for probe, share in zip(probes, np.clip(shares, 1e-4, 1 - 1e-4), strict=True):
        for part in np.array_split(probe.good, batches):
            squares += (len(part) - int(part.sum()) - len(part) * share) ** 2
            expected += len(part) * share * (1 - share)
    number = len(probes) * batches
    return float(squares / expected * number / (number - 2))


def judged(requests: RequestColumns, window: Window, slo: Slo) -> tuple[Any, dict[str, int]]:
    """Return bool[n], whether each request that was due in the window met all, and how many missed each limit.

    Failed requests met nothing and count as "errors".
    """
    order = np.argsort(requests.due, kind="stable")
    order = order[(window[0] <= requests.due[order]) & (requests.due[order] < window[1])]
    fine = requests.fine()[order]
    alone = {"ttft": Slo(ttft_ms=slo.ttft_ms), "itl": Slo(itl_ms=slo.itl_ms), "e2e": Slo(e2e_ms=slo.e2e_ms)}
    missed = {name: int((fine & ~met(requests, one)[order]).sum()) for name, one in alone.items()}
    missed["errors"] = int((~fine).sum())
    return fine & met(requests, slo)[order], {name: number for name, number in missed.items() if number}


class LoadSearch:
    """Chooses the next load to probe, and estimates the largest one from all probes."""

    def __init__(self, settings: BenchmarkSettings, *, closed: bool) -> None:
        """Search for a concurrency if `closed`, else for a rate."""
        self._closed, self._settings = closed, settings
        span = settings.concurrency if closed else settings.request_rate
        self._low, self._high = map(float, span or (1.0, MOST_CONCURRENCY if closed else math.inf))
        self._lowest = self._low if closed or span else 0.0
        auto = settings.duration_s in ("auto", None)
        self._longest = LONGEST_SECONDS if auto else float(settings.duration_s or 0)
        self._allowed = 1 - settings.search_attainment
        self._wall = math.inf
        self._asked: ProbePlan | None = None
        self._planned: list[ProbePlan] = []
        self._started = monotonic()
        self._sets = 0
        self.probes: list[Probe] = []

    def add(
        self, good: Any, missed: Mapping[str, int], *, rate: float, e2e_s: float | None, client_bound: bool = False
    ) -> None:
        """Take the outcome of the load that `following` returned last; the arguments are those of `Probe`."""
        assert self._asked is not None
        before = self.probes[-1] if self.probes else None
        probe = Probe(self._asked, good, missed, rate, e2e_s, client_bound)
        self.probes.append(probe)
        again = before is not None and before.client_bound and before.load == probe.load
        larger = any(each.load > probe.load and not each.client_bound for each in self.probes)
        if probe.client_bound and again and not larger:  # a client that held a larger load is only disturbed
            self._wall = min(self._wall, probe.load)
            self._planned = [plan for plan in self._planned if plan.load < self._wall]

    def following(self) -> ProbePlan | None:
        """Return the next load, or None once the answer is good enough or no more can be learned."""
        self._asked = self._choose()
        return self._asked

    def _choose(self) -> ProbePlan | None:
        if len(self.probes) >= self._settings.search_probes:
            return None
        if self.probes and self.probes[-1].client_bound and self.probes[-1].load < self._wall:
            return self.probes[-1].plan  # once more: something else may have disturbed the client
        if not self._of("explore"):
            return self._bracket()
        if not self._sets:
            explored = self._explore()
            if explored is not None or not self._sets:
                return explored
        if not self._planned:
            line = self._line("final")
            if line is None or self._enough(line) or self._sets >= _SETS:
                return None
            self._design(line)
        return self._planned.pop(0) if self._planned else None

    def answer(self) -> LargestLoad:
        """Return the estimate from the probes so far."""
        line = self._line("final") or self._line("explore")
        if line is not None and line.load > _BEYOND * max(probe.load for probe in line.probes):
            line = None  # none of them was too large
        failed = [p for p in self.probes if not p.client_bound and p.bad_share > self._allowed and p.load < self._wall]
        near = line.probes if line else failed
        requests = sum(len(probe.good) for probe in near)
        missed = sum((Counter(probe.missed) for probe in near), Counter[str]())
        load, low, high = self._rounded(line) if line else (None, self._ends()[1] or None, None)
        return LargestLoad(
            kind="concurrency" if self._closed else "request_rate",
            attainment=self._settings.search_attainment,
            confidence=CONFIDENCE if line else None,
            load=load,
            low=low,
            high=high,
            binding=missed.most_common(1)[0][0] if missed else None,
            missed={name: count / requests for name, count in missed.most_common()},
            probes=len(self.probes),
            requests=sum(len(probe.good) for probe in self.probes),
            seconds=monotonic() - self._started,
            reason=self._reason(line),
        )

    def _reason(self, line: Fit | None) -> str:
        """Return the caveats of the answer; empty if it is as precise as requested."""
        failed, passed = self._ends()
        if line is None:
            if math.isfinite(self._wall):
                return f"from {self._wall:g} on the client was the limit; load from a larger or quieter machine"
            if passed >= self._high:
                return "the range ends there"
            if not passed and not math.isinf(failed):
                return "even the smallest load tried misses the limits"
            most = self._settings.search_probes
            return f"benchmark.search_probes={most} ended it" if len(self.probes) >= most else "it ended early"
        if any(len(probe.good) < _CORRELATED / 2 * line.dispersion for probe in line.probes):
            return "waits change so slowly that the interval may be too narrow: raise benchmark.duration_s"
        if not self._enough(line):
            return f"it is wider than benchmark.search_tolerance={self._settings.search_tolerance:g} asks for"
        return ""

    def _rounded(self, line: Fit) -> tuple[float, float | None, float | None]:
        low, high = line.low or None, line.high if math.isfinite(line.high) else None
        if not self._closed:
            return line.load, low, high
        return math.floor(line.load), low and (math.floor(low) or None), high and math.floor(high)

    def _of(self, stage: Stage) -> list[Probe]:
        return [each for each in self.probes if each.plan.stage == stage and not each.client_bound and len(each.good)]

    def _ends(self) -> tuple[float, float]:
        """Return the smallest load that failed, and the largest below it that passed; 0 if none did."""
        judged = [probe for probe in self.probes if not probe.client_bound]
        failed = min((probe.load for probe in judged if probe.bad_share > self._allowed), default=math.inf)
        passed = (probe.load for probe in judged if probe.bad_share <= self._allowed and probe.load < failed)
        return failed, max(passed, default=0.0)

    def _bracket(self) -> ProbePlan | None:
        """Find two loads near each other between which the capacity seems to be."""
        few = _COARSE_BAD / self._allowed
        if not self.probes:
            return self._plan(self._low, few, "coarse")
        failed, passed = self._ends()
        failed = min(failed, self._wall)
        if not passed:
            nothing = failed == self._wall or failed <= max(self._lowest, 1e-3)
            return None if nothing else self._plan(failed / _STEP, few, "coarse")
        if math.isinf(failed):
            return None if passed >= self._high else self._plan(passed * _STEP, few, "coarse")
        middle = math.sqrt(passed * failed)
        if failed / passed > _BRACKET and not (self._closed and failed - passed <= 1):
            return self._plan(middle, few, "coarse")
        return self._plan(middle, _BAD / self._allowed, "explore")

    def _explore(self) -> ProbePlan | None:
        """Draw a first line; once it is known well enough, plan the final probes and return None."""
        seen, some = self._of("explore"), _BAD / self._allowed
        if len(seen) < 2 or not any(self._allowed / 4 < probe.bad_share < 0.6 for probe in seen):
            return self._approach(seen)
        line = self._line("explore")
        assert line is not None
        events = sum(probe.bad for probe in line.probes) / line.dispersion
        if events >= _EVENTS and line.high <= 2 * line.low:
            self._design(line)
            return None
        step = (-0.07, 0.07, 0.0)[len(seen) % 3]
        requests = max(some * _GROW ** (len(seen) - 1), _CORRELATED / 2 * line.dispersion)
        return self._plan(line.load * math.exp(step), requests, "explore")

    def _approach(self, seen: Sequence[Probe]) -> ProbePlan | None:
        """Move towards the capacity, faster the farther away the last probe was."""
        last = seen[-1]
        odds = math.log((last.bad + 0.5) / (len(last.good) - last.bad + 0.5) * (1 - self._allowed) / self._allowed)
        step = math.copysign(min(max(abs(odds) / 6, 0.05), 0.35), -odds)
        load = last.load * math.exp(step)
        above = min((p.load for p in seen if p.bad_share > self._allowed), default=self._wall)
        below = max((p.load for p in seen if p.bad_share <= self._allowed), default=0.0)
        close = above <= below + 1 if self._closed else above <= below * (1 + self._settings.search_tolerance / 2)
        if 0 < below < above and close:
            return None  # from no bad request to nearly all: no line to draw, and none is needed
        if 0 < below < above < math.inf and not below < load < above:
            load = math.sqrt(below * above)
        plan = self._plan(load, _BAD / self._allowed, "explore")
        ends = (self._fit_load(0), self._fit_load(math.inf))
        return None if plan.load == last.load and last.load == ends[step > 0] else plan

    def _line(self, stage: Stage) -> Fit | None:
        """Fit the probes of a stage that are near the capacity."""
        near = usable = self._of(stage)
        if len(usable) < 2:
            return None
        for _ in range(5):
            line = fit(near, self._settings.search_attainment)
            close = [probe for probe in usable if abs(math.log(probe.load / line.load)) <= _NEAR]
            if len(close) < 2 or len(close) == len(near):
                break
            near = close
        return line

    def _design(self, line: Fit) -> None:
        """Plan a set of final probes: near the capacity, as many requests as the tolerance needs."""
        before = sum(len(probe.good) for probe in line.probes)
        wider = min(line.half_width / self._settings.search_tolerance, _WIDER)
        needed = before * wider**2 * _SPARE - (before if self._sets else 0)
        each = max(needed / len(_DESIGN), _BAD / self._allowed, _CORRELATED * line.dispersion)
        unit = min(max(1 / line.slope, 0.02), 0.1)
        self._sets += 1
        loads = [probe.load for probe in line.probes]
        centre = min(max(line.load, min(loads) / _BEYOND), max(loads) * _BEYOND)
        self._planned = [self._plan(centre * math.exp(unit * place), each, "final") for place in _DESIGN]

    def _enough(self, line: Fit) -> bool:
        """Return whether the interval is as narrow as asked for, or holds two neighbouring numbers of users."""
        if math.isinf(line.half_width):
            return False
        adjacent = self._closed and math.floor(line.high) - math.floor(line.low) <= 1
        return adjacent or line.half_width <= self._settings.search_tolerance

    def _fit_load(self, load: float) -> float:
        load = min(max(load, self._lowest), self._high, _BELOW * self._wall)
        return (
            float(max(1, math.floor(load + 0.5 * (load < _BELOW * self._wall))))
            if self._closed
            else float(f"{load:.3g}")
        )

    def _plan(self, load: float, requests: float, stage: Stage) -> ProbePlan:
        """Plan a probe that is long enough for the requests and for several durations of one."""
        load, coarse = self._fit_load(load), stage == "coarse"
        measured = [probe for probe in self.probes if probe.rate > 0]
        nearest = min(measured, key=lambda probe: abs(math.log(probe.load / load)), default=None)
        rate = load if not self._closed else nearest.rate if nearest else 0.0
        least, most = COARSE_SECONDS if coarse else (COARSE_SECONDS[1], math.inf)
        seconds = min(max(requests / rate, least), most) if rate else most
        lightest = min((probe for probe in measured if probe.e2e_s), key=lambda probe: probe.load, default=None)
        span = (lightest.e2e_s or 0.0) if lightest else 0.0
        seconds = min(max(seconds, span * (_COARSE_SPANS if coarse else _SPANS)), self._longest)
        settle = min(_COARSE_SETTLE_S, seconds / 2) if coarse else _SETTLE * seconds
        return ProbePlan(load, round(seconds, 1), max(self._settings.warmup_s, round(settle, 1)), stage)
