"""What the loop works on. Plain: objects and lists. Compiled: the same fields as records of numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

STATIC, INFLIGHT, CHUNKED, ONE_PREFILL = range(4)
ROW = 8  # numbers per iteration: start, seconds, decoding, prefilling, tokens, queue, kv blocks, kv tokens
STAY = 6  # numbers per stay in a slot: request, slot, joined, began, last, tokens


class Rules(NamedTuple):
    """What `Engine` and the cost say, as numbers. `pool`: blocks but for those of the cached prefix, `shared`."""

    policy: int
    slots: int
    max_tokens: int
    on_demand: bool
    pool: int
    block: int
    prefix: int
    shared: int
    chunks: int
    window: int
    ticks: bool
    delay: float
    until: float
    record: bool


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        arrival, isl, osl, admitted, first, end, preemptions, slot: as in `interface.Requests`.
        produced: output tokens before this stay in a slot; all of them when it is over.
        blocks: that it took when it was admitted.
        left: prompt tokens yet to prefill.
        chunk: of them in this iteration.
        joined: iteration in which it got its slot; -1 when it has none.
        began: iteration in which its prefill ended; -1 before.
        offset: it reads offset + iteration tokens of KV when it decodes.
        finish: iteration in which its last token comes; -1 when it does not decode.
    """

    arrival: float = math.nan
    isl: int = 0
    osl: int = 0
    admitted: float = math.nan
    first: float = math.nan
    end: float = math.nan
    produced: int = 0
    preemptions: int = 0
    slot: int = -1
    blocks: int = 0
    left: int = 0
    chunk: int = 0
    joined: int = -1
    began: int = -1
    offset: int = 0
    finish: int = -1


@dataclass(slots=True)
class RunTotals:
    """Sums and places.

    Attributes:
        it: the iteration that comes next.
        head: first request of the queue.
        arrived: requests that arrived.
        known: requests whose arrival is known.
        active: requests in slots.
        waiting: requests in the queue.
        decoding: requests that decode.
        used: KV blocks.
        kv: tokens that decoding reads in the iteration that comes next.
        windowed: the same, each no longer than the window.
        filling: decoding requests that read no more than the window.
        worked: request-iterations.
    """

    it: int = 0
    head: int = 0
    arrived: int = 0
    known: int = 0
    active: int = 0
    waiting: int = 0
    decoding: int = 0
    used: int = 0
    kv: int = 0
    windowed: int = 0
    filling: int = 0
    worked: int = 0


class Work(NamedTuple):
    """The state of a run.

    Compiled, a function that gets it counts references to all its lists up and down, which takes longer than most of
    what is done for one request. So it goes to what is called once in an iteration; what is called for each request
    gets the records and lists it needs.
    """

    requests: list[Request]
    n: RunTotals
    cross: list[int]  # decoding requests that need a new block, by iteration modulo block
    finishing: list[int]  # heap of finish * requests + request
    filling: list[int]  # heap of (iteration in which the window is full) * requests + request
    free: list[int]  # heap of empty slots
    order: list[int]  # running requests as they were admitted; those that ended are dropped late
    prefilling: list[int]  # in order
    rows: list[float]
    stays: list[int]


class Batch(NamedTuple):
    """The prompts of an iteration: how many, their tokens, sum of q x context, sum of shares of whole prompts."""

    prompts: int
    tokens: int
    q_ctx: float
    share: float


def record_of(kind: type) -> Any:
    """The numpy type with the fields of `Request` or `RunTotals`."""
    return np.dtype([(field.name, np.float64 if field.type == "float" else np.int64) for field in fields(kind)])
