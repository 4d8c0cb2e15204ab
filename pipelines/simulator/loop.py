"""The loop over engine iterations: one source, run as it is or compiled by numba (see `backend.py`).

An iteration's time is known when its batch is known, so there is no event queue: the iterations are the clock. What
happens to a request is known ahead in iterations (a decoding request yields one token in each), so two heaps of
iteration numbers say when the next one ends or fills its window. Between two events a stretch of iterations that only
decode has a linear KV read, and its time is a sum in closed form; blocks are taken in a cycle of `block` iterations.
No step looks at all running requests, so a request costs the same whatever its length and the batch.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

import numpy as np

from pipelines.simulator.scheduler import arrive, blocks_of, leave, log_stay, make_room, schedule
from pipelines.simulator.state import (
    ACTIVE,
    ARRIVED,
    COUNTERS,
    DECODING,
    FILLING,
    IT,
    KNOWN,
    KV,
    STATIC,
    USED,
    WAITING,
    WINDOWED,
    WORKED,
    Batch,
    Rules,
    Work,
)


def iteration_seconds(c: Any, tokens: Any, sequences: Any, q_ctx: Any, kv: Any, kv_window: Any, prefills: Any) -> Any:
    """The formula of `IterationCost` (whose `array()` is `c`); numbers, or arrays of equal shape."""
    touched = c[5] + (1 - c[5]) * (1 - (1 - c[6]) ** tokens)
    compute = c[0] * tokens + c[1] * sequences
    memory = c[2] * touched + c[3]
    linears = (compute ** c[4] + memory ** c[4]) ** (1 / c[4])
    attention = c[7] * q_ctx + c[8] * kv + c[9] * kv_window
    replies = c[16] * sequences * (sequences <= c[15])
    return linears + attention + c[11] * tokens + c[12] + c[13] * sequences + c[14] * prefills + replies


def seconds_of(rules: Rules, cost: Any, w: Work, batch: Batch) -> float:
    """How long this iteration takes."""
    n = w.n
    if rules.ticks:
        return float(max(cost[0] * batch.share, cost[1] if n[DECODING] else 0.0, 1.0))
    sequences = n[DECODING] + batch.prompts
    tokens = n[DECODING] + batch.tokens
    return float(iteration_seconds(cost, tokens, sequences, batch.q_ctx, n[KV], n[WINDOWED], batch.prompts))


def later(now: float, first: float, slope: float, k: int) -> float:
    """The time after k iterations, each `slope` longer than the one before."""
    return now + k * first + slope * (k * (k - 1) // 2)


def reach(now: float, first: float, slope: float, k: int, goal: float) -> int:
    """Iterations, at least 1 and at most k, until the time is at or after the goal."""
    if later(now, first, slope, k) < goal:
        return k
    half = first - slope / 2
    root = math.sqrt(half * half + 2 * slope * max(goal - now, 0.0))
    guess = min(max(math.ceil(2 * max(goal - now, 0.0) / (half + root)), 1), k)
    while guess > 1 and later(now, first, slope, guess - 1) >= goal:
        guess -= 1
    while later(now, first, slope, guess) < goal:
        guess += 1
    return guess


def room_for(rules: Rules, w: Work, k: int) -> int:
    """Iterations, at most k, for which blocks are there; the blocks after the first iteration's are taken."""
    n = w.n
    room = rules.pool - n[USED]
    whole = min((k - 1) // rules.block, room // n[DECODING])  # in `block` iterations each request takes one block
    done: int = 1 + whole * rules.block
    room -= whole * n[DECODING]
    while done < k and w.cross[(n[IT] + done) % rules.block] <= room:
        room -= w.cross[(n[IT] + done) % rules.block]
        done += 1
    n[USED] = rules.pool - room
    return done


def stretch(rules: Rules, w: Work, now: float, first: float, slope: float) -> int:
    """Iterations, all alike, until something may happen: an end, a full window, an arrival, no block."""
    n = w.n
    if rules.record:
        return 1
    requests = len(w.isl)
    while w.finish[w.finishing[0] % requests] != w.finishing[0] // requests:  # paused since
        heappop(w.finishing)
    k: int = w.finishing[0] // requests - n[IT] + 1
    if n[FILLING] > 0:
        drop_stale(rules, w)
        k = min(k, w.filling[0] // requests - n[IT] + 1)
    if n[WAITING] == 0 and n[ACTIVE] < rules.slots and rules.policy != STATIC and n[ARRIVED] < n[KNOWN]:
        k = reach(now, first, slope, k, w.arrival[n[ARRIVED]])
    k = reach(now, first, slope, k, rules.until)
    return room_for(rules, w, k) if rules.on_demand else k


def drop_stale(rules: Rules, w: Work) -> None:
    """Drop entries of requests that left from the top of the heap of windows."""
    requests = len(w.isl)
    while True:
        i, when = w.filling[0] % requests, w.filling[0] // requests
        if w.finish[i] >= 0 and rules.window - w.offset[i] == when:
            return
        heappop(w.filling)


def advance(rules: Rules, w: Work, now: float, k: int) -> None:
    """Go on by k iterations, to the time `now`: tokens come, requests end."""
    n = w.n
    n[IT] += k
    n[KV] += k * n[DECODING]
    n[WINDOWED] += k * n[FILLING]
    requests = len(w.isl)
    while len(w.filling) > 0 and w.filling[0] // requests < n[IT]:
        when, i = divmod(heappop(w.filling), requests)
        if w.finish[i] >= 0 and rules.window - w.offset[i] == when:
            n[FILLING] -= 1
            n[WINDOWED] -= 1  # it was counted one step too far
    while len(w.finishing) > 0 and w.finishing[0] // requests < n[IT]:
        when, i = divmod(heappop(w.finishing), requests)
        if w.finish[i] == when:
            finish(rules, w, i, now, when)
    finish_prefills(rules, w, now)


def finish_prefills(rules: Rules, w: Work, now: float) -> None:
    """Count the chunks of the last iteration; the last one of a prompt yields a token."""
    kept = 0
    for i in w.prefilling:
        w.left[i] -= w.chunk[i]
        if w.left[i] > 0:
            w.prefilling[kept] = i
            kept += 1
        else:
            begin(rules, w, i, now)
    while len(w.prefilling) > kept:
        w.prefilling.pop()


def begin(rules: Rules, w: Work, i: int, now: float) -> None:
    """Prefill of request i is done: its first token is there, and it decodes from the next iteration on."""
    n = w.n
    it = n[IT] - 1
    context = w.isl[i] + w.produced[i]
    w.began[i] = it
    w.offset[i] = context - it
    if math.isnan(w.first[i]):
        w.first[i] = now
    if w.produced[i] + 1 == w.osl[i]:
        finish(rules, w, i, now, it)
        return
    w.finish[i] = it + w.osl[i] - w.produced[i] - 1
    heappush(w.finishing, w.finish[i] * len(w.isl) + i)
    n[DECODING] += 1
    n[KV] += context + 1
    n[WINDOWED] += min(context + 1, rules.window)
    if context + 1 < rules.window:
        n[FILLING] += 1
        heappush(w.filling, (rules.window - w.offset[i]) * len(w.isl) + i)
    w.cross[(1 - w.offset[i]) % rules.block] += 1


def finish(rules: Rules, w: Work, i: int, now: float, last: int) -> None:
    """Request i has all its tokens; in a closed loop the user's next one arrives after the delay."""
    n = w.n
    holds = w.offset[i] + last if rules.on_demand else w.isl[i] + w.osl[i]
    leave(rules, w, i, last, last - w.began[i] + 1, blocks_of(rules, w.isl[i], holds))
    w.end[i] = now
    w.joined[i] = -1
    if n[KNOWN] < len(w.isl):
        w.arrival[n[KNOWN]] = now + rules.delay
        n[KNOWN] += 1


def idle(rules: Rules, w: Work, now: float) -> float:
    """Nothing runs: the time at which the next request can be admitted. Ticks go on ticking."""
    goal: float = min(w.arrival[w.n[ARRIVED]], rules.until)
    if not rules.ticks:
        return goal
    k = 1 if rules.record else max(math.ceil(goal - now), 1)
    if rules.record:
        log_row(rules, w, now, 1.0, Batch(0, 0, 0.0, 0.0))
    w.n[IT] += k
    return now + k


def log_row(rules: Rules, w: Work, now: float, seconds: float, batch: Batch) -> None:
    """Note this iteration."""
    n = w.n
    counts = (n[DECODING], batch.prompts, n[DECODING] + batch.tokens, n[WAITING], n[USED] + rules.shared, n[KV])
    w.rows.append(now)
    w.rows.append(seconds)
    for count in counts:
        w.rows.append(float(count))


def settle(rules: Rules, w: Work) -> None:
    """Count the tokens of those that still run when the run ends inside an iteration."""
    it = w.n[IT]
    for i in w.order:
        if w.joined[i] >= 0:
            tokens = it - w.began[i] if w.began[i] >= 0 else 0
            w.produced[i] += tokens
            if rules.record:
                log_stay(w, i, it, tokens)


def run(rules: Rules, cost: Any, w: Work) -> float:
    """Iterate until all requests have ended, or until `rules.until`; returns when the run ended."""
    n = w.n
    now = 0.0
    while now < rules.until:
        arrive(w, now)
        if rules.on_demand:
            make_room(rules, w)
        batch = schedule(rules, w, now)
        if n[ACTIVE] == 0:
            if n[ARRIVED] == n[KNOWN]:
                break
            now = idle(rules, w, now)
            continue
        first = seconds_of(rules, cost, w, batch)
        slope = 0.0 if rules.ticks else cost[8] * n[DECODING] + cost[9] * n[FILLING]
        if rules.record:
            log_row(rules, w, now, first, batch)
        k = 1 if batch.prompts > 0 else stretch(rules, w, now, first, slope)
        n[WORKED] += (n[DECODING] + batch.prompts) * k
        now = later(now, first, slope, k)
        if now >= rules.until:  # the last iteration is cut, those before it in the stretch are not
            n[IT] += k - 1
            break
        advance(rules, w, now, k)
    settle(rules, w)
    return now


def simulate(rules: Rules, cost: Any, table: Any, known: int) -> Any:
    """Run one load.

    Args:
        rules: of the engine.
        cost: `IterationCost.array()`, or prefill and decode ticks.
        table: the first fields of `Work`, up to `finish`, as lists or arrays of length n.
        known: arrivals that are known at the start.

    Returns:
        End of the run, iterations, request-iterations, rows, stays.
    """
    counters = [0] * COUNTERS
    counters[KNOWN] = known
    cross = [0] * rules.block
    finishing, filling, order, prefilling, stays = [0], [0], [0], [0], [0]
    rows = [0.0]
    finishing.pop(), filling.pop(), order.pop(), prefilling.pop(), stays.pop(), rows.pop()
    free = list(range(rules.slots))
    w = Work(*table, cross, counters, finishing, filling, free, order, prefilling, rows, stays)  # type: ignore[call-arg]
    end = run(rules, cost, w)
    return end, counters[IT], counters[WORKED], np.array(rows), np.array(stays)
