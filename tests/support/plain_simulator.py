"""Reference implementation of the simulator, as simple as possible: every iteration, every request, no running sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import Cost, TickCost


@dataclass
class Plain:
    """A request."""

    index: int
    isl: int
    osl: int
    arrival: float = math.nan
    admitted: float = math.nan
    stamps: list[float] = field(default_factory=list)
    computed: int = 0  # prompt tokens computed in this stay in the KV cache, including the cached prefix
    context: int = 0  # tokens to prefill in this stay
    preemptions: int = 0

    def prefilling(self) -> bool:
        return self.computed < self.context

    def done(self) -> bool:
        return len(self.stamps) == self.osl


@dataclass
class Row:
    """An iteration."""

    start: float
    seconds: float
    decoding: int
    prefilling: int
    tokens: int
    queue: int
    refused: str
    kv_blocks: int
    kv_tokens: int


class PlainSimulator:
    """Simulates iteration by iteration and recomputes everything from the requests."""

    def __init__(self, engine: SchedulerLimits, load: OfferedLoad, cost: Cost) -> None:
        self.engine, self.load, self.cost = engine, load, cost
        lengths = zip(load.isl, load.osl, strict=True)
        self.requests = [Plain(i, int(isl), int(osl)) for i, (isl, osl) in enumerate(lengths)]
        self.known = len(self.requests) if load.arrival is not None else min(load.users, len(self.requests))
        for request in self.requests[: self.known]:
            request.arrival = 0.0 if load.arrival is None else float(load.arrival[request.index])
        self.running: list[Plain] = []
        self.rows: list[Row] = []
        self.refused = ""
        self.now = self.previous = self.visible = 0.0

    # KV blocks that requests hold and need

    def cached(self, r: Plain) -> int:
        cached = self.engine.prefix_tokens if self.load.cached is None else int(self.load.cached[r.index])
        return min(cached, r.isl - 1)

    def own_blocks(self, r: Plain, tokens: int) -> int:
        size = self.engine.tokens_per_block
        return math.ceil(tokens / size) - self.cached(r) // size

    def holds(self, r: Plain) -> int:
        """Return the tokens that need blocks in an iteration; a decoding request writes its latest token."""
        if self.engine.admission == "GUARANTEED_NO_EVICT":
            return r.isl + r.osl
        return r.context if r.prefilling() else r.isl + len(r.stamps)

    def used(self) -> int:
        return sum(self.own_blocks(r, self.holds(r)) for r in self.running)

    def pool(self) -> float:
        if self.engine.kv_blocks is None:
            return math.inf
        return self.engine.kv_blocks - self.engine.prefix_tokens // self.engine.tokens_per_block

    def budget(self) -> float:
        return math.inf if self.engine.max_num_tokens is None else self.engine.max_num_tokens

    # One iteration

    def waiting(self) -> list[Plain]:
        return [r for r in self.requests if r.arrival <= self.visible and not r.done() and r not in self.running]

    def pause(self) -> None:
        while self.used() > self.pool():
            last = max(self.running, key=lambda r: r.index)
            self.running.remove(last)
            last.preemptions += 1

    def chunk(self, r: Plain, left: float) -> int:
        chunks = self.cost.chunks if isinstance(self.cost, TickCost) else 1
        size = min(r.context - r.computed, math.ceil((r.context - self.cached(r)) / chunks))
        return int(min(size, left)) if self.engine.policy == "inflight_chunked" else size

    def refusals(self, r: Plain, plan: dict[int, int], left: float, was_empty: bool) -> list[str]:
        """Everything that keeps a request from a slot, what lasts longest first."""
        policy, found = self.engine.policy, []
        if policy == "static" and not was_empty:
            found.append("batch")
        if len(self.running) == self.engine.slots:
            found.append("slots")
        tokens = r.context if self.engine.admission == "MAX_UTILIZATION" else r.isl + r.osl
        if self.used() + self.own_blocks(r, tokens) > self.pool():
            found.append("kv_blocks")
        if policy == "one_prefill" and any(plan.values()):
            found.append("one_prefill")
        too_long = left <= 0 if policy == "inflight_chunked" else self.running and self.chunk(r, left) > left
        if too_long or len(self.running) == self.budget():
            found.append("max_num_tokens")
        return found

    def plan(self) -> dict[int, int]:
        """Return the prompt tokens of this iteration by request."""
        left = self.budget() - sum(not r.prefilling() for r in self.running)
        plan: dict[int, int] = {}
        for r in sorted(self.running, key=lambda r: r.index):
            if r.prefilling():
                plan[r.index] = self.chunk(r, left)
                left -= plan[r.index]
        was_empty, self.refused = not self.running, ""
        for r in self.waiting():
            r.context, r.computed = r.isl + len(r.stamps), self.cached(r)
            if refusals := self.refusals(r, plan, left, was_empty):
                self.refused = refusals[0]
                break
            if math.isnan(r.admitted):
                r.admitted = self.now
            self.running.append(r)
            plan[r.index] = self.chunk(r, left)
            left -= plan[r.index]
        return {index: tokens for index, tokens in plan.items() if tokens}

    def seconds(self, decoding: list[Plain], plan: dict[int, int]) -> float:
        requests = self.requests
        if isinstance(self.cost, TickCost):
            prefill = sum(self.cost.prefill * tokens / requests[i].isl for i, tokens in plan.items())
            return max(prefill, self.cost.decode if decoding else 0, 1)
        chunk, reads = self.cost.chunk, [r.isl + len(r.stamps) for r in decoding]
        attended = sum(
            sum(range(requests[i].computed + 1, requests[i].computed + tokens + 1)) for i, tokens in plan.items()
        )
        return float(
            self.cost.seconds(
                len(decoding) + sum(plan.values()),
                len(decoding) + len(plan),
                q_ctx=attended,
                kv=sum(reads),
                kv_window=sum((each - 1) % chunk + 1 if chunk else min(each, self.cost.window) for each in reads),
                prefills=len(plan),
            )
        )

    def step(self) -> bool:
        """Run one iteration (or wait for an arrival); return False at the end."""
        self.visible = self.previous if self.engine.ahead and self.running else self.now
        self.pause()
        plan = self.plan()
        decoding = [r for r in self.running if not r.prefilling()]
        if not self.running:
            return self.wait()
        seconds = self.seconds(decoding, plan)
        kv = sum(r.isl + len(r.stamps) for r in decoding)
        shared = self.engine.prefix_tokens // self.engine.tokens_per_block
        tokens = len(decoding) + sum(plan.values())
        queue = len(self.waiting())
        used = self.used() + shared
        self.rows.append(Row(self.now, seconds, len(decoding), len(plan), tokens, queue, self.refused, used, kv))
        self.previous = self.now
        self.now += seconds
        self.yield_tokens(decoding, plan)
        return True

    def yield_tokens(self, decoding: list[Plain], plan: dict[int, int]) -> None:
        for i, tokens in plan.items():
            self.requests[i].computed += tokens
        fresh = [self.requests[i] for i in plan if not self.requests[i].prefilling()]
        for r in decoding + fresh:
            r.stamps.append(self.now)
        ended = [r for r in self.running if r.done()]
        for r in ended:
            self.running.remove(r)
            if self.known < len(self.requests):
                self.requests[self.known].arrival = self.now + self.load.client_delay
                self.known += 1
        if not isinstance(self.cost, TickCost):
            self.now += self.cost.end * len(ended)

    def wait(self) -> bool:
        ahead = [r.arrival for r in self.requests if r.arrival > self.now]
        if not ahead:
            return False
        if isinstance(self.cost, TickCost):
            shared = self.engine.prefix_tokens // self.engine.tokens_per_block
            self.rows.append(Row(self.now, 1, 0, 0, 0, 0, "", shared, 0))
            self.now += 1
        else:
            self.now = min(ahead)
        return True

    def run(self) -> PlainSimulator:
        while self.step():
            pass
        return self
