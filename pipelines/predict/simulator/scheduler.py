"""The scheduler of the simulated engine: queue, slots, blocks, prompts of an iteration. First come, first served.

Requests are admitted in order of arrival, and the one admitted last is paused first. So everything running came
before everything waiting, and the queue is "from `head` on": a pause moves `head` back.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from pipelines.predict.simulator.state import (
    BATCH,
    CHUNKED,
    KV_BLOCKS,
    NOBODY,
    ONE_PREFILL,
    ONE_PROMPT,
    SLOTS,
    STATIC,
    TOKENS,
    Batch,
    Request,
    Rules,
    RunTotals,
    Work,
)


def cached(rules: Rules, r: Request) -> int:
    """Return the number of prompt tokens already in the cache; the last prompt token is always computed."""
    return min(rules.prefix, r.isl - 1)


def blocks_of(rules: Rules, r: Request, tokens: int) -> int:
    """Return a request's own blocks when it holds `tokens`; all requests share whole blocks of the cached prefix."""
    return (tokens + rules.block - 1) // rules.block - cached(rules, r) // rules.block


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
        n.windowed -= min(kv, rules.window)
        if kv <= rules.window:
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


def reserved(rules: Rules, r: Request) -> int:
    """Return the tokens for which a request takes blocks on admission."""
    return r.isl + r.produced if rules.on_demand else r.isl + r.osl


def largest_chunk(rules: Rules, r: Request) -> int:
    """Return the tokens of its prompt's next chunk (with output from before a pause), ignoring the token budget."""
    return (r.isl + r.produced - cached(rules, r) + rules.chunks - 1) // rules.chunks


def refusal(rules: Rules, n: RunTotals, r: Request, budget: int, prompts: int) -> int:
    """Return what keeps a request from a slot in this iteration, or NOBODY.

    If several limits do, it is the one that lasts longest: slots and blocks are freed by requests that end, whereas
    every iteration has a new token budget.

    Args:
        rules: rules of the engine.
        n: totals of the run.
        r: first request of the queue.
        budget: tokens that are left in this iteration.
        prompts: prompts in it so far.
    """
    if n.active == rules.slots:
        return SLOTS
    if r.blocks > rules.pool - n.used:
        return KV_BLOCKS
    if rules.policy == ONE_PREFILL and prompts > 0:
        return ONE_PROMPT
    enough = budget > 0 if rules.policy == CHUNKED else n.active == 0 or largest_chunk(rules, r) <= budget
    return NOBODY if enough else TOKENS


def admit(rules: Rules, n: RunTotals, r: Request, now: float) -> None:
    """Admit a request: count it and its blocks; its prompt has yet to run."""
    if math.isnan(r.admitted):
        r.admitted = now
    r.joined = n.it
    r.began = -1
    r.left = r.isl + r.produced - cached(rules, r)
    n.used += r.blocks
    n.active += 1
    n.waiting -= 1


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
        r.blocks = blocks_of(rules, r, reserved(rules, r))
        n.refused = refusal(rules, n, r, budget - batch.tokens, batch.prompts)
        if n.refused != NOBODY:
            break
        r.slot = heappop(w.free)
        w.order.append(n.head)
        w.prefilling.append(n.head)
        admit(rules, n, r, now)
        batch = take_chunk(rules, r, budget - batch.tokens, batch)
        n.head += 1
        while n.head < n.arrived and not math.isnan(w.requests[n.head].end):  # ended before a pause moved the head back
            n.head += 1
    return batch
