"""Figures of a simulated run, as shown in the table and stored in summary.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pipelines.document.show import NONE, number
from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import Fault
from pipelines.domain.summary import summarise
from pipelines.predict.performance.modelled import Trial
from pipelines.predict.simulator.interface import (
    REFUSALS,
    IterationTokens,
    SchedulerLimits,
    SimulatedRun,
    request_columns,
)


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """Figures of a policy under a load. Times in ticks or seconds, rates per tick or second.

    Attributes:
        load: description, e.g. "concurrency 16".
        requests_rate: requests finished per unit of time.
        tokens_rate: output tokens per unit of time.
        ttft: of the window's requests that got their first token.
        itl: of those that finished with at least two tokens.
        e2e: of those that finished.
        busy: slots in use, mean over the whole run.
        busy_max: most slots in use at once.
        queue_mean: waiting requests, mean over the whole run.
        queue_end: waiting requests when the run ended.
        queue_max: most waiting requests.
        preemptions: number of times requests were paused.
        max_num_tokens: tokens of an iteration that the engine allows; None without a limit.
        kv_share: largest share of the KV cache in use or reserved; None without a limit.
        waiting: share of the whole run in which requests waited, by what kept the first of them from a slot (a name of
            `REFUSALS`); only what happened.
        batches: static batching: number of batches, by what closed them (likewise; "" is that nobody else waited).
        offered: requests per unit of time that an open loop sends; None for other loads.
        capacity: requests per unit of time that the engine serves when it is never idle, if an open loop exceeds it;
            otherwise None.
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
    max_num_tokens: int | None
    kv_share: float | None
    waiting: Mapping[str, float]
    batches: Mapping[str, int] = field(default_factory=dict)
    offered: float | None = None
    capacity: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedLevel(Trial):
    """A load with its requests and what counts of them; `title`: the load in words, e.g. "concurrency 16"."""

    title: str
    concurrency: int | None = None
    request_rate: float | None = None

    def cut(self, until: float | None, unit: str) -> list[Fault]:
        """Return a fault if the run ends, at `until`, before a request arrives."""
        first = 0.0 if self.load.arrival is None else float(self.load.arrival[0])
        if until is None or until > first:
            return []
        ends = f"simulator.until={until:g} ends the run before the first request arrives, at {first:.4g} {unit}."
        return [Fault(ends, todo="Give a later end, or leave it out.")]

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


def measure(run: SimulatedRun, engine: SchedulerLimits, level: SimulatedLevel, overhead: float) -> PolicyOutcome:
    """Compute the figures of a run simulated with iterations, from the first request to the last response.

    Of a level that is not whole, a part under full load counts, unless nothing ends in it. `overhead` is the way to the
    engine and back.
    """
    requests = request_columns(run.requests, overhead=overhead, responses=IterationTokens(run, overhead))
    times, first, last = run.requests.arrival, level.first, level.last
    begin, until = float(times[first]), float(times[min(last, len(times) - 1)])
    ended = run.requests.end + overhead
    whole = level.whole or until <= begin or not ((ended >= begin) & (ended < until)).any()
    end = run.end + overhead if whole else until
    due = np.zeros(len(times), dtype=bool)
    due[first:last] = True
    # a window does not include its end, but that of a whole run
    summary = summarise(requests, (begin, float(np.nextafter(end, np.inf)) if whole else end), due=due)
    assert run.iterations is not None  # requested by the caller
    table, running = run.iterations, _running(run)
    return PolicyOutcome(
        policy=engine.policy,
        load=level.title,
        concurrency=level.concurrency,
        request_rate=level.request_rate,
        window=end - begin,
        requests=summary.requests,
        requests_rate=summary.requests_per_s,
        tokens_rate=summary.output_tokens_per_s,
        ttft=summary.ttft_s,
        itl=summary.itl_s,
        e2e=summary.e2e_s,
        slots=engine.slots,
        busy=_mean_over_time(running, run),
        busy_max=int(running.max()),
        queue_mean=_mean_over_time(table.queue, run),
        queue_end=0 if np.isfinite(run.requests.end).all() else int(table.queue[-1]),
        queue_max=int(table.queue.max()),
        preemptions=int(run.requests.preemptions.sum()),
        max_num_tokens=engine.max_num_tokens,
        kv_share=None if engine.kv_blocks is None else float(table.kv_blocks.max()) / engine.kv_blocks,
        waiting=_waiting(run),
        batches=_batches(run) if engine.policy == "static" else {},
    )


def _running(run: SimulatedRun) -> Any:
    """Return int64[iterations]: requests in slots, including those whose prompt waits for token budget."""
    assert run.stays is not None
    assert run.iterations is not None
    count = len(run.iterations.start)
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, run.stays.joined, 1)
    np.add.at(change, np.minimum(run.stays.last + 1, count), -1)
    return np.cumsum(change[:-1])


def _mean_over_time(values: Any, run: SimulatedRun) -> float:
    """Average a value per iteration over the whole run; between iterations nothing runs."""
    assert run.iterations is not None
    return float((values * run.iterations.seconds).sum() / run.end) if run.end > 0 else 0.0


def _waiting(run: SimulatedRun) -> dict[str, float]:
    assert run.iterations is not None
    refused = run.iterations.refused
    shares = {name: _mean_over_time(refused == code, run) for code, name in enumerate(REFUSALS) if name}
    return {name: share for name, share in shares.items() if share}


def _batches(run: SimulatedRun) -> dict[str, int]:
    """Return the number of batches of a static engine, by what closed them: the iteration that admits records it."""
    assert run.stays is not None
    assert run.iterations is not None
    closed = run.iterations.refused[np.unique(run.stays.joined)]
    counts = {name: int((closed == code).sum()) for code, name in enumerate(REFUSALS)}
    return {name: count for name, count in counts.items() if count}


# Say why requests waited, and whether the load is above what the engine can serve.

SHORT = {
    "": NONE,
    "batch": "batch",
    "slots": "slots",
    "kv_blocks": "KV blocks",
    "one_prefill": "prefill",
    "max_num_tokens": "tokens",
}
"""Short names of what keeps requests waiting (`REFUSALS`)."""
WHY = {
    "batch": "the running batch had not ended",
    "slots": "all slots were in use",
    "kv_blocks": "the KV cache was full (too few free blocks for the next request)",
    "one_prefill": "another prompt was being processed",
    "max_num_tokens": "the token budget (max_num_tokens) had no room for the next prompt",
}
"""The same in words, without figures of the engine."""
LEAST_SHARE = 0.01
"""Share of the run below which a further reason to wait is not mentioned."""
MANY_USERS = 4
"""Users per request that runs, from which a closed loop is said to have too many."""


def words(unit: str) -> tuple[str, str, float]:
    """Return how times and rates are shown: name of the time unit, unit of the rates, and their factor."""
    return ("ticks", "1,000 ticks", 1000.0) if unit == "ticks" else ("ms", "s", 1.0)


def waited_for(outcome: PolicyOutcome) -> str:
    """Return the main cause of waiting, a name of `REFUSALS`; "" if none waited."""
    if not _told(outcome):
        return ""
    return "batch" if outcome.policy == "static" else _told(outcome)[0][0]


def limits_in_words(outcome: PolicyOutcome) -> str:
    """Describe why requests waited and for how long; for a static engine, the limit on its batches."""
    shares = _told(outcome)
    if not shares:
        return "no request waited for a slot."
    if outcome.policy == "static":
        text = f"requests waited {_percent(sum(outcome.waiting.values()))} of the time for the running batch to end"
        return f"{text}; {_closed(outcome)}."
    reasons = _reasons(outcome)
    (first, share), *others = shares
    text = f"requests waited {_percent(share)} of the time because {reasons[first]}"
    return "; ".join([text, *(f"{_percent(share)} because {reasons[name]}" for name, share in others)]) + "."


def _told(outcome: PolicyOutcome) -> list[tuple[str, float]]:
    """Return the main reason to wait and others worth a mention, and their shares of the run, largest first."""
    shares = sorted(outcome.waiting.items(), key=lambda item: -item[1])
    return [*shares[:1], *(item for item in shares[1:] if item[1] >= LEAST_SHARE)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= LEAST_SHARE else "less than 1 %"


def _reasons(outcome: PolicyOutcome) -> dict[str, str]:
    budget = f"the token budget of {outcome.max_num_tokens or 0:,} (max_num_tokens)"
    chunked = outcome.policy == "inflight_chunked"
    return {
        "slots": f"all {outcome.slots:,} slots were in use" if outcome.slots > 1 else "the only slot was in use",
        "kv_blocks": WHY["kv_blocks"],
        "one_prefill": WHY["one_prefill"],
        "max_num_tokens": f"{budget} was used up" if chunked else f"the next prompt did not fit into {budget}",
    }


def _closed(outcome: PolicyOutcome) -> str:
    """Say what limited the batches of a static engine, the most frequent first."""
    labels = {
        "": "took all requests that waited",
        "slots": f"filled all {outcome.slots:,} slots" if outcome.slots > 1 else "filled the only slot",
        "kv_blocks": "filled the KV cache",
        "max_num_tokens": f"used up the token budget of {outcome.max_num_tokens or 0:,} (max_num_tokens)",
    }
    counts = sorted(outcome.batches.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{amount:,} {labels[name]}" for name, amount in counts)
    total = sum(outcome.batches.values())
    return f"of {total:,} {'batch' if total == 1 else 'batches'} {parts}"


def overload(outcome: PolicyOutcome) -> float:
    """Return how many times an open loop exceeds the capacity, or the users of a closed loop what runs; else 0."""
    if outcome.capacity is not None and outcome.offered is not None:
        return outcome.offered / outcome.capacity
    users = (outcome.concurrency or 0) / max(outcome.busy_max, 1)
    return users if users > MANY_USERS else 0.0


def overload_in_words(outcome: PolicyOutcome, unit: str) -> str:
    """Describe an overload, and what it means for the figures."""
    if outcome.capacity is None or outcome.offered is None:
        most = outcome.busy_max
        running = "1 request that runs" if most == 1 else f"{most:,} requests that run together"
        return (
            f"{outcome.concurrency or 0:,} users are {_times(overload(outcome))} the {running}: more of them add "
            "waiting, not throughput."
        )
    _, per, scale = words(unit)
    return (
        f"the load is {_times(overload(outcome))} the capacity: of {number(outcome.offered * scale)} requests per "
        f"{per} it can serve {number(outcome.capacity * scale)}. The queue grows for as long as the load lasts, so "
        "TTFT and E2E depend on the length of the run."
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
