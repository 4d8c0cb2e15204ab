"""The loop over engine iterations: one source, interpreted or compiled by numba (see `backend.py`).

An iteration's duration is known once its batch is, so there is no event queue: the iterations are the clock. Events
are known ahead in iterations (a decoding request yields one token in each), so two heaps of iteration numbers give
the next end of a request and the next full window. Between two events, a stretch of iterations that only decode reads
linearly growing KV, so its time is a closed-form sum; blocks are taken in a cycle of `block` iterations. No step
looks at all running requests, so a request costs the same whatever its length and the batch.
"""

import math
from heapq import heappop, heappush
from typing import Any

import numpy as np

from pipelines.predict.simulator.scheduler import (
    STATIC,
    Batch,
    Request,
    Rules,
    RunTotals,
    Work,
    arrive,
    in_window,
    is_filling,
    leave,
    log_stay,
    make_room,
    schedule,
)


def iteration_seconds(c: Any, tokens: Any, sequences: Any, q_ctx: Any, kv: Any, kv_window: Any, prefills: Any) -> Any:
    """Evaluate the formula of `IterationCost` (whose `array()` is `c`) without `end`; numbers, or same-shape arrays."""
    some = 1 - (1 - c[6]) ** tokens
    touched = c[5] + (1 - c[5]) * some
    compute = c[0] * tokens + c[1] * sequences + c[18] * some
    memory = c[2] * touched + c[3]
    linears = (compute ** c[4] + memory ** c[4]) ** (1 / c[4])
    # the smaller of the two, for numbers and arrays; a query attends to the mean context of its batch
    over = q_ctx - (tokens - sequences + prefills) * c[10]
    prompts = c[7] * q_ctx + c[17] * (q_ctx - (over + abs(over)) / 2)
    decoding = (c[8] + c[20] * (prefills > 0)) * kv + c[9] * kv_window
    host = c[12] + c[13] * sequences + c[14] * prefills + c[15] * (prefills > 0)
    return linears + prompts + decoding + c[11] * tokens + host


def seconds_of(rules: Rules, cost: Any, n: RunTotals, batch: Batch) -> float:
    """Return the duration of this iteration."""
    if rules.ticks:
        return float(max(cost[0] * batch.share, cost[1] if n.decoding else 0.0, 1.0))
    sequences = n.decoding + batch.prompts
    tokens = n.decoding + batch.tokens
    return float(iteration_seconds(cost, tokens, sequences, batch.q_ctx, n.kv, n.windowed, batch.prompts))


def later(now: float, first: float, slope: float, k: int) -> float:
    """Return the time after k iterations, each `slope` longer than the one before."""
    return now + k * first + slope * (k * (k - 1) // 2)


def reach(now: float, first: float, slope: float, k: int, goal: float) -> int:
    """Return the number of iterations, from 1 to k, until the time is at or after the goal."""
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
    """Return the number of iterations, at most k, that have blocks; those after the first one take theirs here."""
    n = w.n
    room = rules.pool - n.used
    whole = min((k - 1) // rules.block, room // n.decoding)  # each request takes one block every `block` iterations
    done = 1 + whole * rules.block
    room -= whole * n.decoding
    while done < k and w.cross[(n.it + done) % rules.block] <= room:
        room -= w.cross[(n.it + done) % rules.block]
        done += 1
    n.used = rules.pool - room
    return done


def stretch(rules: Rules, w: Work, now: float, first: float, slope: float) -> int:
    """Return the number of identical iterations until a possible event: an end, a full window, an arrival, no block."""
    n = w.n
    if rules.record:
        return 1
    requests = len(w.requests)
    finish, i = divmod(w.finishing[0], requests)
    while w.requests[i].finish != finish:  # it has been paused since
        heappop(w.finishing)
        finish, i = divmod(w.finishing[0], requests)
    k = finish - n.it + 1
    if n.filling > 0:
        full, i = divmod(w.filling[0], requests)
        while not fills(rules, w.requests[i], full):
            heappop(w.filling)
            full, i = divmod(w.filling[0], requests)
        k = min(k, full - n.it + 1)
    if n.waiting == 0 and n.active < rules.slots and rules.policy != STATIC and n.arrived < n.known:
        arrival = w.requests[n.arrived].arrival
        if not rules.ahead:
            k = reach(now, first, slope, k, arrival)
        elif k > 1:  # the batch after the one in which it arrives is already chosen
            k = 1 if arrival <= now else min(k, reach(now, first, slope, k, arrival) + 1)
    k = reach(now, first, slope, k, rules.until)
    return room_for(rules, w, k) if rules.on_demand else k


def fills(rules: Rules, r: Request, full: int) -> bool:
    """Return whether a request's window is full after iteration `full`; it may have ended or been paused since."""
    kv = r.offset + full
    return r.finish >= 0 and (kv % rules.chunk == 0 if rules.chunk > 0 else kv == rules.window)


def advance(rules: Rules, w: Work, now: float, k: int) -> None:
    """Advance by k iterations, to the time `now`: tokens come, requests end."""
    n = w.n
    n.it += k
    n.kv += k * n.decoding
    n.windowed += k * n.filling
    requests = len(w.requests)
    while len(w.filling) > 0 and w.filling[0] < n.it * requests:
        full, i = divmod(heappop(w.filling), requests)
        if fills(rules, w.requests[i], full):
            if rules.chunk > 0:
                n.windowed -= rules.chunk  # the next token begins a chunk
                heappush(w.filling, (full + rules.chunk) * requests + i)
            else:
                n.filling -= 1
                n.windowed -= 1  # it was counted for one step too many
    if len(w.prefilling) > 0:
        prefill(rules, w, now)
    while len(w.finishing) > 0 and w.finishing[0] < n.it * requests:
        finish, i = divmod(heappop(w.finishing), requests)
        r = w.requests[i]
        if r.finish == finish:
            if rules.record:
                log_stay(w, i, finish)
            leave(rules, n, r, w.free, w.cross)
            r.end = now
            if n.known < requests:  # a closed loop: the user's next one arrives after the delay
                w.requests[n.known].arrival = now + rules.delay
                n.known += 1


def prefill(rules: Rules, w: Work, now: float) -> None:
    """Advance prompts by their chunks and start decoding those that are complete."""
    n = w.n
    requests = len(w.requests)
    unfinished = 0
    for i in w.prefilling:
        r = w.requests[i]
        r.left -= r.chunk
        if r.left > 0:
            w.prefilling[unfinished] = i
            unfinished += 1
            continue
        begin(rules, n, r, now)
        heappush(w.finishing, r.finish * requests + i)
        kv = r.offset + n.it
        if is_filling(rules, kv):
            left = -kv % rules.chunk if rules.chunk > 0 else rules.window - kv
            heappush(w.filling, (n.it + left) * requests + i)
        if rules.on_demand:
            w.cross[(1 - r.offset) % rules.block] += 1
    while len(w.prefilling) > unfinished:
        w.prefilling.pop()


def begin(rules: Rules, n: RunTotals, r: Request, now: float) -> None:
    """Finish the prefill of a request: its 1st token exists, and it decodes from the next iteration (or ends now)."""
    it = n.it - 1
    context = r.isl + r.produced
    r.began = it
    r.offset = context - it
    r.finish = it + r.osl - r.produced - 1
    if math.isnan(r.first):
        r.first = now
    n.decoding += 1
    n.kv += context + 1
    n.windowed += in_window(rules, context + 1)
    if is_filling(rules, context + 1):
        n.filling += 1


def idle(rules: Rules, w: Work, now: float) -> float:
    """Return the time at which the next request can be admitted when nothing runs. Ticks keep ticking."""
    goal = min(w.requests[w.n.arrived].arrival, rules.until)
    if not rules.ticks:
        return goal
    k = 1 if rules.record else max(math.ceil(goal - now), 1)
    if rules.record:
        log_row(rules, w, now, 1.0, Batch(0, 0, 0.0, 0.0))
    w.n.it += k
    return now + k


def log_row(rules: Rules, w: Work, now: float, seconds: float, batch: Batch) -> None:
    """Record this iteration."""
    n = w.n
    w.rows.append(now)
    w.rows.append(seconds)
    tokens = n.decoding + batch.tokens
    for count in (n.decoding, batch.prompts, tokens, n.waiting, n.refused, n.used + rules.shared, n.kv):
        w.rows.append(float(count))


def settle(rules: Rules, w: Work) -> None:
    """Count the tokens of requests that are still running when the run ends inside an iteration."""
    it = w.n.it
    for i in w.order:
        r = w.requests[i]
        if r.joined >= 0:
            if rules.record:
                log_stay(w, i, it)
            if r.began >= 0:
                r.produced += it - r.began


def iterate(rules: Rules, cost: Any, w: Work) -> float:
    """Iterate until all requests have ended, or until `rules.until`; return the time at which the run ended."""
    n = w.n
    now = seen = 0.0
    after_end = 0.0 if rules.ticks else cost[16]
    while now < rules.until:
        arrive(w.requests, n, seen if rules.ahead and n.active > 0 else now)
        if rules.on_demand:
            make_room(rules, w)
        batch = schedule(rules, w, now)
        if n.active == 0:
            if n.arrived == n.known:
                break
            now = idle(rules, w, now)
            continue
        first = seconds_of(rules, cost, n, batch)
        slope = 0.0 if rules.ticks else cost[8] * n.decoding + cost[9] * n.filling
        if rules.record:
            log_row(rules, w, now, first, batch)
        k = 1 if batch.prompts > 0 else stretch(rules, w, now, first, slope)
        n.worked += (n.decoding + batch.prompts) * k
        seen = later(now, first, slope, k - 1)
        now = later(now, first, slope, k)
        if now >= rules.until:  # only the last iteration of the stretch is cut short
            n.it += k - 1
            break
        running = n.active
        advance(rules, w, now, k)
        now += after_end * (running - n.active)
    settle(rules, w)
    return now


def run(rules: Rules, cost: Any, requests: list[Request], counters: list[RunTotals]) -> Any:
    """Run one load of `IterationCost.array()` or prefill and decode ticks; results are written into `requests`.

    Returns:
        End of the run, rows, stays.
    """
    finishing, filling, order, prefilling, stays = [0], [0], [0], [0], [0]
    rows = [0.0]
    for numbers in (finishing, filling, order, prefilling, stays):
        numbers.pop()  # numba infers the type of an emptied list
    rows.pop()
    free = list(range(rules.slots))
    w = Work(requests, counters[0], [0] * rules.block, finishing, filling, free, order, prefilling, rows, stays)
    end = iterate(rules, cost, w)
    return end, np.array(rows), np.array(stays)
