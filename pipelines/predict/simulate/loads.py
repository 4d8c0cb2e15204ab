"""The simulated loads: what `make benchmark` would send with the same settings, level by level."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any, TypeVar

import numpy as np

from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import SECOND
from pipelines.loadgen.config import WorkloadSettings
from pipelines.loadgen.plan import PlannedLevel, is_whole, loads, offsets
from pipelines.loadgen.trace import known_times
from pipelines.predict.performance.limits import sampled_lengths, traced_lengths
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.outcome import PolicyOutcome, SimulatedLevel, measure
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import Cost, simulate
from pipelines.settings.root import Settings

WARM = 3
"""Requests per user of a closed loop before the measurement window opens."""
PER_USER, LEAST_CLOSED, OPEN = 20, 200, 1000
"""Default number of simulated requests."""
MOST, TRIES = 20_000, 3
"""Requests that an open loop may have with a longer warm-up, and simulations until it is long enough."""
Run = TypeVar("Run")


def make_levels(settings: Settings, case: SimulationCase) -> list[SimulatedLevel]:
    """Build one level per concurrency or rate, or the single burst or trace."""
    cut = settings.simulator.until is not None
    whole = case.unit == "ticks" or cut or is_whole(settings.workload, settings.benchmark)
    return [_level(settings, case, planned, whole) for planned in loads(settings.workload, settings.benchmark)]


def closed_level(base: SimulatedLevel, users: int, case: SimulationCase) -> SimulatedLevel:
    """Return the requests of a level as a closed loop with this many users."""
    count = max(PER_USER * users, LEAST_CLOSED) + (WARM + 1) * users
    isl, osl = (np.resize(column, count) for column in (base.load.isl, base.load.osl))
    load = OfferedLoad(isl, osl, None, users, case.client_delay)
    return SimulatedLevel(load, None, WARM * users, count - users, False, f"concurrency {users}", users)


def _level(settings: Settings, case: SimulationCase, planned: PlannedLevel, whole: bool) -> SimulatedLevel:
    """Draw the requests of a level; of one that is not whole, the first ones warm up and the last keep up the load."""
    users, workload, requests = planned.concurrency or 0, settings.workload, settings.benchmark.num_requests
    if workload.arrival == "trace":
        load = _trace(workload, requests)
        before, count = 0, len(load.isl)
    else:
        count = requests or (max(PER_USER * users, LEAST_CLOSED) if users else OPEN)
        before, after = (0, 0) if whole else (WARM * users, users) if users else (count // 10, 0)
        random = Random(f"{workload.seed}/{planned.number}/0")
        isl, osl = sampled_lengths(workload, before + count + after, random, users)
        load = OfferedLoad(isl, osl, users=users, client_delay=case.client_delay)
        if not users:
            load = replace(load, arrival=_arrivals(workload, planned.request_rate, len(isl), random))
    window, times, last = None, load.arrival, before + count
    if times is not None:
        window = float(times[before]), math.inf if whole else float(times[min(last, len(times) - 1)])
    title = planned.title if case.unit == "s" else planned.title.replace("requests/s", "requests/tick")
    return SimulatedLevel(load, window, before, last, whole, title, planned.concurrency, planned.request_rate)


def settled(
    level: SimulatedLevel, run: Callable[[SimulatedLevel], Run], e2e: Callable[[Run], Distribution], most: int = MOST
) -> Run:
    """Run a load so that the window of an open loop begins under load, whatever its requests take.

    Of requests that take longer than the warm-up, fewer end in the window than are sent in it. Then more come before
    them, with the same lengths and gaps. Where the queue grows, no warm-up is long enough, nor is one of more than
    `most` requests; then the longest of these loads is taken, and its window lasts until the last response.
    """
    for _ in range(TRIES):
        result = run(level)
        longer = _warmed(level, e2e(result), most)
        if longer is level:
            return result
        if longer is None:
            break
        level = longer
    return run(replace(level, whole=True))


def _warmed(level: SimulatedLevel, e2e: Distribution, most: int) -> SimulatedLevel | None:
    """Return an open loop that warms up for as long as its slowest request takes; None if it has too many requests."""
    load, rate = level.load, level.request_rate
    if level.whole or load.arrival is None or rate is None or e2e.mean is None or e2e.max is None:
        return level
    warm = float(load.arrival[level.first] - load.arrival[0])
    if e2e.mean <= warm:
        return level
    more = math.ceil((e2e.max - warm) * rate) + 1
    if more + len(load.isl) > most:
        return None
    gaps = np.diff(load.arrival) if len(load.arrival) > 1 else np.ones(1)
    before = np.cumsum(np.resize(gaps / gaps.mean() / rate, more))
    arrival = np.concatenate([before - before[0], load.arrival - load.arrival[0] + before[-1]])
    isl, osl = (np.concatenate([np.resize(column, more), column]) for column in (load.isl, load.osl))
    first, last = level.first + more, level.last + more
    window = float(arrival[first]), float(arrival[min(last, len(arrival) - 1)])
    return replace(level, load=replace(load, isl=isl, osl=osl, arrival=arrival), window=window, first=first, last=last)


def _arrivals(workload: WorkloadSettings, rate: float | None, count: int, random: Random) -> Any:
    if workload.arrival == "burst" or rate is None:
        return np.zeros(count)
    drawn = offsets(workload.arrival, rate, workload.cv, random)
    return np.array([due / SECOND for due in islice(drawn, count)])


def _trace(workload: WorkloadSettings, limit: int | None) -> OfferedLoad:
    isl, osl = traced_lengths(workload)
    times = known_times(workload, "Give each turn a time of its own; `make benchmark` sends them as they are.")
    arrival = np.array(times, dtype=np.int64) / SECOND
    return OfferedLoad(isl[:limit], osl[:limit], arrival[:limit])


# Compare the rate of an open loop with the rate that an engine can serve.

LEFT_BEHIND = 0.02
"""Share of the requests that wait when the last one arrives, from which a load may be above capacity."""
ABOVE = 1.1
"""Offered rate / capacity from which a load is above capacity; filling and draining cost the capacity about 5 %."""
ROUNDS, LEAST = 20, 400
"""Requests of the run that determines the capacity: this multiple of those that run together, and at least."""


def offered(level: SimulatedLevel) -> float | None:
    """Return the requests per unit of time that a load sends, whatever the engine does; None if it has no rate."""
    arrival = level.load.arrival
    if level.request_rate is not None or arrival is None or len(arrival) < 2:
        return level.request_rate
    span = float(arrival[-1] - arrival[0])
    return (len(arrival) - 1) / span if span > 0 else None


def capacity(level: SimulatedLevel, engine: SchedulerLimits, cost: Cost, run: SimulatedRun) -> float | None:
    """Return the requests per unit of time that an engine serves when it is never idle, if a load exceeds it.

    Whether a load exceeds it cannot be read off its own run: a short run ends before the queue has grown, and the end
    of every run is served below capacity. So if requests were left behind, or no warm-up was long enough, the same
    requests are simulated once more, all at once.
    """
    rate, unsettled = offered(level), level.whole and level.request_rate is not None
    if rate is None or not (unsettled or _left_behind(run)):
        return None
    isl, osl = level.load.isl, level.load.osl
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
    if engine.kv_blocks is None:
        return engine.slots
    blocks = float(engine.own_blocks(isl, isl + osl).mean())
    return max(1, min(engine.slots, int((engine.kv_blocks - engine.shared_blocks) / max(blocks, 1.0))))


# Run every policy under every load.


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a policy under a load."""

    engine: SchedulerLimits
    level: SimulatedLevel
    run: SimulatedRun
    outcome: PolicyOutcome


def run_one(
    engine: SchedulerLimits, level: SimulatedLevel, case: SimulationCase, until: float | None = None
) -> Simulated:
    """Simulate a policy under a load."""

    def run(level: SimulatedLevel) -> Simulated:
        run = simulate(engine, level.load, case.cost, until=until, iterations=True)
        return Simulated(engine, level, run, measure(run, engine, level, case.overhead))

    return settled(level, run, lambda one: one.outcome.e2e)


def run_all(settings: Settings, case: SimulationCase, levels: Sequence[SimulatedLevel]) -> list[Simulated]:
    """Simulate every policy under every load, in the order of the table, and compare rates with the capacity."""
    results = []
    for level in levels:
        for engine in case.engines:
            one = run_one(engine, level, case, settings.simulator.until)
            most = capacity(one.level, engine, case.cost, one.run)
            results.append(replace(one, outcome=replace(one.outcome, offered=offered(level), capacity=most)))
    return results
