"""The scheduler of the simulated engine: queue, slots, blocks, prompts of an iteration. First come, first served.

Requests are admitted in the order they arrive, and what is paused is the one that was admitted last. So everything that
runs came before everything that waits, and the queue is "from HEAD on": a pause sets HEAD back.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from pipelines.simulator.state import (
    ACTIVE,
    ARRIVED,
    CHUNKED,
    DECODING,
    FILLING,
    HEAD,
    IT,
    KNOWN,
    KV,
    ONE_PREFILL,
    STATIC,
    USED,
    WAITING,
    WINDOWED,
    Batch,
    Rules,
    Work,
)


def blocks_of(rules: Rules, isl: int, tokens: int) -> int:
    """Own blocks of a request that holds `tokens`; whole blocks of the cached prefix are shared by all."""
    return (tokens + rules.block - 1) // rules.block - min(rules.prefix, isl - 1) // rules.block


def arrive(w: Work, now: float) -> None:
    """Put those into the queue that came until now."""
    n = w.n
    while n[ARRIVED] < n[KNOWN] and w.arrival[n[ARRIVED]] <= now:
        n[ARRIVED] += 1
        n[WAITING] += 1


def leave(rules: Rules, w: Work, i: int, last: int, tokens: int, held: int) -> None:
    """Free the slot and the blocks of request i, whose last iteration was `last`; it yielded `tokens` in this stay."""
    n = w.n
    n[ACTIVE] -= 1
    n[USED] -= held
    w.produced[i] += tokens
    heappush(w.free, w.slot[i])
    if w.finish[i] >= 0:
        kv = w.offset[i] + n[IT]
        n[DECODING] -= 1
        n[KV] -= kv
        n[WINDOWED] -= min(kv, rules.window)
        if kv < rules.window:
            n[FILLING] -= 1
        w.cross[(1 - w.offset[i]) % rules.block] -= 1
        w.finish[i] = -1
    if rules.record:
        log_stay(w, i, last, tokens)


def log_stay(w: Work, i: int, last: int, tokens: int) -> None:
    """Note the stay of request i in its slot."""
    for number in (i, w.slot[i], w.joined[i], w.began[i], last, tokens):
        w.stays.append(number)


def pause_last(rules: Rules, w: Work) -> None:
    """Take the slot and the blocks from the request that came last; it is first in the queue now."""
    i = w.order.pop()
    while w.joined[i] < 0:
        i = w.order.pop()
    last = w.n[IT] - 1
    tokens, holds = 0, w.isl[i] + w.produced[i]
    if w.began[i] >= 0:
        tokens, holds = last - w.began[i] + 1, w.offset[i] + last
    else:
        w.prefilling.pop()
    leave(rules, w, i, last, tokens, blocks_of(rules, w.isl[i], holds))
    w.joined[i] = -1
    w.preemptions[i] += 1
    w.n[HEAD] = i
    w.n[WAITING] += 1


def make_room(rules: Rules, w: Work) -> None:
    """Take the blocks that decoding needs in this iteration, and pause requests until there are as many."""
    n = w.n
    while w.cross[n[IT] % rules.block] > rules.pool - n[USED]:
        pause_last(rules, w)
    n[USED] += w.cross[n[IT] % rules.block]


def fits(rules: Rules, w: Work, i: int, budget: int) -> bool:
    """Whether request i may get a slot now: tokens of this iteration, blocks."""
    n = w.n
    context = w.isl[i] + w.produced[i]
    if rules.policy == CHUNKED:
        enough = budget > 0
    else:
        todo = context - min(rules.prefix, w.isl[i] - 1)
        enough = n[ACTIVE] == 0 or (todo + rules.chunks - 1) // rules.chunks <= budget
    holds = context if rules.on_demand else w.isl[i] + w.osl[i]
    return enough and blocks_of(rules, w.isl[i], holds) <= rules.pool - n[USED]


def admit(rules: Rules, w: Work, i: int, now: float) -> None:
    """Give request i, the head of the queue, a slot and its blocks."""
    n = w.n
    context = w.isl[i] + w.produced[i]
    if math.isnan(w.admitted[i]):
        w.admitted[i] = now
    w.slot[i] = heappop(w.free)
    w.joined[i] = n[IT]
    w.began[i] = -1
    w.left[i] = context - min(rules.prefix, w.isl[i] - 1)
    n[USED] += blocks_of(rules, w.isl[i], context if rules.on_demand else w.isl[i] + w.osl[i])
    n[ACTIVE] += 1
    n[WAITING] -= 1
    w.order.append(i)
    w.prefilling.append(i)
    n[HEAD] += 1
    while n[HEAD] < n[ARRIVED] and not math.isnan(w.end[n[HEAD]]):  # ended before a pause set the head back
        n[HEAD] += 1


def take_chunk(rules: Rules, w: Work, i: int, budget: int, batch: Batch) -> Batch:
    """Add the next chunk of the prompt of request i (all of it, as a rule) to the batch."""
    context = w.isl[i] + w.produced[i]
    todo = context - min(rules.prefix, w.isl[i] - 1)
    q = min(w.left[i], (todo + rules.chunks - 1) // rules.chunks)
    if rules.policy == CHUNKED:
        q = min(q, budget)
    w.chunk[i] = q
    if q == 0:
        return batch
    mean_context = context - w.left[i] + (q + 1) / 2
    return Batch(batch.prompts + 1, batch.tokens + q, batch.q_ctx + q * mean_context, batch.share + q / w.isl[i])


def schedule(rules: Rules, w: Work, now: float) -> Batch:
    """The prompts of this iteration: those that are in slots already, then the queue, first come, first served."""
    n = w.n
    budget = rules.max_tokens - n[DECODING]
    batch = Batch(0, 0, 0.0, 0.0)
    for i in w.prefilling:
        batch = take_chunk(rules, w, i, budget - batch.tokens, batch)
    open_door = rules.policy != STATIC or n[ACTIVE] == 0
    while open_door and n[WAITING] > 0 and n[ACTIVE] < rules.slots:
        i = n[HEAD]
        if (rules.policy == ONE_PREFILL and batch.prompts > 0) or not fits(rules, w, i, budget - batch.tokens):
            break
        admit(rules, w, i, now)
        batch = take_chunk(rules, w, i, budget - batch.tokens, batch)
    return batch
