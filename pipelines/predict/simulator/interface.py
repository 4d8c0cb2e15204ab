"""What is simulated and what comes out. Times are in seconds, or in ticks with a `TickCost`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Policy = Literal["static", "inflight", "inflight_chunked", "one_prefill"]
Admission = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]


def admission_of(policy: str) -> Admission:
    """What Triton's configuration calls batch_scheduler_policy, in the engine's words."""
    return "MAX_UTILIZATION" if policy == "max_utilization" else "GUARANTEED_NO_EVICT"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler of an engine allows. FCFS.

    Attributes:
        policy: "static": slots are refilled when all are empty. "inflight": a free slot is refilled in the next
            iteration, whole prompts. "inflight_chunked": prompts in chunks within what decoding leaves of
            `max_num_tokens`. "one_prefill": in-flight, one prompt per iteration.
        slots: requests scheduled together (max_batch_size).
        max_num_tokens: tokens of an iteration; None is no limit. A longer prompt goes alone (or in chunks).
        admission: "GUARANTEED_NO_EVICT" reserves prompt and output when it admits; "MAX_UTILIZATION" takes blocks as
            they are needed and pauses the request that came last when there are none (it is prefilled again).
        kv_blocks: blocks of the paged KV cache; None is no limit.
        tokens_per_block: of one.
        prefix_tokens: of each prompt that are in the cache already (KV reuse); they are not prefilled.
    """

    policy: Policy = "inflight"
    slots: int = 256
    max_num_tokens: int | None = 8192
    admission: Admission = "GUARANTEED_NO_EVICT"
    kv_blocks: int | None = None
    tokens_per_block: int = 32
    prefix_tokens: int = 0

    @property
    def shared_blocks(self) -> int:
        """KV blocks of the cached prefix; all requests use the same."""
        return self.prefix_tokens // self.tokens_per_block

    def own_blocks(self, isl: Any, tokens: Any) -> Any:
        """KV blocks of a request beside those; the last token of a prompt is computed in any case.

        Args:
            isl: its input tokens; an array for several requests.
            tokens: that it holds blocks for.
        """
        cached = np.minimum(self.prefix_tokens, isl - 1)
        return -(-tokens // self.tokens_per_block) - cached // self.tokens_per_block


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests, in the order they arrive.

    Attributes:
        isl: int64[n], input tokens.
        osl: int64[n], output tokens, at least 1.
        arrival: float64[n], ascending, of an open loop; None is a closed loop.
        users: closed loop: requests kept in flight.
        client_delay: closed loop: from the end of a request to the arrival of the user's next one (round trip, think
            time, tokenizer); one slot-refill lesson of real measurements is that this is not 0.
    """

    isl: Any
    osl: Any
    arrival: Any | None = None
    users: int = 0
    client_delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Requests:
    """One row per request; NaN (or -1) for what had not happened when the run ended. Arrays of length n.

    Attributes:
        arrival: when it arrived.
        admitted: when it first got a slot.
        first_token: when its first output token came.
        end: when its last output token came.
        isl: input tokens.
        osl: output tokens wanted.
        produced: output tokens that came.
        preemptions: how often it was paused.
        slot: it ran in last.
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
        start: when it began.
        seconds: how long it took (ticks with a `TickCost`).
        decoding: requests that decoded.
        prefilling: prompts or chunks in it.
        tokens: T.
        queue: requests that waited for a slot.
        kv_blocks: in use (reserved) during it.
        kv_tokens: read by attention of decoding requests.
    """

    start: Any
    seconds: Any
    decoding: Any
    prefilling: Any
    tokens: Any
    queue: Any
    kv_blocks: Any
    kv_tokens: Any


@dataclass(frozen=True, slots=True)
class Stays:
    """One row per stay of a request in a slot; a request that was paused has more than one. Integer arrays.

    Attributes:
        request: index.
        slot: index.
        joined: iteration (row of `Iterations`) in which it got the slot.
        began: iteration that completed its prefill and so yielded a token; -1 when it did not come that far.
        last: iteration in which it was in the slot last.
        tokens: output tokens that came, at the ends of the iterations began, began + 1, ...
    """

    request: Any
    slot: Any
    joined: Any
    began: Any
    last: Any
    tokens: Any


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulation gives.

    Attributes:
        requests: per request.
        iterations: per iteration; None unless they were asked for.
        stays: per stay in a slot, in the order they ended; None unless iterations were asked for.
        slots_over_time: int8[iterations, slots], what each slot did (0 NoOp, 1 Context, 2 Gen, 3 EoS), or None.
        end: when the run ended.
        iteration_count: how many there were.
        request_iterations: sum over iterations of requests in them (what the speed is counted in).
        backend: "numba" or "numpy".
    """

    requests: Requests
    iterations: Iterations | None
    stays: Stays | None
    slots_over_time: Any | None
    end: float
    iteration_count: int
    request_iterations: int
    backend: str
