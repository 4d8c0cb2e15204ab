"""Size a fleet from a benchmark instead of a model: the highest measured load that meets the limits.

Nothing is interpolated, because nothing was measured between two loads. A closed loop sends the next request when one
ends, so its queue is shorter than that of real arrivals at the same rate; a fit (`make calibrate`) accounts for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.benchmark import Distribution, Slo
from pipelines.domain.errors import UserError
from pipelines.predict.performance.measured import Measured, MeasuredLevel
from pipelines.predict.sizing.demand import Demand
from pipelines.predict.sizing.fleet import Layout, PeakFleet, fleet

KNOWN = {50.0: "p50", 90.0: "p90", 95.0: "p95", 99.0: "p99"}
"""Percentiles stored in benchmarks."""


@dataclass(frozen=True, slots=True)
class JudgedLoad:
    """A measured load. `missed` names the limits it misses; empty when it meets all."""

    level: MeasuredLevel
    missed: str


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAnswer:
    """A fleet sized from a measurement.

    Attributes:
        measured: the benchmark.
        demand: requests per second.
        slo: latency limits.
        percentile: percentile that is compared with them.
        levels: all loads, by rate.
        best: load that the fleet is sized with.
        fleet: fleet for the peak.
    """

    measured: Measured
    demand: Demand
    slo: Slo
    percentile: float
    levels: tuple[JudgedLoad, ...]
    best: MeasuredLevel
    fleet: PeakFleet


def from_measured(
    measured: Measured,
    demand: Demand,
    slo: Slo,
    percentile: float,
    *,
    gpus: int,
    gpus_per_server: int,
    headroom: float,
    spare: int,
) -> MeasuredAnswer:
    """Size a fleet from measured loads.

    Args:
        measured: the benchmark.
        demand: requests per second.
        slo: latency limits.
        percentile: percentile that is compared with them.
        gpus: GPUs that served the benchmark; the fleet consists of copies of them.
        gpus_per_server: GPUs of one machine.
        headroom: share of the measured rate kept free.
        spare: additional copies.

    Raises:
        UserError: the benchmark lacks the percentile or the metric of a limit, or no load meets the limits.
    """
    if percentile not in KNOWN:
        raise UserError(
            f"sizing.slo.percentile={percentile:g} is not stored in a benchmark.",
            allowed=f"Stored are {', '.join(f'{each:g}' for each in KNOWN)}.",
        )
    ordered = sorted(measured.levels, key=lambda level: level.requests_per_s)
    judged = tuple(JudgedLoad(level, _missed(level, slo, percentile)) for level in ordered)
    good = [each.level for each in judged if not each.missed]
    if not good:
        nearest = judged[0]
        raise UserError(
            f"No load of {', '.join(measured.sources)} meets the limits: at the lowest ({nearest.level.load}) "
            f"{nearest.missed}.",
            todo="Measure a lower load, or set a higher limit.",
        )
    best = good[-1]
    layout = Layout(gpus, gpus_per_server)
    sized = fleet(demand.peak, best.requests_per_s, layout, headroom=headroom, spare=spare)
    return MeasuredAnswer(measured, demand, slo, percentile, judged, best, sized)


def value(distribution: Distribution, percentile: float) -> float | None:
    """Return a percentile in seconds."""
    found = getattr(distribution, KNOWN[percentile])
    return None if found is None else float(found)


def _missed(level: MeasuredLevel, slo: Slo, percentile: float) -> str:
    wrong = []
    pairs = (("TTFT", slo.ttft_ms, level.ttft_s), ("ITL", slo.itl_ms, level.itl_s), ("E2E", slo.e2e_ms, level.e2e_s))
    for name, limit, distribution in pairs:
        if limit is None:
            continue
        seconds = value(distribution, percentile)
        if seconds is None:
            raise UserError(
                f"The benchmark has no P{percentile:g} of {name} at {level.load}, but a limit is set for it.",
                todo="Take another percentile (sizing.slo.percentile), or measure with streaming and this percentile.",
            )
        if seconds > limit / 1000:
            wrong.append(f"{name} P{percentile:g} is {1000 * seconds:,.4g} ms, the limit is {limit:g} ms")
    return "; ".join(wrong)
