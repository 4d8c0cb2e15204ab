"""Input and output of the simulator. Times are in seconds, or in ticks with a `TickCost`."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from pipelines.domain.summary import RequestColumns, Responses

Policy = Literal["static", "inflight", "inflight_chunked", "one_prefill"]
Admission = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]
REFUSALS = ("", "batch", "slots", "kv_blocks", "one_prefill", "max_num_tokens")
"""What keeps the first request of the queue from a slot, as in `Iterations.refused`; "" means that nobody waits.

"batch": static batching, whose running batch has not ended. "one_prefill": another prompt is in this iteration. The
others are limits of `SchedulerLimits`. If several apply, it is the first of them in this order.
"""


def admission_of(policy: str) -> Admission:
    """Translate batch_scheduler_policy of Triton's configuration into the engine's name."""
    return "MAX_UTILIZATION" if policy == "max_utilization" else "GUARANTEED_NO_EVICT"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the engine's scheduler, which is first come, first served.

    Attributes:
        policy: "static": slots are refilled when all are empty. "inflight": a free slot is refilled in the next
            iteration, with whole prompts. "inflight_chunked": prompts come in chunks that fit what decoding leaves of
            `max_num_tokens`. "one_prefill": in-flight, one prompt per iteration.
        slots: requests scheduled together (max_batch_size).
        max_num_tokens: tokens of an iteration; None means no limit. A longer prompt runs alone (or in chunks).
        admission: "GUARANTEED_NO_EVICT" reserves prompt and output on admission; "MAX_UTILIZATION" takes blocks as
            needed and, when there are none, pauses the request that came last (it is prefilled again).
        kv_blocks: blocks of the paged KV cache; None means no limit.
        prefix_tokens: tokens of each prompt that are already in the cache (KV reuse); they are not prefilled.
        ahead: each batch is chosen while the previous iteration runs (vLLM's asynchronous scheduling, the overlap
            scheduler of TensorRT-LLM's PyTorch backend), so that a request waits for one iteration more.
    """

    policy: Policy = "inflight"
    slots: int = 256
    max_num_tokens: int | None = 8192
    admission: Admission = "GUARANTEED_NO_EVICT"
    kv_blocks: int | None = None
    tokens_per_block: int = 32
    prefix_tokens: int = 0
    ahead: bool = False

    @property
    def shared_blocks(self) -> int:
        """KV blocks of the cached prefix, which all requests share."""
        return self.prefix_tokens // self.tokens_per_block

    def own_blocks(self, isl: Any, tokens: Any, cached: Any | None = None) -> Any:
        """Return the KV blocks of a request with `tokens` besides those; its last prompt token is always computed."""
        cached = np.minimum(self.prefix_tokens if cached is None else cached, isl - 1)
        return -(-tokens // self.tokens_per_block) - cached // self.tokens_per_block


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests, in order of arrival.

    Attributes:
        isl: int64[n], input tokens.
        osl: int64[n], output tokens, at least 1.
        arrival: float64[n], ascending, for an open loop; None means a closed loop.
        users: closed loop: number of requests kept in flight.
        client_delay: closed loop: from the end of a request to the arrival of the user's next one (round trip, think
            time, tokenizer); real measurements show that it is not 0.
        cached: int64[n], tokens of each prompt that are already in the cache; None takes the engine's `prefix_tokens`.
            Their blocks are not in the engine's `kv_blocks`.
    """

    isl: Any
    osl: Any
    arrival: Any | None = None
    users: int = 0
    client_delay: float = 0.0
    cached: Any | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """One row per request; NaN (or -1) for events that had not happened when the run ended. Arrays of length n.

    Attributes:
        admitted: time when it first got a slot.
        end: time of its last output token.
        preemptions: number of times it was paused.
    """

    arrival: Any
    admitted: Any
    first_token: Any
    end: Any
    isl: Any
    osl: Any
    produced: Any
    preemptions: Any
    slot: Any


@dataclass(frozen=True, slots=True)
class Iterations:
    """One row per iteration. Arrays of equal length.

    Attributes:
        start: time when it began.
        seconds: duration (ticks with a `TickCost`).
        prefilling: number of prompts or chunks.
        tokens: T.
        queue: requests waiting for a slot.
        refused: what kept the first of them from one, as an index of `REFUSALS`.
        kv_blocks: blocks in use (reserved) during the iteration.
        kv_tokens: tokens read by the attention of decoding requests.
    """

    start: Any
    seconds: Any
    decoding: Any
    prefilling: Any
    tokens: Any
    queue: Any
    refused: Any
    kv_blocks: Any
    kv_tokens: Any


@dataclass(frozen=True, slots=True)
class Stays:
    """One row per stay of a request in a slot; a paused request has several. Integer arrays.

    Attributes:
        request: index.
        slot: index.
        joined: iteration (row of `Iterations`) in which it got the slot.
        began: iteration that completed its prefill and thus yielded a token; -1 if it did not get that far.
        last: last iteration in which it was in the slot.
        tokens: output tokens produced, at the ends of the iterations began, began + 1, ...
    """

    request: Any
    slot: Any
    joined: Any
    began: Any
    last: Any
    tokens: Any


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulation.

    Attributes:
        requests: per request.
        iterations: per iteration; None unless requested.
        stays: per stay in a slot, in the order they ended; None unless iterations were requested.
        end: time when the run ended.
        request_iterations: sum over iterations of the requests in them (the unit in which speed is counted).
        backend: "numba" or "numpy".
    """

    requests: Requests
    iterations: Iterations | None
    stays: Stays | None
    end: float
    request_iterations: int
    backend: str


# Simulated requests as columns, so that one function computes the figures of measured and simulated requests.


def request_columns(requests: Requests, *, overhead: float = 0.0, responses: Responses | None = None) -> RequestColumns:
    """Return the requests as seen by their client, whose clock is `overhead` behind the engine's timestamps."""
    return RequestColumns(
        due=requests.arrival,
        first_token=requests.first_token + overhead,
        end=requests.end + overhead,
        isl=requests.isl,
        osl=requests.osl,
        responses=responses,
        admitted=requests.admitted,
    )


class IterationTokens:
    """Token times of a run simulated with iterations; every token is a separate response."""

    def __init__(self, run: SimulatedRun, overhead: float = 0.0) -> None:
        """Read the token times of a run.

        Raises:
            ValueError: the run was simulated without iterations.
        """
        if run.iterations is None or run.stays is None:
            raise ValueError("the run was simulated without iterations")
        yielded = run.stays.tokens > 0
        self.count: Any = run.requests.osl
        self._ends = run.iterations.start + run.iterations.seconds + overhead
        self._request, self._began, self._tokens = (
            column[yielded] for column in (run.stays.request, run.stays.began, run.stays.tokens)
        )

    def before(self, time: float) -> Any:
        """Count tokens before a time; see `pipelines.domain.summary.Responses.before`."""
        done = np.searchsorted(self._ends, time)  # iterations that had ended by then
        came = np.clip(done - self._began, 0, self._tokens)
        return np.bincount(self._request, weights=came, minlength=len(self.count)).astype(np.int64)

    def gaps(self, which: Any) -> Any:
        """Return no gaps: there would be one per token, and no caller needs them for a simulation."""
        return np.empty(0)


# Turn the stays of requests in slots into boxes that can be drawn or exported as a trace.

NOOP, CONTEXT, GEN, EOS = range(4)
"""Activities of a slot in an iteration."""
NAMES = ("NoOp", "Context", "Gen", "EoS")


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of time in which one request did the same thing in one slot."""

    slot: int
    kind: int
    start: float
    end: float
    request: int | None


def boxes(run: SimulatedRun) -> list[Box]:
    """Return the boxes of all requests, in the order they left their slots; empty slots have none.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    if run.iterations is None or run.stays is None:
        raise ValueError("the run was simulated without iterations")
    stays, ended = run.stays, np.isfinite(run.requests.end)
    begin = run.iterations.start
    finish = begin + run.iterations.seconds
    last_of = dict(zip(stays.request.tolist(), range(len(stays.request)), strict=True))
    drawn: list[Box] = []
    columns = (stays.request, stays.slot, stays.joined, stays.began, stays.last)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (request, slot, joined, began, last) in enumerate(rows):
        context = min(last if began < 0 else began, len(begin) - 1)
        last = min(last, len(begin) - 1)
        eos = last if ended[request] and last_of[request] == number and last > context else last + 1
        parts = ((CONTEXT, joined, context), (GEN, context + 1, eos - 1), (EOS, eos, last))
        drawn += [
            Box(slot, kind, float(begin[first]), float(finish[final]), request)
            for kind, first, final in parts
            if first <= final
        ]
    return drawn


def with_gaps(drawn: Iterable[Box], slots: int, until: float) -> list[Box]:
    """Return the boxes of the first `slots` slots that begin before `until`, by slot, with NoOp in all gaps."""
    rows: list[list[Box]] = [[] for _ in range(slots)]
    for box in drawn:
        if box.slot < slots and box.start < until:
            rows[box.slot].append(box)
    filled: list[Box] = []
    for slot, row in enumerate(rows):
        now = 0.0
        for box in sorted(row, key=attrgetter("start")):
            if box.start > now:
                filled.append(Box(slot, NOOP, now, box.start, None))
            filled.append(box)
            now = box.end
        if now < until:
            filled.append(Box(slot, NOOP, now, until, None))
    return filled
