"""The simulated loads: what `make benchmark` would send with the same settings, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from pipelines.domain.errors import Fault
from pipelines.domain.summary import SECOND
from pipelines.loadgen.config import WorkloadSettings
from pipelines.loadgen.plan import is_whole, offsets
from pipelines.loadgen.plan import loads as levels_of
from pipelines.loadgen.trace import known_times
from pipelines.predict.performance.limits import sampled_lengths, traced_lengths
from pipelines.predict.performance.modelled import Trial
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.outcome import CountedWindow, LoadLabel, PolicyOutcome, measure
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import Cost, simulate
from pipelines.settings.root import Settings

WARM = 3
"""Requests per user of a closed loop before the measurement window opens."""
PER_USER, LEAST_CLOSED, OPEN = 20, 200, 1000
"""Default number of simulated requests."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedLevel(Trial):
    """A load with its requests and its measurement window. `label`: description of the load."""

    label: LoadLabel

    def faults(self, engine: SchedulerLimits) -> list[Fault]:
        """Return the requests that this engine can never run, as faults."""
        isl, osl = self.load.isl, self.load.osl
        if engine.kv_blocks is None or not len(isl):
            return []
        needs, pool = engine.own_blocks(isl, isl + osl), engine.kv_blocks - engine.shared_blocks
        worst = int(np.lexsort((isl + osl, needs))[-1])
        if needs[worst] <= pool:
            return []
        beside = f" besides those of the shared prefix of {engine.prefix_tokens} tokens" if engine.shared_blocks else ""
        return [
            Fault(
                f"A request of {isl[worst]} input and {osl[worst]} output tokens needs {needs[worst]} KV blocks of "
                f"{engine.tokens_per_block} tokens{beside}; the cache has {max(pool, 0)}.",
                todo="Shorten workload.isl or workload.osl, or increase simulator.kv_blocks.",
            )
        ]

    def counted(self, run: SimulatedRun, overhead: float) -> CountedWindow:
        """Return what counts of a run: from the first request to the last response, or a part of it under full load."""
        times, first, last = run.requests.arrival, self.first, self.last
        begin, until = float(times[first]), float(times[min(last, len(times) - 1)])
        if self.whole or until <= begin:  # all of them are sent at once
            return CountedWindow(begin, run.end + overhead, first, last, whole=True)
        return CountedWindow(begin, until, first, last)


def make_levels(settings: Settings, case: SimulationCase) -> list[SimulatedLevel]:
    """Build one level per concurrency or rate, or the single burst or trace."""
    cut = settings.simulator.until is not None
    whole = case.unit == "ticks" or cut or is_whole(settings.workload, settings.benchmark)
    levels = []
    for each in levels_of(settings.workload, settings.benchmark):
        users, rate = each.concurrency, each.request_rate
        levels.append(
            _level(settings, case, LoadLabel(_text(settings, case, users, rate), users, rate), whole, each.number)
        )
    return levels


def closed_level(base: SimulatedLevel, users: int, case: SimulationCase) -> SimulatedLevel:
    """Return the requests of a level as a closed loop with this many users."""
    count = max(PER_USER * users, LEAST_CLOSED) + (WARM + 1) * users
    isl, osl = (np.resize(column, count) for column in (base.load.isl, base.load.osl))
    load = OfferedLoad(isl, osl, None, users, case.client_delay)
    return _counted(load, LoadLabel(f"concurrency {users}", users), WARM * users, count - users)


def _counted(load: OfferedLoad, label: LoadLabel, first: int, last: int) -> SimulatedLevel:
    """Build a level of which only these requests count, the others being warm-up or keeping up the load."""
    times = load.arrival
    window = None if times is None else (float(times[first]), float(times[min(last, len(times) - 1)]))
    return SimulatedLevel(load, window, first, last, False, label)


def _whole(load: OfferedLoad, label: LoadLabel) -> SimulatedLevel:
    """Build a level that counts with the burst at its start and with its end."""
    window = None if load.arrival is None else (float(load.arrival[0]), math.inf)
    return SimulatedLevel(load, window, 0, len(load.isl), True, label)


def _level(settings: Settings, case: SimulationCase, label: LoadLabel, whole: bool, number: int) -> SimulatedLevel:
    users = label.concurrency or 0
    requests = settings.benchmark.num_requests
    if settings.workload.arrival == "trace":
        return _whole(_trace(settings.workload, requests), label)
    count = requests or (max(PER_USER * users, LEAST_CLOSED) if users else OPEN)
    before, after = (0, 0) if whole else (WARM * users, users) if users else (count // 10, 0)
    random = Random(f"{settings.workload.seed}/{number}/0")
    isl, osl = sampled_lengths(settings.workload, before + count + after, random, users)
    load = OfferedLoad(isl, osl, users=users, client_delay=case.client_delay)
    if not users:
        load = replace(load, arrival=_arrivals(settings.workload, label.request_rate, len(isl), random))
    return _whole(load, label) if whole else _counted(load, label, before, before + count)


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


def _text(settings: Settings, case: SimulationCase, users: int | None, rate: float | None) -> str:
    if users is not None:
        return f"concurrency {users}"
    if rate is not None:
        return f"{rate:g} requests/{'tick' if case.unit == 'ticks' else 's'} ({settings.workload.arrival})"
    return "all at once" if settings.workload.arrival == "burst" else "trace"


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
    if level.label.request_rate is not None or arrival is None or len(arrival) < 2:
        return level.label.request_rate
    span = float(arrival[-1] - arrival[0])
    return (len(arrival) - 1) / span if span > 0 else None


def capacity(level: SimulatedLevel, engine: SchedulerLimits, cost: Cost, run: SimulatedRun) -> float | None:
    """Return the requests per unit of time that an engine serves when it is never idle, if a load exceeds it.

    Whether a load exceeds it cannot be read off its own run: a short run ends before the queue has grown, and the end
    of every run is served below capacity. So if requests were left behind, the same requests are simulated once more,
    all at once.
    """
    rate = offered(level)
    if rate is None or not _left_behind(run):
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
    run = simulate(engine, level.load, case.cost, until=until, iterations=True)
    outcome = measure(run, engine, level.label, level.counted(run, case.overhead), case.overhead)
    return Simulated(engine, level, run, outcome)


def run_all(settings: Settings, case: SimulationCase, levels: Sequence[SimulatedLevel]) -> list[Simulated]:
    """Simulate every policy under every load, in the order of the table, and compare rates with the capacity."""
    results = []
    for level in levels:
        for engine in case.engines:
            one = run_one(engine, level, case, settings.simulator.until)
            most = capacity(level, engine, case.cost, one.run)
            results.append(replace(one, outcome=replace(one.outcome, offered=offered(level), capacity=most)))
    return results
