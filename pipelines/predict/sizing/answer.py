"""The answer: every configuration with its fleet and cost, the recommended one, and the reason for it."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.formats import proposed
from pipelines.predict.performance.performance import Costed, Setup, runnable
from pipelines.predict.sizing.fleet import ROUNDING, Cost, Layout, PeakFleet, cost, fleet
from pipelines.predict.sizing.instance import (
    LIGHTEST,
    AgainstRulesError,
    Capacity,
    Instance,
    InstanceUnderLoad,
    LoadOutcome,
    OutOfReachError,
    input_share,
    instance,
    missed,
    see,
    watch,
)
from pipelines.predict.sizing.question import Question, setup_label, usual_tp

CostOf = Callable[[Setup], Costed]
"""Cost of an iteration of a setup; raises UserError for what a GPU cannot run."""
WITHIN = 1.2816
"""Half-width, in standard deviations, of an interval that holds 80 % of cases."""
LADDER = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9)
"""Loads at which an instance is shown, as shares of its rate within the limits, which is itself included."""
WORDS = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E", "queue": "throughput"}


@dataclass(frozen=True, slots=True, eq=False)
class FleetOption:
    """One configuration and the fleet it needs.

    Attributes:
        instance: the configuration.
        capacity: load that one instance serves.
        low: requests per second of one instance if the model is too optimistic; None if a limit is then missed.
        high: the same if the model is too pessimistic. The truth lies between the two in eight of ten cases.
        fewest: the fleet at `high`.
        largest: the fleet at `low`.
        input_share: share of the engine's time spent on prompts.
        cost: cost of the fleet; None without prices.
    """

    instance: Instance
    capacity: Capacity
    low: float | None
    high: float
    fleet: PeakFleet
    fewest: PeakFleet
    largest: PeakFleet | None
    input_share: float
    cost: Cost | None

    @property
    def label(self) -> str:
        """Short name of the configuration."""
        return setup_label(self.instance.setup)

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.instance.setup.gpus

    @property
    def per_gpu(self) -> float:
        """Requests per second per GPU within the limits."""
        return self.capacity.rate / self.gpus


@dataclass(frozen=True, slots=True)
class RefusedOption:
    """A configuration that does not qualify, and why.

    Attributes:
        label: short name of the configuration.
        kind: "format", "rules", "memory" or "limit".
        metric: the limit that is missed.
        over: the value over that limit.
    """

    label: str
    why: str
    kind: str
    metric: str = ""
    over: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Every configuration that serves the demand, best first, and those that do not."""

    question: Question
    options: tuple[FleetOption, ...]
    refused: tuple[RefusedOption, ...]
    reason: str

    @property
    def chosen(self) -> FleetOption:
        """The recommended option."""
        return self.options[0]


def answer(question: Question, cost_of: CostOf) -> Answer:
    """Try every configuration and recommend one.

    Raises:
        UserError: a request is longer than the context, no configuration fits, or none meets the limits.
    """
    question.check()
    tried = [attempt(question, setup, cost_of) for setup in question.setups()]
    options = [result for result in tried if isinstance(result, FleetOption)]
    refused = [result for result in tried if isinstance(result, RefusedOption)]
    if not options:
        raise _nothing(question, refused, cost_of)
    options.sort(key=rank)
    return Answer(question, tuple(options), tuple(refused), _reason(options))


def rank(option: FleetOption) -> tuple[float, ...]:
    """Rank by fewest servers, then fewest GPUs, then most requests per GPU, then smallest instance."""
    return option.fleet.servers, option.fleet.gpus, -option.per_gpu, option.gpus


def attempt(question: Question, setup: Setup, cost_of: CostOf) -> FleetOption | RefusedOption:
    """Size one configuration, or say why it does not qualify."""
    label = setup_label(setup)
    try:
        costed = cost_of(setup)
    except UserError as error:
        return RefusedOption(label, str(error), "format")
    try:
        one = instance(question, setup, costed)
    except AgainstRulesError as error:
        return RefusedOption(label, str(error), "rules")
    except UserError as error:
        return RefusedOption(label, str(error), "memory")
    loaded = InstanceUnderLoad(question, one)
    try:
        capacity = loaded.capacity(question.slo)
    except OutOfReachError as error:
        over = 1000 * error.seconds / question.slo.limits.get(error.metric, 1.0)
        return RefusedOption(label, _missed(question, error), "limit", error.metric, over)
    low, high = interval(loaded, capacity)
    return option(question, one, capacity, low, high)


def option(question: Question, one: Instance, capacity: Capacity, low: float | None, high: float) -> FleetOption:
    """Size and price the fleet of one configuration."""
    setup, gpu = one.setup, question.gpu
    layout = Layout(setup.gpus, gpu.gpus_per_server)

    def sized(rate: float) -> PeakFleet:
        return fleet(question.demand.peak, rate, layout, headroom=question.headroom, spare=question.spare)

    best, share = sized(capacity.rate), input_share(question, one, capacity)
    price = cost(
        question.prices,
        best,
        tdp_w=gpu.tdp_w,
        requests_per_day=question.demand.requests_per_day,
        isl=question.mean_isl,
        osl=question.mean_osl,
        input_share=share,
    )
    return FleetOption(one, capacity, low, high, best, sized(high), None if low is None else sized(low), share, price)


def interval(loaded: InstanceUnderLoad, capacity: Capacity) -> tuple[float | None, float]:
    """Return requests per second if every prediction is off by its usual error, on the bad side and on the good side.

    All times get longer (shorter) by the spread of throughput; TTFT and ITL also by the excess of their own spread.
    """
    spread = loaded.one.costed.spread
    rates: list[float | None] = []
    for side in (+1, -1):
        off = {name: math.exp(side * WITHIN * spread[name]) for name in ("throughput", "ttft", "itl")}
        slo = loaded.question.slo
        stretched = {
            f"{name}_ms": limit / (off[name] / off["throughput"]) for name, limit in slo.limits.items() if name in off
        }
        slo = replace(slo, **stretched)  # type: ignore[arg-type]
        try:
            rates.append(loaded.capacity(slo, slower=off["throughput"]).rate)
        except OutOfReachError:
            rates.append(None)
    low, high = rates
    return low, max(capacity.rate, high or capacity.rate)


def ladder(question: Question, option: FleetOption) -> tuple[LoadOutcome, ...]:
    """Simulate an instance from almost no load up to its rate."""
    below = [see(question, option.instance, share * option.capacity.rate) for share in LADDER]
    return (*below, option.capacity.seen)


def _reason(options: list[FleetOption]) -> str:
    best, others = options[0], options[1:]
    size = f"{count(best.fleet.servers, 'server')}, {count(best.fleet.gpus, 'GPU')}"
    if not others:
        return f"it is the only configuration tried that meets the limits: {size}"
    second = others[0]
    other = f"{count(second.fleet.servers, 'server')}, {count(second.fleet.gpus, 'GPU')}"
    if second.fleet.servers > best.fleet.servers:
        return f"it needs the fewest servers: {size}; next {second.label}: {other}"
    if second.fleet.gpus > best.fleet.gpus:
        return f"it needs the fewest GPUs among those with as few servers: {size}; next {second.label}: {other}"
    return (
        f"no other needs fewer GPUs ({size}), and each GPU serves the most: {best.per_gpu:.3g} requests/s; "
        f"next {second.label}: {second.per_gpu:.3g}"
    )


def _missed(question: Question, error: OutOfReachError) -> str:
    if error.metric == "queue":
        return "the queue grows at any load"
    limit = getattr(question.slo, f"{error.metric}_ms")
    return over_limit(error.metric, question.percentile, error.seconds, limit, f" at {LIGHTEST}")


def over_limit(metric: str, percentile: float, seconds: float, limit_ms: float, where: str = "") -> str:
    """State a latency beside the limit that it misses; 4.1123 ms over a limit of 4.11 ms is rounded up to 4.12 ms."""
    nearest = round(1000 * seconds, 2)
    milliseconds = nearest if nearest > limit_ms else math.ceil(1e5 * seconds) / 100
    seen = f"{WORDS[metric]} P{percentile:g} is {milliseconds:,.10g} ms{where}"
    return f"{seen}, the limit is {limit_ms:,.10g} ms"


def _nothing(question: Question, refused: list[RefusedOption], cost_of: CostOf) -> UserError:
    """Build the error for a demand that no configuration serves, with the one that comes nearest."""
    by_kind = {kind: [each for each in refused if each.kind == kind] for kind in ("limit", "memory", "format")}
    name, gpu = question.model.name, question.gpu.gpu
    if by_kind["limit"]:
        nearest = min(by_kind["limit"], key=lambda each: each.over)
        return UserError(
            f"No configuration of {name} on {gpu} meets the limits: the closest is {nearest.label}, where "
            f"{nearest.why}.",
            todo=_what_limits(question, nearest.metric),
        )
    listed = "; ".join(f"{label}: {why}" for label, why in refusals(refused))
    if by_kind["memory"]:
        return UserError(f"No configuration tried fits {name} on {gpu}: {listed}.", todo=_what_fits(question, cost_of))
    return UserError(f"No configuration tried runs {name} on {gpu}: {listed}.")


def refusals(refused: Sequence[RefusedOption]) -> list[tuple[str, str]]:
    """Return labels and reasons; configurations with the same reason at each TP are one: "TP 2, 4 int8_sq"."""
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for each in refused:
        split, size, rest = each.label.split(" ", 2)
        why = each.why.rstrip(".").replace(f"tp_size={size} ", "tp_size=* ")
        sizes.setdefault((split, rest, why), []).append(size)
    every = {key: ", ".join(listed) for key, listed in sizes.items()}
    return [(f"{key[0]} {tp} {key[1]}", key[2].replace("=* ", f"={tp} ")) for key, tp in every.items()]


def _what_fits(question: Question, cost_of: CostOf) -> str:
    """Name, as overrides, GPUs per instance and formats with which the model fits, and given limits that it misses."""
    more = replace(question, tp=usual_tp(1, question.model, question.gpu))
    formats, terms = tuple(proposed(runnable(next(question.setups())))), question.terms
    limits = dict.fromkeys(name for name in ("max_batch_size", "max_num_tokens") if getattr(terms.wanted, name))
    given = [f"build.{name}" for name in limits]
    if terms.sizes.max_kv_tokens is not None:
        given.append("triton.max_tokens_in_paged_kv_cache")
    sizes, wanted = replace(terms.sizes, max_kv_tokens=None), replace(terms.wanted, **limits)  # type: ignore[arg-type]
    wider, other = _fitting(more, cost_of), _fitting(replace(question, formats=formats), cost_of)
    ways = [f"with {_tp(wider)}"] * bool(wider) + [f"with {_formats(other)}"] * bool(other)
    if not ways and (both := _fitting(replace(more, formats=formats), cost_of)):
        ways = [f"with {_tp(both)} {_formats(both)}"]
    if given and _fitting(replace(question, terms=replace(terms, sizes=sizes, wanted=wanted)), cost_of):
        ways.append(f"without {' and '.join(given)}")
    return f"It fits {', or '.join(ways)}." if ways else "Choose a GPU with more memory."


def _fitting(question: Question, cost_of: CostOf) -> list[Setup]:
    """Return the configurations that a plan accepts and that fit."""
    fitting = []
    for setup in question.setups():
        with suppress(UserError):
            fitting.append(instance(question, setup, cost_of(setup)).setup)
    return fitting


def _tp(setups: Sequence[Setup]) -> str:
    return f"sizing.tp=[{','.join(str(tp) for tp in sorted({setup.tp for setup in setups}))}]"


def _formats(setups: Sequence[Setup]) -> str:
    return f"sizing.formats=[{','.join(dict.fromkeys(setup.qformat for setup in setups))}]"


def _what_limits(question: Question, metric: str) -> str:
    what = {
        "ttft": f"The prefill of {question.mean_isl:,.0f} input tokens, network and tokenizer set the lower bound",
        "itl": "Reading the weights once per token sets the lower bound",
        "e2e": f"{question.mean_osl:,.0f} output tokens, one after the other, set the lower bound",
    }.get(metric, "The engine sets the lower bound")
    more = [str(tp) for tp in usual_tp(1, question.model, question.gpu) if tp > max(question.tp)]
    wider = f"more GPUs per instance (sizing.tp=[{','.join(more)}]), " if more else ""
    return f"{what}: allow {wider}another format or GPU, or a higher limit."


# Simulate the recommended fleet, and one instance fewer, at the peak.
#
# Requests reach the fleet as one Poisson (or gamma) stream and are distributed round-robin. Each instance then sees
# smoother arrivals than those its rate was found with, so one instance fewer may still be enough; the output says
# when that is so.

SHOWN_INSTANCES = 16
"""Upper bound on simulated instances: with round-robin they all see the same kind of load."""


@dataclass(frozen=True, slots=True)
class PeakTrial:
    """Simulation of a fleet at the peak.

    Attributes:
        meets: whether all limits are met at their percentile.
        missed: limit missed by most ("ttft", "queue", ...), or "".
        values: seconds by metric at the percentile; NaN without a value.
        simulated: number of the fleet's instances that were simulated.
        good: share of the output tokens whose requests meet every limit.
    """

    instances: int
    meets: bool
    missed: str
    values: dict[str, float]
    requests: int
    simulated: int
    good: float


@dataclass(frozen=True, slots=True)
class Check:
    """The fleet without its spares, and with one instance fewer (None when there is only one)."""

    fleet: PeakTrial
    fewer: PeakTrial | None
    why: str


def check(question: Question, option: FleetOption) -> Check:
    """Simulate the recommended fleet."""
    needed = option.fleet.needed
    full = trial(question, option, needed)
    fewer = trial(question, option, needed - 1) if needed > 1 else None
    return Check(full, fewer, _why(question, option, fewer))


def trial(question: Question, option: FleetOption, instances: int) -> PeakTrial:
    """Simulate a fleet of this many instances at the peak."""
    one = option.instance
    each, lanes = len(question.gaps), one.setup.lanes
    dealt = instances * lanes
    turns = min(dealt, SHOWN_INSTANCES)
    stream = np.cumsum(np.random.default_rng(len(question.gaps) + instances).permutation(np.tile(question.gaps, dealt)))
    stream /= question.demand.peak
    seen = [watch(question, one, stream[turn::dealt][:each], question.demand.peak / instances) for turn in range(turns)]
    possible = question.demand.peak / instances <= option.capacity.most * (1 + ROUNDING)
    steady = possible and sum(s.steady for s in seen) > turns / 2
    together = LoadOutcome(
        rate=question.demand.peak / instances,
        ttft=np.concatenate([s.ttft for s in seen]),
        itl=np.concatenate([s.itl for s in seen]),
        e2e=np.concatenate([s.e2e for s in seen]),
        queue=float(np.mean([s.queue for s in seen])),
        batch=float(np.mean([s.batch for s in seen])),
        kv_use=float(np.mean([s.kv_use for s in seen])),
        full=next((s.full for s in seen if s.full), ""),
        growth=0.0 if steady else math.inf,
    )
    wrong = missed(together, question.slo, question.percentile)
    values = together.at(question.percentile)
    within = np.ones(len(together.ttft), dtype=bool)
    for name, limit in question.slo.limits.items():
        within &= ~(getattr(together, name) > limit / 1000)  # NaN counts as meeting every limit
    tokens = np.tile(np.resize(question.osl, each)[each - len(seen[0].ttft) :], turns)
    good = float(tokens[within].sum() / tokens.sum()) if steady else 0.0
    return PeakTrial(instances, not wrong, wrong, values, turns * each, min(instances, -(-turns // lanes)), good)


def _why(question: Question, option: FleetOption, fewer: PeakTrial | None) -> str:
    if fewer is None:
        return "one instance is the minimum"
    if not fewer.meets:
        if fewer.missed == "queue":
            return "with one instance fewer the queue keeps growing"
        seen, limit = fewer.values[fewer.missed], question.slo.limits[fewer.missed]
        return f"with one instance fewer {over_limit(fewer.missed, question.percentile, seen, limit)}"
    bare = question.demand.peak / option.capacity.rate
    reasons = []
    if question.headroom:
        reasons.append(f"headroom of {100 * question.headroom:g} % accounts for {option.fleet.raw - bare:.2f}")
    rounding = option.fleet.needed - option.fleet.raw
    reasons.append(f"rounding up {option.fleet.raw:.2f} accounts for {rounding:.2f}")
    if option.fleet.needed - 1 < bare:
        reasons.append("round-robin arrivals are smoother than those used to find the rate of an instance")
    return f"one instance fewer is enough in this simulation: {'; '.join(reasons)}"
