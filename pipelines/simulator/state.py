"""What the loop works on: rules and state as NamedTuples of numbers, lists or arrays, which numba compiles too."""

from __future__ import annotations

from typing import Any, NamedTuple

STATIC, INFLIGHT, CHUNKED, ONE_PREFILL = range(4)
# Counters: places in Work.n. KV, FILLING and WINDOWED are those of the iteration that comes next.
IT, HEAD, ARRIVED, KNOWN, ACTIVE, WAITING, DECODING, USED, KV, WINDOWED, FILLING, WORKED = range(12)
COUNTERS = 12
ROW = 8  # numbers per iteration: start, seconds, decoding, prefilling, tokens, queue, kv blocks, kv tokens
STAY = 6  # numbers per stay in a slot: request, slot, joined, began, last, tokens


class Rules(NamedTuple):
    """What `Engine` and the cost say, as numbers. `pool`: own blocks; `shared`: the blocks of the cached prefix."""

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


class Work(NamedTuple):
    """The state: one place per request in the first fields, then counters, heaps and lists."""

    arrival: Any
    isl: Any
    osl: Any
    admitted: Any
    first: Any
    end: Any
    produced: Any  # before this stay in a slot; settled when it leaves
    preemptions: Any
    slot: Any
    left: Any  # prompt tokens to prefill
    chunk: Any  # of them in this iteration
    joined: Any  # iteration in which it got its slot
    began: Any  # iteration in which its prefill ended, -1 before
    offset: Any  # it reads offset + iteration tokens of KV when it decodes
    finish: Any  # iteration in which its last token comes, -1 when it does not decode
    cross: Any  # decoding requests that need a new block, by iteration modulo block
    n: Any  # the counters
    finishing: Any  # heap of finish * requests + request
    filling: Any  # heap of (iteration in which the window is full) * requests + request
    free: Any  # heap of empty slots
    order: Any  # running requests as they were admitted; those that ended are dropped late
    prefilling: Any  # in order
    rows: Any
    stays: Any


class Batch(NamedTuple):
    """The prompts of an iteration."""

    prompts: int
    tokens: int
    q_ctx: float
    share: float
