"""The scheduler of the simulated engine: queue, slots, blocks, prompts of an iteration. First come, first served.

Requests are admitted in order of arrival, and the one admitted last is paused first. So everything running came
before everything waiting, and the queue is "from `head` on": a pause moves `head` back.
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

# State of the loop. Interpreted: objects and lists. Compiled: the same fields as records of numpy arrays.

STATIC, INFLIGHT, CHUNKED, ONE_PREFILL = range(4)
NOBODY, BATCH, SLOTS, KV_BLOCKS, ONE_PROMPT, TOKENS = range(6)  # `interface.REFUSALS`


class Rules(NamedTuple):
    """Engine limits and cost as numbers. `pool`: blocks without those of the cached prefix, `shared`."""

    policy: int
    slots: int
    max_tokens: int
    on_demand: bool
    pool: int
    block: int
    ahead: bool
    shared: int
    chunks: int
    window: int
    chunk: int
    ticks: bool
    delay: float
    until: float
    record: bool


@dataclass(slots=True)
class Request:
    """State of one request.

    Attributes:
        arrival, isl, osl, admitted, first, end, preemptions, slot: as in `interface.Requests`.
        cached: prompt tokens that are already in the KV cache; the last prompt token is always computed.
        produced: output tokens before this stay in a slot; all of them after it.
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
    cached: int = 0
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
        known: number of requests whose arrival time is known.
        active: number of requests in slots.
        waiting: number of requests in the queue.
        refused: what kept the first of them from a slot in this iteration; NOBODY if the queue is empty.
        used: KV blocks in use.
        kv: tokens that decoding reads in the next iteration.
        windowed: the same, with each request capped at the window, or its part in the newest chunk.
        filling: decoding requests that read no more than the window; all of them with chunks.
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
    filling: list[int]  # heap of (iteration in which the window or chunk is full) * requests + request
    free: list[int]  # heap of empty slots
    order: list[int]  # running requests in order of admission; ended ones are dropped lazily
    prefilling: list[int]  # in order
    rows: list[float]  # fields of `interface.Iterations`, one iteration after the other
    stays: list[int]  # fields of `interface.Stays`


class Batch(NamedTuple):
    """Prompts of an iteration: their number, their tokens, sum of q x context, sum of shares of whole prompts."""

    prompts: int
    tokens: int
    q_ctx: float
    share: float


@cache
def record_of(kind: type) -> Any:
    """Return the numpy type with the fields of `Request` or `RunTotals`."""
    return np.dtype([(field.name, np.float64 if field.type is float else np.int64) for field in fields(kind)])


def blocks_of(rules: Rules, r: Request, tokens: int) -> int:
    """Return a request's own blocks when it holds `tokens`; all requests share whole blocks of the cached prefix."""
    return (tokens + rules.block - 1) // rules.block - r.cached // rules.block


def in_window(rules: Rules, kv: int) -> int:
    """Return how many of a request's KV tokens the layers with a window read, or those with chunks."""
    return (kv - 1) % rules.chunk + 1 if rules.chunk > 0 else min(kv, rules.window)


def is_filling(rules: Rules, kv: int) -> bool:
    """Return whether a request that reads so many KV tokens reads one more in the next iteration, or a new chunk."""
    return rules.chunk > 0 or kv <= rules.window


def arrive(requests: list[Request], n: RunTotals, now: float) -> None:
    """Add requests that have arrived by now to the queue."""
    while n.arrived < n.known and requests[n.arrived].arrival <= now:
        n.arrived += 1
        n.waiting += 1


def leave(rules: Rules, n: RunTotals, r: Request, free: list[int], cross: list[int]) -> None:
    """Take a request from its slot, between two iterations."""
    heappush(free, r.slot)
    n.active -= 1
    n.used -= r.blocks
    if r.finish >= 0:
        kv = r.offset + n.it
        if rules.on_demand:
            n.used -= blocks_of(rules, r, kv - 1) - r.blocks  # blocks taken since admission
            cross[(1 - r.offset) % rules.block] -= 1
        r.produced += n.it - r.began
        n.decoding -= 1
        n.kv -= kv
        n.windowed -= in_window(rules, kv)
        if is_filling(rules, kv):
            n.filling -= 1
        r.finish = -1
    r.joined = -1


def log_stay(w: Work, i: int, last: int) -> None:
    """Record the stay of request i in its slot; `last` is its last iteration, which need not have ended."""
    r = w.requests[i]
    tokens = w.n.it - r.began if r.began >= 0 else 0
    for number in (i, r.slot, r.joined, r.began, last, tokens):
        w.stays.append(number)


def pause_last(rules: Rules, w: Work) -> None:
    """Pause the request that came last: take its slot and blocks and make it first in the queue."""
    i = w.order.pop()
    while w.requests[i].joined < 0:
        i = w.order.pop()
    r = w.requests[i]
    if r.began < 0:
        w.prefilling.pop()
    if rules.record:
        log_stay(w, i, w.n.it - 1)
    leave(rules, w.n, r, w.free, w.cross)
    r.preemptions += 1
    w.n.head = i
    w.n.waiting += 1


def make_room(rules: Rules, w: Work) -> None:
    """Take the blocks that decoding needs in this iteration, pausing requests until there are enough."""
    n = w.n
    while w.cross[n.it % rules.block] > rules.pool - n.used:
        pause_last(rules, w)
    n.used += w.cross[n.it % rules.block]


def largest_chunk(rules: Rules, r: Request) -> int:
    """Return the tokens of its prompt's next chunk (with output from before a pause), ignoring the token budget."""
    return (r.isl + r.produced - r.cached + rules.chunks - 1) // rules.chunks


def refusal(rules: Rules, n: RunTotals, r: Request, budget: int, prompts: int) -> int:
    """Return why a request gets no slot in this iteration, or NOBODY.

    If several limits do, it is the one that lasts longest: slots and blocks are freed by requests that end, whereas
    every iteration has a new token budget.
    """
    if n.active == rules.slots:
        return SLOTS
    if r.blocks > rules.pool - n.used:
        return KV_BLOCKS
    if rules.policy == ONE_PREFILL and prompts > 0:
        return ONE_PROMPT
    enough = budget > 0 if rules.policy == CHUNKED else n.active == 0 or largest_chunk(rules, r) <= budget
    return NOBODY if enough else TOKENS


def take_chunk(rules: Rules, r: Request, budget: int, batch: Batch) -> Batch:
    """Add the next chunk of a request's prompt (usually all of it) to the batch."""
    q = min(r.left, largest_chunk(rules, r))
    if rules.policy == CHUNKED:
        q = min(q, budget)
    r.chunk = q
    if q == 0:
        return batch
    context = r.isl + r.produced - r.left + (q + 1) / 2  # mean over the chunk's tokens
    return Batch(batch.prompts + 1, batch.tokens + q, batch.q_ctx + q * context, batch.share + q / r.isl)


def schedule(rules: Rules, w: Work, now: float) -> Batch:
    """Choose the prompts of this iteration: those already in slots, then the queue, first come, first served."""
    n = w.n
    budget = rules.max_tokens - n.decoding
    batch = Batch(0, 0, 0.0, 0.0)
    for i in w.prefilling:
        batch = take_chunk(rules, w.requests[i], budget - batch.tokens, batch)
    n.refused = NOBODY
    if rules.policy == STATIC and n.active > 0:
        n.refused = BATCH if n.waiting > 0 else NOBODY
        return batch
    while n.waiting > 0:
        r = w.requests[n.head]
        r.blocks = blocks_of(rules, r, r.isl + r.produced if rules.on_demand else r.isl + r.osl)
        n.refused = refusal(rules, n, r, budget - batch.tokens, batch.prompts)
        if n.refused != NOBODY:
            break
        r.slot = heappop(w.free)
        w.order.append(n.head)
        w.prefilling.append(n.head)
        if math.isnan(r.admitted):
            r.admitted = now
        r.joined = n.it
        r.began = -1
        r.left = r.isl + r.produced - r.cached
        n.used += r.blocks
        n.active += 1
        n.waiting -= 1
        batch = take_chunk(rules, r, budget - batch.tokens, batch)
        n.head += 1
        while n.head < n.arrived and not math.isnan(w.requests[n.head].end):  # ended before a pause moved the head back
            n.head += 1
    return batch
