"""Simulate the recommended fleet, and one instance fewer, at the peak.

Requests reach the fleet as one Poisson (or gamma) stream and are distributed round-robin. Each instance then sees
smoother arrivals than those its rate was found with, so one instance fewer may still be enough; the output says
when that is so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipelines.predict.sizing.answer import WORDS, FleetOption
from pipelines.predict.sizing.fleet import ROUNDING
from pipelines.predict.sizing.instance import LoadOutcome, missed, watch
from pipelines.predict.sizing.question import Question

SHOWN_INSTANCES = 16
"""Upper bound on simulated instances: with round-robin they all see the same kind of load."""


@dataclass(frozen=True, slots=True)
class PeakTrial:
    """Simulation of a fleet at the peak.

    Attributes:
        instances: number of serving instances.
        meets: whether all limits are met at their percentile.
        missed: limit missed by most ("ttft", "queue", ...), or "".
        values: seconds by metric at the percentile; NaN without a value.
        requests: number of simulated requests.
        simulated: number of the fleet's instances that were simulated.
    """

    instances: int
    meets: bool
    missed: str
    values: dict[str, float]
    requests: int
    simulated: int


@dataclass(frozen=True, slots=True)
class Check:
    """The fleet without its spares, and with one instance fewer (None when there is only one)."""

    fleet: PeakTrial
    fewer: PeakTrial | None
    why: str


def check(question: Question, option: FleetOption) -> Check:
    """Simulate the recommended fleet."""
    needed = option.fleet.needed
    full = trial(question, option, needed)
    fewer = trial(question, option, needed - 1) if needed > 1 else None
    return Check(full, fewer, _why(question, option, fewer))


def trial(question: Question, option: FleetOption, instances: int) -> PeakTrial:
    """Simulate a fleet of this many instances at the peak."""
    one = option.instance
    each, lanes = len(question.gaps), one.setup.pp
    dealt = instances * lanes
    shown = min(dealt, SHOWN_INSTANCES)
    stream = np.cumsum(np.random.default_rng(len(question.gaps) + instances).permutation(np.tile(question.gaps, dealt)))
    stream /= question.demand.peak
    seen = [watch(question, one, stream[turn::dealt][:each], question.demand.peak / instances) for turn in range(shown)]
    possible = question.demand.peak / instances <= option.capacity.most * (1 + ROUNDING)
    steady = possible and sum(s.steady for s in seen) > shown / 2
    together = LoadOutcome(
        rate=question.demand.peak / instances,
        ttft=np.concatenate([s.ttft for s in seen]),
        itl=np.concatenate([s.itl for s in seen]),
        e2e=np.concatenate([s.e2e for s in seen]),
        queue=float(np.mean([s.queue for s in seen])),
        batch=float(np.mean([s.batch for s in seen])),
        kv_use=float(np.mean([s.kv_use for s in seen])),
        full=next((s.full for s in seen if s.full), ""),
        growth=0.0 if steady else math.inf,
    )
    wrong = missed(together, question.slo, question.percentile)
    values = together.at(question.percentile)
    return PeakTrial(instances, not wrong, wrong, values, shown * each, min(instances, -(-shown // lanes)))


def _why(question: Question, option: FleetOption, fewer: PeakTrial | None) -> str:
    if fewer is None:
        return "one instance is the minimum"
    if not fewer.meets:
        if fewer.missed == "queue":
            return "with one instance fewer the queue keeps growing"
        limit = getattr(question.slo, f"{fewer.missed}_ms")
        value = 1000 * fewer.values[fewer.missed]
        what = f"{WORDS[fewer.missed]} is {value:,.0f} ms at P{question.percentile:g}, over {limit:g}"
        return f"with one instance fewer {what}"
    bare = question.demand.peak / option.capacity.rate
    reasons = []
    if question.headroom:
        reasons.append(f"headroom of {100 * question.headroom:g} % accounts for {option.fleet.raw - bare:.2f}")
    rounding = option.fleet.needed - option.fleet.raw
    reasons.append(f"rounding up {option.fleet.raw:.2f} accounts for {rounding:.2f}")
    if option.fleet.needed - 1 < bare:
        reasons.append("round-robin arrivals are smoother than those used to find the rate of an instance")
    return f"one instance fewer is enough in this simulation: {'; '.join(reasons)}"
