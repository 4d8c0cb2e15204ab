"""State of the loop. Interpreted: objects and lists. Compiled: the same fields as records of numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np

STATIC, INFLIGHT, CHUNKED, ONE_PREFILL = range(4)
NOBODY, BATCH, SLOTS, KV_BLOCKS, ONE_PROMPT, TOKENS = range(6)  # `interface.REFUSALS`
ROW = 9  # numbers per iteration: start, seconds, decoding, prefilling, tokens, queue, refused, kv blocks, kv tokens
STAY = 6  # numbers per stay in a slot: request, slot, joined, began, last, tokens


class Rules(NamedTuple):
    """Engine limits and cost as numbers. `pool`: blocks without those of the cached prefix, `shared`."""

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
    """State of one request.

    Attributes:
        arrival, isl, osl, admitted, first, end, preemptions, slot: as in `interface.Requests`.
        produced: output tokens before this stay in a slot; all of them after it.
        blocks: blocks taken on admission.
        left: prompt tokens still to prefill.
        chunk: how many of them run in this iteration.
        joined: iteration in which it got its slot; -1 without one.
        began: iteration in which its prefill ended; -1 before that.
        offset: when decoding, it reads offset + iteration tokens of KV.
        finish: iteration in which its last token comes; -1 when not decoding.
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
    """Totals and positions of a run.

    Attributes:
        it: number of the next iteration.
        head: first request of the queue.
        arrived: number of requests that have arrived.
        known: number of requests whose arrival time is known.
        active: number of requests in slots.
        waiting: number of requests in the queue.
        refused: what kept the first of them from a slot in this iteration; NOBODY if the queue is empty.
        decoding: number of decoding requests.
        used: KV blocks in use.
        kv: tokens that decoding reads in the next iteration.
        windowed: the same, with each request capped at the window.
        filling: decoding requests that read no more than the window.
        worked: request-iterations so far.
    """

    it: int = 0
    head: int = 0
    arrived: int = 0
    known: int = 0
    active: int = 0
    waiting: int = 0
    refused: int = 0
    decoding: int = 0
    used: int = 0
    kv: int = 0
    windowed: int = 0
    filling: int = 0
    worked: int = 0


class Work(NamedTuple):
    """State of a run.

    In compiled code, a function that receives it counts references to all its lists, which takes longer than most of
    the work for one request. So only functions called once per iteration receive it; those called for each request
    get just the records and lists they need.
    """

    requests: list[Request]
    n: RunTotals
    cross: list[int]  # decoding requests that need a new block, by iteration modulo block
    finishing: list[int]  # heap of finish * requests + request
    filling: list[int]  # heap of (iteration in which the window is full) * requests + request
    free: list[int]  # heap of empty slots
    order: list[int]  # running requests in order of admission; ended ones are dropped lazily
    prefilling: list[int]  # in order
    rows: list[float]
    stays: list[int]


class Batch(NamedTuple):
    """Prompts of an iteration: their number, their tokens, sum of q x context, sum of shares of whole prompts."""

    prompts: int
    tokens: int
    q_ctx: float
    share: float


@cache
def record_of(kind: type) -> Any:
    """Return the numpy type with the fields of `Request` or `RunTotals`."""
    return np.dtype([(field.name, np.float64 if field.type == "float" else np.int64) for field in fields(kind)])
