"""Simulated servers whose largest load within the limits is known, for tests of the search."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import gamma

from pipelines.domain.benchmark import LargestLoad
from pipelines.loadgen.search import LoadSearch
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import IterationCost, simulate
from tests.support.load_settings import benchmark

ATTAINMENT = 0.95
KINDS = ("open", "bursty", "closed", "engine_open", "engine_closed")


@dataclass(frozen=True)
class Outcome:
    """good: bool[n] of the requests due in the window; requests per second; mean seconds of one."""

    good: Any
    rate: float
    e2e_s: float


@dataclass(frozen=True)
class Queue:
    """First come, first served by `slots` servers; services are exponential with mean `unit` seconds.

    A request that waits for more than `limit` services is bad. Exact: Erlang's C for Poisson arrivals, the GI/M/1 queue
    for bursty ones, and in a closed loop the Erlang distribution of the wait behind all other users.
    """

    slots: int
    limit: float
    closed: bool = False
    cv: float = 1.0
    unit: float = 1.0

    def late(self, rate: float) -> float:
        """Return the share that waits too long, at a rate per mean service."""
        if self.cv != 1:
            shape = 1 / self.cv**2
            busy = brentq(lambda x: (1 + (1 - x) / (rate * shape)) ** -shape - x, 1e-12, 1 - (1 - rate) * 1e-3)
            return float(busy * math.exp(-(1 - busy) * self.limit))
        blocked = 1.0
        for slots in range(1, self.slots + 1):
            blocked = rate * blocked / (slots + rate * blocked)
        waits = blocked / (1 - rate / self.slots * (1 - blocked))
        return waits * math.exp(-(self.slots - rate) * self.limit)

    def capacity(self) -> float:
        """Return the largest load."""
        if not self.closed:
            most = 0.999 * self.slots
            return float(brentq(lambda rate: 1 - self.late(rate) - ATTAINMENT, 1e-3 * self.slots, most)) / self.unit
        users = self.slots
        while gamma.cdf(self.limit, users + 1 - self.slots, scale=1 / self.slots) >= ATTAINMENT:
            users += 1
        return float(users)

    def run(self, load: float, seconds: float, warmup_s: float, rng: np.random.Generator) -> Outcome:
        """Serve a load from an idle start."""
        warm, end = warmup_s / self.unit, (warmup_s + seconds) / self.unit
        free, waits, due = [0.0] * self.slots, [], []
        for at, users in self._arrivals(load, end, rng):
            start = max(at, heapq.heappop(free))
            done = start + rng.standard_exponential()
            heapq.heappush(free, done)
            if users:
                heapq.heappush(users, done)
            waits.append(start - at)
            due.append(at)
        wait, inside = np.array(waits), np.array(due) >= warm
        return Outcome(wait[inside] <= self.limit, inside.sum() / seconds, (wait.mean() + 1) * self.unit)

    def _arrivals(self, load: float, end: float, rng: np.random.Generator) -> Iterator[tuple[float, list[float]]]:
        """Yield arrivals, and in a closed loop the times when the users come next."""
        if self.closed:
            users = [0.0] * round(load)
            # The one who comes is not in the list while being served; a user more keeps it from being empty.
            users.append(math.inf)
            while users[0] < end:
                yield heapq.heappop(users), users
            return
        shape = 1 / self.cv**2
        gaps = rng.gamma(shape, self.cv**2 / (load * self.unit), int(load * self.unit * end * 1.3) + 100)
        yield from ((at, []) for at in np.cumsum(gaps).tolist() if at < end)


@dataclass(frozen=True)
class Engine:
    """The project's simulator of in-flight batching; limits of TTFT and ITL; capacity by much longer runs."""

    slots: int
    cost: IterationCost
    isl: tuple[int, int]
    osl: tuple[int, int]
    ttft_s: float
    itl_s: float
    closed: bool
    unit: float = 1.0
    most: float = 0.0

    def _requests(self, load: float, count: int, rng: np.random.Generator) -> tuple[Any, Any, float]:
        isl, osl = rng.integers(*self.isl, count), rng.integers(*self.osl, count)
        if self.closed:
            offered = OfferedLoad(isl, osl, users=round(load), client_delay=1e-3)
        else:
            offered = OfferedLoad(isl, osl, arrival=np.cumsum(rng.exponential(1 / load, count)))
        r = simulate(SchedulerLimits(slots=self.slots), offered, self.cost).requests
        order = np.argsort(r.arrival, kind="stable")
        itl = (r.end - r.first_token) / (r.osl - 1)
        good = (r.first_token - r.arrival <= self.ttft_s) & (itl <= self.itl_s)
        return good[order], r.arrival[order], float(np.mean(r.end - r.arrival))

    def run(self, load: float, seconds: float, warmup_s: float, rng: np.random.Generator) -> Outcome:
        """Serve a load from an idle start."""
        end = (seconds + warmup_s) / self.unit
        inner = load if self.closed else load * self.unit
        count = int(end * (self.most if self.closed else inner) * 1.2) + 3 * round(inner) + 50
        good, due, e2e = self._requests(inner, count, rng)
        inside = (due >= warmup_s / self.unit) & (due < end)
        return Outcome(good[inside], inside.sum() / seconds, e2e * self.unit)

    def throughput(self, rng: np.random.Generator) -> float:
        """Return the requests per second of a saturated engine, before `unit`."""
        _, due, _ = replace(self, closed=True)._requests(4 * self.slots, 5000, rng)
        return float(4000 / (due[-1] - due[1000]))

    def capacity(self, rng: np.random.Generator) -> float:
        """Return the largest load before `unit`: the shares of long runs around it, and where a parabola crosses."""

        def share(load: float, count: int) -> float:
            return float(np.mean(self._requests(load, count, rng)[0][count // 20 :]))

        low = 1.0
        while share(2 * low, 20_000) >= ATTAINMENT and low < 1e4:
            low *= 2
        high = 2 * low
        for turn in range(8):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if share(middle, 20_000 if turn < 3 else 75_000) >= ATTAINMENT else (low, middle)
        if self.closed:
            users = max(int(low), 1)
            while share(users, 150_000) >= ATTAINMENT:
                users += 1
            while users > 1 and share(users - 1, 150_000) < ATTAINMENT:
                users -= 1
            return float(users - 1)
        around = np.linspace(-0.06, 0.06, 7)
        late = [1 - share(low * math.exp(x), 200_000) for x in around]
        line = np.polyfit(around, np.log(np.clip(late, 1e-6, 1)) - math.log(1 - ATTAINMENT), 2)
        crossings = [root.real for root in np.roots(line) if abs(root.imag) < 1e-9 and abs(root) < 0.12]
        return low * math.exp(min(crossings, key=abs)) if crossings else math.nan


Server = Queue | Engine


def servers(count: int, kinds: tuple[str, ...] = KINDS, seed: int = 7) -> Iterator[tuple[Server, float]]:
    """Yield servers and their capacity, requests per second or users, equally often of each kind.

    Those left out keep no queue that a probe could judge: they are busy for more than 95 % of the time when the limits
    are just met, or serve fewer than 4 users. Each serves 5 to 100 requests per second.
    """
    number, made = 0, 0
    while made < count:
        kind, number = kinds[made % len(kinds)], number + 1
        rng = np.random.default_rng([seed, number])
        server = _draw(rng, kind)
        if server is None:
            continue
        per_second = math.exp(rng.uniform(math.log(5), math.log(100)))
        if isinstance(server, Engine):
            capacity, most = server.capacity(rng), server.throughput(rng)
            server = replace(server, most=most)
            busy = 0 if server.closed else capacity / most
        else:
            capacity, most, busy = server.capacity(), float(server.slots), 0
        if not capacity < 600 or busy > 0.95 or (server.closed and capacity < 4):
            continue
        unit = (most if server.closed else capacity) / per_second
        made += 1
        yield replace(server, unit=unit), capacity if server.closed else per_second


def _draw(rng: np.random.Generator, kind: str) -> Server | None:
    if kind == "open":
        slots, busy = int(rng.choice([1, 2, 4, 8, 16, 32, 64])), float(rng.uniform(0.3, 0.93))

        def excess(limit: float) -> float:
            return Queue(slots, limit).late(busy * slots) - (1 - ATTAINMENT)

        return Queue(slots, float(brentq(excess, 0, 100))) if excess(0) > 0 else None
    if kind == "bursty":
        return Queue(1, float(rng.uniform(3, 15)), cv=float(rng.uniform(1.2, 2.5)))
    if kind == "closed":
        return Queue(int(rng.choice([4, 8, 16, 32])), float(rng.uniform(1, 6)), closed=True)
    cost = IterationCost(
        token_compute=float(rng.uniform(1e-5, 1e-4)),
        row_compute=1e-6,
        weights=float(rng.uniform(4e-3, 2e-2)),
        head_weights=1e-4,
        kv_token=float(rng.uniform(1e-8, 2e-7)),
        fixed=1e-3,
        sequence=float(rng.uniform(1e-5, 2e-4)),
    )
    isl, osl = (int(math.exp(rng.uniform(*span))) for span in ((3.5, 6.5), (3.4, 5.5)))
    step = cost.weights + cost.fixed
    return Engine(
        slots=int(rng.choice([8, 16, 32, 64])),
        cost=cost,
        isl=(isl // 2, isl * 2),
        osl=(osl // 2, osl * 2),
        ttft_s=3 * step + 2 * isl * cost.token_compute + math.exp(rng.uniform(-3, 0)),
        itl_s=step * float(rng.uniform(1.3, 3)),
        closed=kind == "engine_closed",
    )


@dataclass(frozen=True)
class Searched:
    """The answer of a search, and the seconds of load that it would have taken."""

    answer: LargestLoad
    seconds: float


def search(server: Server, seed: list[int], **changes: Any) -> Searched:
    """Search a server's largest load."""
    rng = np.random.default_rng(seed)
    settings = benchmark(**{"search": "max_load", "slo": {"ttft_ms": 500}} | changes)
    searching, seconds = LoadSearch(settings, closed=server.closed), 0.0
    while (plan := searching.following()) is not None:
        outcome = server.run(plan.load, plan.seconds, plan.warmup_s, rng)
        bad = int((~outcome.good).sum())
        searching.add(outcome.good, {"ttft": bad} if bad else {}, rate=outcome.rate, e2e_s=outcome.e2e_s)
        seconds += plan.seconds + plan.warmup_s
    return Searched(searching.answer(), seconds)
