"""The scheduler of the simulated engine: queue, slots, blocks, prompts of an iteration. First come, first served.

Requests are admitted in the order they arrive, and what is paused is the one that was admitted last. So everything that
runs came before everything that waits, and the queue is "from `head` on": a pause sets it back.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from pipelines.predict.simulator.state import CHUNKED, ONE_PREFILL, STATIC, Batch, Request, Rules, RunTotals, Work


def cached(rules: Rules, r: Request) -> int:
    """Prompt tokens that are in the cache already; the last one is computed in any case."""
    return min(rules.prefix, r.isl - 1)


def blocks_of(rules: Rules, r: Request, tokens: int) -> int:
    """Own blocks of a request that holds `tokens`; whole blocks of the cached prefix are shared by all."""
    return (tokens + rules.block - 1) // rules.block - cached(rules, r) // rules.block


def arrive(requests: list[Request], n: RunTotals, now: float) -> None:
    """Put those into the queue that came until now."""
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
            n.used -= blocks_of(rules, r, kv - 1) - r.blocks  # what it took since
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
    """Note the stay of request i in its slot; `last` is its last iteration, which need not have ended."""
    r = w.requests[i]
    tokens = w.n.it - r.began if r.began >= 0 else 0
    for number in (i, r.slot, r.joined, r.began, last, tokens):
        w.stays.append(number)


def pause_last(rules: Rules, w: Work) -> None:
    """Take the slot and the blocks from the request that came last; it is first in the queue now."""
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
    """Take the blocks that decoding needs in this iteration, and pause requests until there are as many."""
    n = w.n
    while w.cross[n.it % rules.block] > rules.pool - n.used:
        pause_last(rules, w)
    n.used += w.cross[n.it % rules.block]


def reserved(rules: Rules, r: Request) -> int:
    """Tokens for which a request takes blocks when it is admitted."""
    return r.isl + r.produced if rules.on_demand else r.isl + r.osl


def largest_chunk(rules: Rules, r: Request) -> int:
    """Tokens of a chunk of its prompt (with what it had produced before a pause), but for the token budget."""
    return (r.isl + r.produced - cached(rules, r) + rules.chunks - 1) // rules.chunks


def fits(rules: Rules, n: RunTotals, r: Request, budget: int) -> bool:
    """Whether a request may get a slot now: tokens of this iteration, blocks."""
    enough = budget > 0 if rules.policy == CHUNKED else n.active == 0 or largest_chunk(rules, r) <= budget
    return enough and r.blocks <= rules.pool - n.used


def admit(rules: Rules, n: RunTotals, r: Request, now: float) -> None:
    """Count a request that gets a slot, and its blocks; its prompt is yet to do."""
    if math.isnan(r.admitted):
        r.admitted = now
    r.joined = n.it
    r.began = -1
    r.left = r.isl + r.produced - cached(rules, r)
    n.used += r.blocks
    n.active += 1
    n.waiting -= 1


def take_chunk(rules: Rules, r: Request, budget: int, batch: Batch) -> Batch:
    """Add the next chunk of a request's prompt (all of it, as a rule) to the batch."""
    q = min(r.left, largest_chunk(rules, r))
    if rules.policy == CHUNKED:
        q = min(q, budget)
    r.chunk = q
    if q == 0:
        return batch
    context = r.isl + r.produced - r.left + (q + 1) / 2  # the mean over its tokens
    return Batch(batch.prompts + 1, batch.tokens + q, batch.q_ctx + q * context, batch.share + q / r.isl)


def schedule(rules: Rules, w: Work, now: float) -> Batch:
    """The prompts of this iteration: those that are in slots already, then the queue, first come, first served."""
    n = w.n
    budget = rules.max_tokens - n.decoding
    batch = Batch(0, 0, 0.0, 0.0)
    for i in w.prefilling:
        batch = take_chunk(rules, w.requests[i], budget - batch.tokens, batch)
    open_door = rules.policy != STATIC or n.active == 0
    while open_door and n.waiting > 0 and n.active < rules.slots:
        r = w.requests[n.head]
        r.blocks = blocks_of(rules, r, reserved(rules, r))
        if (rules.policy == ONE_PREFILL and batch.prompts > 0) or not fits(rules, n, r, budget - batch.tokens):
            break
        r.slot = heappop(w.free)
        w.order.append(n.head)
        w.prefilling.append(n.head)
        admit(rules, n, r, now)
        batch = take_chunk(rules, r, budget - batch.tokens, batch)
        n.head += 1
        while n.head < n.arrived and not math.isnan(w.requests[n.head].end):  # ended before a pause set the head back
            n.head += 1
    return batch
