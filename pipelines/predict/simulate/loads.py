"""The simulated loads: what `make benchmark` would send with the same settings, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.summary import SECOND
from pipelines.loadgen.config import WorkloadSettings
from pipelines.loadgen.plan import is_whole, offsets, read_trace, sampler
from pipelines.loadgen.plan import loads as levels_of
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.outcome import CountedWindow, LoadLabel, PolicyOutcome, measure
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import Cost
from pipelines.settings.root import Settings

WARM = 3
"""Requests per user of a closed loop before the measurement window opens."""
PER_USER, LEAST_CLOSED, OPEN = 20, 200, 1000
"""Default number of simulated requests."""


@dataclass(frozen=True, slots=True)
class SimulatedLevel:
    """A load and its requests.

    Attributes:
        load: description of the load.
        requests: input of the simulator.
        whole: whether the start burst and the end count too.
        counted: (first, last): if the window is not the whole run, requests before the first are warm-up, and those
            from the last on only keep up the load.
    """

    load: LoadLabel
    requests: OfferedLoad
    whole: bool
    counted: tuple[int, int]

    def faults(self, engine: SchedulerLimits) -> list[Fault]:
        """Return the requests that this engine can never run, as faults."""
        isl, osl = self.requests.isl, self.requests.osl
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

    def window(self, run: SimulatedRun, overhead: float) -> CountedWindow:
        """Return the window that counts: from the first request to the last response, or a part of it under full load.

        Args:
            run: run of this load.
            overhead: time a request spends on its way to the engine and back.
        """
        times, (first, last) = run.requests.arrival, self.counted
        if self.whole:
            return CountedWindow(float(times[0]), run.end + overhead, 0, len(times), whole=True)
        begin, until = float(times[first]), float(times[min(last, len(times) - 1)])
        if until <= begin:  # all of them are sent at once
            return CountedWindow(begin, run.end + overhead, first, last, whole=True)
        return CountedWindow(begin, until, first, last)


def make_levels(settings: Settings, case: SimulationCase) -> list[SimulatedLevel]:
    """Build one level per concurrency or rate, or the single burst or trace."""
    cut = settings.simulator.until is not None
    whole = case.unit == "ticks" or cut or is_whole(settings.workload, settings.benchmark)
    return [
        _level(settings, case, LoadLabel(text=_text(settings, case, each.concurrency, each.request_rate),
               concurrency=each.concurrency, request_rate=each.request_rate), whole, each.number)
        for each in levels_of(settings.workload, settings.benchmark)
    ]  # fmt: skip


def closed_level(base: SimulatedLevel, users: int, case: SimulationCase) -> SimulatedLevel:
    """Return the requests of a level as a closed loop with this many users."""
    count = max(PER_USER * users, LEAST_CLOSED) + (WARM + 1) * users
    isl, osl = (np.resize(column, count) for column in (base.requests.isl, base.requests.osl))
    requests = OfferedLoad(isl, osl, None, users, case.client_delay)
    return SimulatedLevel(LoadLabel(f"concurrency {users}", users), requests, False, (WARM * users, count - users))


def _level(settings: Settings, case: SimulationCase, load: LoadLabel, whole: bool, number: int) -> SimulatedLevel:
    users = load.concurrency or 0
    asked = settings.benchmark.num_requests
    count = asked or (max(PER_USER * users, LEAST_CLOSED) if users else OPEN)
    before, after = (0, 0) if whole else (WARM * users, users) if users else (count // 10, 0)
    total = before + count + after
    random = Random(f"{settings.workload.seed}/{number}/0")
    if settings.workload.arrival == "trace":
        return SimulatedLevel(load, _trace(settings.workload, asked), True, (0, 0))
    isl, osl = _lengths(settings.workload, total, random, users)
    requests = OfferedLoad(isl, osl, users=users, client_delay=case.client_delay)
    if not users:
        requests = replace(requests, arrival=_arrivals(settings.workload, load.request_rate, total, random))
    return SimulatedLevel(load, requests, whole, (before, before + count))


def _lengths(workload: WorkloadSettings, count: int, random: Random, users: int) -> tuple[Any, Any]:
    """Draw lengths as the load generator does; each turn of a conversation carries all earlier ones."""
    isl = sampler(workload.isl, random, key="workload.isl")
    osl = sampler(workload.osl, random, key="workload.osl")
    if workload.turns == 1:
        pairs = [(isl(), osl()) for _ in range(count)]
    else:
        pairs = _conversations(isl, osl, count, workload.turns, max(users, 1))
    return np.array([pair[0] for pair in pairs], dtype=np.int64), np.array([pair[1] for pair in pairs], dtype=np.int64)


def _conversations(
    isl: Callable[[], int], osl: Callable[[], int], count: int, turns: int, users: int
) -> list[tuple[int, int]]:
    """Build the requests of users who talk at the same time, each one turn after the other."""
    pairs: list[tuple[int, int]] = []
    while len(pairs) < count:
        held = [0] * users
        for _ in range(turns):
            for user in range(users):
                pair = (held[user] + isl(), osl())
                held[user] = sum(pair)
                pairs.append(pair)
    return pairs[:count]


def _arrivals(workload: WorkloadSettings, rate: float | None, count: int, random: Random) -> Any:
    if workload.arrival == "burst" or rate is None:
        return np.zeros(count)
    drawn = offsets(workload.arrival, rate, workload.cv, random)
    return np.array([due / SECOND for due in islice(drawn, count)])


def _trace(workload: WorkloadSettings, limit: int | None) -> OfferedLoad:
    assert workload.trace is not None  # the settings have been checked
    items = read_trace(workload.trace, workload.trace_speed)[:limit]
    if any(item.isl is None for item in items):
        raise UserError(
            f"workload.trace={workload.trace} has prompts, whose tokens only the model's tokenizer can count.",
            todo='Give their lengths: {"time": 0.5, "isl": 128, "osl": 64}.',
        )
    return OfferedLoad(
        np.array([item.isl for item in items], dtype=np.int64),
        np.array([item.osl for item in items], dtype=np.int64),
        np.array([item.offset_ns / SECOND for item in items]),
    )


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


# Run every policy under every load.


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a policy under a load."""

    engine: SchedulerLimits
    level: SimulatedLevel
    run: SimulatedRun
    outcome: PolicyOutcome


def run_all(settings: Settings, case: SimulationCase, levels: Sequence[SimulatedLevel]) -> list[Simulated]:
    """Simulate every policy under every load, in the order of the table."""
    from pipelines.predict.simulator.run import simulate as run_load

    found = []
    for level in levels:
        for engine in case.engines:
            run = run_load(engine, level.requests, case.cost, until=settings.simulator.until, iterations=True)
            outcome = measure(run, engine, level.load, level.window(run, case.overhead), case.overhead)
            rates = replace(outcome, offered=offered(level), capacity=capacity(level, engine, case.cost, run))
            found.append(Simulated(engine, level, run, rates))
    return found
