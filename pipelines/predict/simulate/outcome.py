"""Numbers of a simulated run: what the table shows and summary.json holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import summarise
from pipelines.predict.simulator.interface import SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.records import IterationTokens, request_columns


@dataclass(frozen=True, slots=True)
class CountedWindow:
    """What of a run counts.

    Attributes:
        start: time; inside.
        end: time; outside, except for what comes at the very end of a whole run.
        first: requests before this one are warm-up.
        last: and those from this one on only keep up the load.
        whole: it ends with the run.
    """

    start: float
    end: float
    first: int
    last: int
    whole: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """[start, end) that holds all that counts."""
        return self.start, float(np.nextafter(self.end, np.inf)) if self.whole else self.end

    def due(self, run: SimulatedRun) -> Any:
        """bool[requests]: the requests that latencies are of."""
        due = np.zeros(len(run.requests.arrival), dtype=bool)
        due[self.first : self.last] = True
        return due


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """A policy under a load. Times in ticks or seconds, rates per tick or second.

    Attributes:
        policy: of the engine.
        load: in words, e.g. "concurrency 16".
        concurrency: of a closed loop.
        request_rate: of an open loop.
        window: length of what counts.
        requests: finished in the window.
        requests_rate: the same per unit of time.
        tokens_rate: output tokens per unit of time.
        ttft: of the requests due in the window that got their first token.
        itl: of those that finished, with two tokens or more.
        e2e: of those that finished.
        slots: of the engine.
        busy: slots in use, mean over the whole run.
        busy_max: the most in use at once.
        queue_mean: requests that waited, mean over the whole run.
        queue_end: requests that waited when the run ended.
        queue_max: the most that waited.
        preemptions: requests that were paused, counted each time.
        kv_share: the most of the KV cache that was in use or reserved; None without a limit.
        kv_binds: share of the time in which requests waited beside a free slot for lack of KV blocks; None as above.
    """

    policy: str
    load: str
    concurrency: int | None
    request_rate: float | None
    window: float
    requests: int
    requests_rate: float
    tokens_rate: float
    ttft: Distribution
    itl: Distribution
    e2e: Distribution
    slots: int
    busy: float
    busy_max: int
    queue_mean: float
    queue_end: int
    queue_max: int
    preemptions: int
    kv_share: float | None
    kv_binds: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LoadLabel:
    """A load in words and numbers."""

    text: str
    concurrency: int | None = None
    request_rate: float | None = None


def measure(
    run: SimulatedRun, engine: SchedulerLimits, load: LoadLabel, window: CountedWindow, overhead: float
) -> PolicyOutcome:
    """Read a run that was simulated with iterations.

    Args:
        run: of the simulator.
        engine: that ran.
        load: that was put on it.
        window: what counts.
        overhead: of a request on its way to the engine and back.
    """
    requests = request_columns(run.requests, overhead=overhead, responses=IterationTokens(run, overhead))
    found = summarise(requests, window.bounds, due=window.due(run))
    assert run.iterations is not None  # asked for by the caller
    table, running = run.iterations, _running(run)
    return PolicyOutcome(
        policy=engine.policy,
        load=load.text,
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        window=window.end - window.start,
        requests=found.requests,
        requests_rate=found.requests_per_s,
        tokens_rate=found.output_tokens_per_s,
        ttft=found.ttft_s,
        itl=found.itl_s,
        e2e=found.e2e_s,
        slots=engine.slots,
        busy=_mean_over_time(running, run),
        busy_max=int(running.max()),
        queue_mean=_mean_over_time(table.queue, run),
        queue_end=int(table.queue[-1]) if not _all_done(run) else 0,
        queue_max=int(table.queue.max()),
        preemptions=int(run.requests.preemptions.sum()),
        **_kv(run, engine),
    )


def _all_done(run: SimulatedRun) -> bool:
    return bool(np.isfinite(run.requests.end).all())


def _running(run: SimulatedRun) -> Any:
    """int64[iterations]: requests in slots, also those whose prompt waits for tokens of the budget."""
    assert run.stays is not None
    assert run.iterations is not None
    count = len(run.iterations.start)
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, run.stays.joined, 1)
    np.add.at(change, np.minimum(run.stays.last + 1, count), -1)
    return np.cumsum(change[:-1])


def _mean_over_time(values: Any, run: SimulatedRun) -> float:
    """Mean of a value per iteration until the run's end; between iterations nothing runs."""
    assert run.iterations is not None
    return float((values * run.iterations.seconds).sum() / run.end) if run.end > 0 else 0.0


def _kv(run: SimulatedRun, engine: SchedulerLimits) -> dict[str, float | None]:
    """How full the KV cache was, and how long it alone kept requests waiting."""
    if engine.kv_blocks is None:
        return {"kv_share": None, "kv_binds": None}
    assert run.iterations is not None
    table = run.iterations
    share = float(table.kv_blocks.max()) / engine.kv_blocks
    if engine.policy == "static":  # it lets requests wait beside free slots by itself
        return {"kv_share": share, "kv_binds": None}
    full = engine.max_num_tokens is not None and table.tokens >= engine.max_num_tokens
    waits = (table.queue > 0) & (_running(run) < engine.slots) & ~np.asarray(full)
    return {"kv_share": share, "kv_binds": _mean_over_time(waits, run)}
