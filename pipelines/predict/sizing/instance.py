"""One instance of a model under a load: how much it serves within limits, and what binds.

Every load is simulated iteration by iteration with the same lengths and the same arrival gaps, scaled. Thanks to these
common random numbers a higher load never looks better by luck.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import UserError
from pipelines.domain.summary import RequestColumns, ordered
from pipelines.domain.summary import percentile as share_below
from pipelines.domain.units import show_bytes
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.performance.placement import Placed, place
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun, request_columns
from pipelines.predict.simulator.run import simulate
from pipelines.predict.sizing.question import Question

WARM_UP = 0.1
"""Share of requests at the start that are not counted, because the engine is idle before them."""
GROWS = 1.5
"""A queue counts as growing without end when the last quarter waits this many times as long as the 2nd"""
GROWS_S = 0.05
"""and this many seconds longer,"""
GROWS_PROMPTS = 0.3
"""or this share of a prompt's time: few long prompts that meet by chance are no growing queue."""
PRECISION = 0.005
"""Relative precision to which rates are found."""
ALONE = 0.02
"""Lowest load considered, as a share of the most an instance can serve: requests hardly ever overlap."""
LIGHTEST = f"{100 * ALONE:g} % of full load"
FILLS = 12
"""Minimum number of times the requests fill the batch when the most an engine can serve is measured."""
OVERLOAD = 1.3
"""Load of that run, relative to the rate at which a burst was served."""
FULL = 0.95
"""A KV pool or batch with at least this share in use counts as full."""
METRICS = ("ttft", "itl", "e2e")
LATENCIES = (RequestColumns.ttft, RequestColumns.itl, RequestColumns.e2e, RequestColumns.queue)


@dataclass(frozen=True, slots=True, eq=False)
class LoadOutcome:
    """Figures that requests see at one load. Seconds; arrays cover the requests that count.

    Attributes:
        rate: requests per second of the instance.
        ttft: float[n], including network and tokenizer.
        itl: float[n]; NaN with fewer than two tokens.
        e2e: float[n].
        queue: mean seconds spent waiting for a slot.
        batch: mean requests in slots.
        kv_use: mean share of the KV cache in use.
        full: what was full at some point: "KV cache", "max_batch_size" or "".
        growth: seconds that the last quarter of requests waits beyond `GROWS` times the wait of the second quarter.
    """

    rate: float
    ttft: Any
    itl: Any
    e2e: Any
    queue: float
    batch: float
    kv_use: float
    full: str
    growth: float

    @property
    def steady(self) -> bool:
        """Whether the queue does not keep growing."""
        return self.growth < max(GROWS_S, GROWS_PROMPTS * (float(self.ttft.mean()) - self.queue))

    def slower(self, factor: float, overhead_s: float) -> Self:
        """Return the figures for iterations `factor` times as long, at a rate lower by that factor.

        All engine times scale by the factor, and the same requests run together; network and tokenizer stay the same.
        """
        return replace(
            self,
            rate=self.rate / factor,
            ttft=factor * (self.ttft - overhead_s) + overhead_s,
            itl=factor * self.itl,
            e2e=factor * (self.e2e - overhead_s) + overhead_s,
            queue=factor * self.queue,
            growth=factor * self.growth,
        )

    def at(self, percentile: float) -> dict[str, float]:
        """Return TTFT, ITL and E2E at a percentile; NaN where no request has a value."""
        columns = {name: ordered(getattr(self, name)) for name in METRICS}
        return {name: share_below(column, percentile / 100) if column else math.nan for name, column in columns.items()}


@dataclass(frozen=True, slots=True)
class Instance:
    """A model on its GPUs, ready to be simulated."""

    setup: Setup
    costed: Costed
    placed: Placed

    @property
    def engine(self) -> SchedulerLimits:
        """Scheduler of one batch."""
        return self.placed.engine

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds in whole blocks, with the shares of all batches."""
        block = self.engine.tokens_per_block
        return self.placed.memory.kv_tokens // block * block * self.placed.sizes.pools

    @property
    def limits(self) -> ChosenLimits:
        """Limits that it is built with, given or chosen."""
        assert self.placed.limits is not None, "a question knows its requests"
        return self.placed.limits


class AgainstRulesError(UserError):
    """A plan would refuse the configuration."""


def instance(question: Question, setup: Setup, costed: Costed) -> Instance:
    """Place a model on its GPUs.

    Raises:
        AgainstRulesError: a plan would refuse the configuration.
        UserError: the model does not fit.
    """
    placed = place(setup, costed.cost, question.terms, question.lengths)
    try:
        question.judge(setup, placed.limits)
    except UserError as error:
        raise AgainstRulesError.of(error.faults) from None
    if not placed.holds(question.longest):
        raise UserError(_too_large(question, setup, placed))
    return Instance(setup, costed, placed)


def _too_large(question: Question, setup: Setup, placed: Placed) -> str:
    memory, most = placed.memory, placed.sizes.max_kv_tokens
    per_gpu, has = " per GPU" if setup.gpus > 1 else "", show_bytes(memory.total)
    if most is not None and memory.kv_tokens >= most:
        return f"triton.max_tokens_in_paged_kv_cache={most} holds no request of {question.longest:,} tokens"
    if memory.weights > memory.total:
        return f"weights of {show_bytes(memory.weights)}{per_gpu}, the GPU has {has}"
    return (
        f"no room for one request of {question.longest:,} tokens: weights {show_bytes(memory.weights)}, activations "
        f"{show_bytes(memory.activations)}, buffers {show_bytes(memory.buffers)}{per_gpu} of {has}"
    )


def see(question: Question, one: Instance, rate: float) -> LoadOutcome:
    """Simulate an instance at a rate (requests per second)."""
    lanes = one.setup.lanes
    return watch(question, one, np.cumsum(question.gaps) / (rate / lanes), rate)


def watch(question: Question, one: Instance, arrival: Any, rate: float) -> LoadOutcome:
    """Simulate one batch with these arrival times, float64[n] seconds; `rate` of the instance is recorded."""
    run = simulate(one.engine, _load(question, arrival), one.costed.cost)
    r, first = run.requests, int(WARM_UP * len(arrival))
    requests = request_columns(r, overhead=one.costed.overhead_s)
    ttft, itl, e2e, wait = (of(requests)[first:] for of in LATENCIES)
    quarter = len(wait) // 4
    early, late = wait[quarter : 2 * quarter].mean(), wait[-quarter:].mean()
    batch, kv_use, full = _occupied(one.engine, run, float(arrival[first]), float(arrival[-1]))
    return LoadOutcome(
        rate=rate, ttft=ttft, itl=itl, e2e=e2e, queue=float(wait.mean()), batch=batch * one.setup.lanes, kv_use=kv_use,
        full=full, growth=float(late - GROWS * early),
    )  # fmt: skip


def _occupied(engine: SchedulerLimits, run: SimulatedRun, begin: float, stop: float) -> tuple[float, float, str]:
    """Return mean requests in slots, mean share of the KV pool in use, and what was full at some point.

    The means are of the time between, in which requests arrive; afterwards the batch only empties. Of requests that
    all arrive at once, they are of the whole run.
    """
    begin, stop = (begin, stop) if stop > begin else (0.0, run.end)
    r, span = run.requests, stop - begin
    stay, ones = np.clip(r.end, begin, stop) - np.clip(r.admitted, begin, stop), np.ones(len(r.end))
    first, blocks = engine.own_blocks(r.isl, r.isl), engine.own_blocks(r.isl, r.isl + r.osl)
    if engine.admission == "MAX_UTILIZATION":  # takes them one by one
        blocks = (first + blocks) / 2
    else:
        first = blocks
    # at the same moment, requests that end free their room before new ones take it
    order = np.argsort(np.concatenate([r.end, r.admitted]), kind="stable")
    slots = np.cumsum(np.concatenate([-ones, ones])[order]).max()
    held = np.cumsum(np.concatenate([-blocks, blocks])[order]).max() + engine.shared_blocks
    full = ""
    if engine.kv_blocks is not None and (held + first.max() > engine.kv_blocks or r.preemptions.any()):
        full = "KV cache"
    elif slots >= FULL * engine.slots:
        full = "max_batch_size"
    kv = (float((blocks * stay).sum() / span) + engine.shared_blocks) / engine.kv_blocks if engine.kv_blocks else 0.0
    return float(stay.sum() / span), min(1.0, kv), full


def saturation(question: Question, one: Instance) -> float:
    """Return the requests per second that an instance serves when a request is always waiting.

    A burst gives a first guess; then that load and a little more arrives one by one: requests that start together also
    end together, and a batch that fills and empties as a whole is not typical.
    """
    count = max(len(question.gaps), FILLS * one.placed.concurrency.requests // one.setup.lanes)
    guess = count / simulate(one.engine, _load(question, np.zeros(count)), one.costed.cost).end
    arrival = np.cumsum(np.resize(question.gaps, count)) / (OVERLOAD * guess)
    ends = np.sort(simulate(one.engine, _load(question, arrival), one.costed.cost).requests.end)
    low, high = count // 2, 17 * count // 20  # leave out the filling and the emptying of the batch
    return float(one.setup.lanes * (high - low) / (ends[high] - ends[low]))


def _load(question: Question, arrival: Any) -> OfferedLoad:
    return OfferedLoad(np.resize(question.isl, len(arrival)), np.resize(question.osl, len(arrival)), arrival=arrival)


def strain(seen: LoadOutcome, slo: Slo, percentile: float) -> tuple[str, float]:
    """Return the limit closest to being missed, or missed by most, and the value divided by it.

    Returns ("queue", infinity) when the queue grows without end and ("", 0) without limits.
    """
    if not seen.steady:
        return "queue", math.inf
    values = seen.at(percentile)
    over = {name: values[name] / (limit / 1000) for name, limit in slo.limits.items()}
    shares = {name: share for name, share in over.items() if not math.isnan(share)}
    worst = max(shares, key=lambda name: shares[name], default="")
    return worst, shares.get(worst, 0.0)


def missed(seen: LoadOutcome, slo: Slo, percentile: float) -> str:
    """Return the limit missed by most, "queue" when it grows without end, or "" when all limits are met."""
    worst, share = strain(seen, slo, percentile)
    return worst if share > 1 else ""


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Load that an instance serves within the limits.

    Attributes:
        rate: requests per second.
        seen: figures at that rate.
        binding: limit that a slightly higher load would miss: "ttft", "itl", "e2e" or "queue" (throughput itself).
        because: cause: "KV cache", "max_batch_size" or "compute".
        most: requests per second that it can serve at all, whatever the latency.
    """

    rate: float
    seen: LoadOutcome
    binding: str
    because: str
    most: float


class OutOfReachError(Exception):
    """The lowest load considered already misses a limit."""

    def __init__(self, metric: str, seconds: float) -> None:
        super().__init__(metric)
        self.metric, self.seconds = metric, seconds


class InstanceUnderLoad:
    """An instance under one kind of load. Each rate is simulated once, whatever limits it is compared with."""

    def __init__(self, question: Question, one: Instance) -> None:
        self.question, self.one = question, one
        self.most = saturation(question, one)
        self._seen: dict[float, LoadOutcome] = {}

    def at(self, share: float) -> LoadOutcome:
        """Simulate the instance at this share of `most`."""
        if share not in self._seen:
            self._seen[share] = see(self.question, self.one, share * self.most)
        return self._seen[share]

    def capacity(self, slo: Slo, slower: float = 1.0) -> Capacity:
        """Find the highest rate within limits, with every iteration taking `slower` times as long.

        Searches between almost no load, where all limits must be met, and the most, where they are not: false position
        on the logarithm of value over limit, kept away from the ends; plain bisection where the queue grows.

        Raises:
            OutOfReachError: there is no such rate.
        """
        percentile, most = self.question.percentile, self.most / slower
        worst = self._if_slower(1.0, slower)
        binding, over = strain(worst, slo, percentile)
        if self.question.mode == "offline" or over <= 1:
            return Capacity(most, worst, "queue", worst.full or "compute", most)
        low, high, best, under = ALONE, 1.0, None, math.nan
        while high / low > 1 + PRECISION:
            share = _next(low, high, under, over)
            seen = self._if_slower(share, slower)
            limit, strained = strain(seen, slo, percentile)
            if strained > 1:
                high, over, binding, worst = share, strained, limit, seen
            else:
                low, under, best = share, strained, seen
        if best is None:
            best = self._if_slower(low, slower)
            limit, strained = strain(best, slo, percentile)
            if strained > 1:
                raise OutOfReachError(limit, best.at(percentile).get(limit, math.inf))
        return Capacity(best.rate, best, binding, worst.full or "compute", most)

    def _if_slower(self, share: float, factor: float) -> LoadOutcome:
        return self.at(share).slower(factor, self.one.costed.overhead_s)


def _next(low: float, high: float, under: float, over: float) -> float:
    """Choose the next load between two, from how far they are under and over the limit."""
    if high > 2 * low:
        return (low * high) ** 0.5 if high > 8 * low else (low + high) / 2
    if not (under > 0 and math.isfinite(over)):
        return (low + high) / 2
    down, up = math.log(under), math.log(over)
    part = min(0.9, max(0.1, down / (down - up)))
    return low + part * (high - low)


def instances_for(question: Question, one: Instance, guess: int, most: float | None = None) -> int:
    """Return the fewest instances that serve the peak within the limits; same result as `capacity`, but faster.

    The search starts with `guess`; `most` is what the instance can serve at all, requests per second, if known.

    Raises:
        OutOfReachError: no number of instances does.
    """
    most = saturation(question, one) if most is None else most
    peak = question.demand.peak / (1 - question.headroom)
    least = max(1, math.ceil(peak / most * (1 - 1e-9)))
    if question.mode == "offline":
        return least

    def serves(count: int) -> bool:
        return not missed(see(question, one, peak / count), question.slo, question.percentile)

    enough, step = max(guess, least), 1
    too_few = least - 1
    while not serves(enough):
        too_few = enough
        if peak / enough < ALONE * most:
            alone = see(question, one, peak / enough)
            metric, _ = strain(alone, question.slo, question.percentile)
            raise OutOfReachError(metric, alone.at(question.percentile).get(metric, math.inf))
        enough, step = enough + step, 2 * step
    step = 1
    while enough - too_few > 1:
        tried = max(too_few + 1, enough - step)
        if serves(tried):
            enough, step = tried, 2 * step
        else:
            too_few, step = tried, 1
    return enough


def input_share(question: Question, one: Instance, capacity: Capacity) -> float:
    """Return the prompts' share of busy time: what a prompt adds to an iteration, relative to the whole request."""
    cost, batch = one.costed.cost, capacity.seen.batch / one.setup.lanes
    isl = max(1.0, question.mean_isl - question.terms.prefix_tokens)
    kv = batch * (question.mean_isl + question.mean_osl / 2)
    window = batch * min(cost.window or np.inf, question.mean_isl + question.mean_osl / 2)
    beside = {"kv": kv, "kv_window": window if cost.window else 0.0}
    alone = float(cost.seconds(batch, batch, **beside))
    attended = isl * (question.mean_isl - isl / 2)
    both = float(cost.seconds(batch + isl, batch + 1, q_ctx=attended, prefills=1, **beside))
    prompts, answers = both - alone, alone * (question.mean_osl - 1) / max(batch, 1.0)
    return prompts / (prompts + answers) if prompts + answers > 0 else 0.0
