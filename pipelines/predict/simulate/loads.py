"""The simulated loads: what `make benchmark` would send with the same settings, level by level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from pipelines.domain.errors import Fault, UserError
from pipelines.domain.summary import SECOND
from pipelines.loadgen.arrivals import offsets, read_trace
from pipelines.loadgen.lengths import sampler
from pipelines.loadgen.plan import is_whole
from pipelines.loadgen.plan import loads as levels_of
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.outcome import CountedWindow, LoadLabel
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.settings.load import WorkloadSettings
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
