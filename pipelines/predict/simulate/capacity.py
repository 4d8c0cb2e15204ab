"""Compare the rate of an open loop with the rate that an engine can serve."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.predict.simulate.loads import SimulatedLevel
from pipelines.predict.simulator.cost import Cost
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun

LEFT_BEHIND = 0.02
"""Share of the requests that wait when the last one arrives, from which a load may be above capacity."""
ABOVE = 1.1
"""Offered rate / capacity from which a load is above capacity; filling and draining cost the capacity about 5 %."""
ROUNDS, LEAST = 20, 400
"""Requests of the run that determines the capacity: this multiple of those that run together, and at least."""


def offered(level: SimulatedLevel) -> float | None:
    """Return the requests per unit of time that a load sends, whatever the engine does; None if it has no rate."""
    arrival = level.requests.arrival
    if level.load.request_rate is not None or arrival is None or len(arrival) < 2:
        return level.load.request_rate
    span = float(arrival[-1] - arrival[0])
    return (len(arrival) - 1) / span if span > 0 else None


def capacity(level: SimulatedLevel, engine: SchedulerLimits, cost: Cost, run: SimulatedRun) -> float | None:
    """Return the requests per unit of time that an engine serves when it is never idle, if a load exceeds it.

    Whether a load exceeds it cannot be read off its own run: a short run ends before the queue has grown, and the end
    of every run is served below capacity. So if requests were left behind, the same requests are simulated once more,
    all at once.

    Args:
        level: the load.
        engine: limits of the scheduler.
        cost: cost of an iteration.
        run: its run under that load.
    """
    from pipelines.predict.simulator.run import simulate

    rate = offered(level)
    if rate is None or not _left_behind(run):
        return None
    isl, osl = level.requests.isl, level.requests.osl
    count = max(ROUNDS * _together(engine, isl, osl), LEAST)
    backlog = OfferedLoad(np.resize(isl, count), np.resize(osl, count), np.zeros(count))
    served = count / simulate(engine, backlog, cost).end
    return served if rate > ABOVE * served else None


def _left_behind(run: SimulatedRun) -> bool:
    """Return whether requests waited when the last one arrived, or when the run was cut."""
    requests = run.requests
    moment = min(float(requests.arrival[-1]), run.end)
    arrived = requests.arrival <= moment
    waiting = arrived & ~(requests.admitted <= moment)  # NaN: never admitted
    return bool(waiting.sum() > LEFT_BEHIND * arrived.sum())


def _together(engine: SchedulerLimits, isl: Any, osl: Any) -> int:
    """Return the number of requests that run together."""
    if engine.kv_blocks is None:
        return engine.slots
    blocks = float(engine.own_blocks(isl, isl + osl).mean())
    return max(1, min(engine.slots, int((engine.kv_blocks - engine.shared_blocks) / max(blocks, 1.0))))
