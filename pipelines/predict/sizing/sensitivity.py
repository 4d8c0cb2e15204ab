"""Effect of changing one input of the recommended configuration, and two where together they need fewer GPUs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Self

import numpy as np

from pipelines.document.show import ms
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat, kv_formats_for, proposed
from pipelines.predict.performance.limits import WantedLimits
from pipelines.predict.performance.performance import Setup, runnable
from pipelines.predict.performance.placement import full_load_rate
from pipelines.predict.sizing.answer import WORDS, CostOf, FleetOption
from pipelines.predict.sizing.fleet import Layout, fleet
from pipelines.predict.sizing.instance import LIGHTEST, Instance, OutOfReachError, instance, instances_for
from pipelines.predict.sizing.question import Question

RATE, LIMIT, LENGTH, HEADROOM = 0.2, 0.25, 0.25, 0.1
LESS, MORE = "-", "+"
SIMULATED_PAIRS = 3
"""Number of pairs that are simulated: those with the fewest GPUs in closed form."""
Configured = tuple[Question, Setup]


@dataclass(frozen=True, slots=True)
class Change:
    """One input changed, or two together, all else equal.

    Attributes:
        what: description, e.g. "ISL +25 % (2,500)".
        instances: instances needed then, with spares; None when the load cannot be served.
        gpus: GPUs that run them.
        servers: servers that hold them.
        why: reason why the load cannot be served.
        together: whether two inputs are changed.
    """

    what: str
    instances: int | None = None
    gpus: int | None = None
    servers: int | None = None
    why: str = ""
    together: bool = False

    @property
    def size(self) -> tuple[float, float]:
        """Servers and GPUs, to compare with others; infinite where the load cannot be served."""
        return (np.inf, np.inf) if self.servers is None or self.gpus is None else (self.servers, self.gpus)

    @classmethod
    def to(cls, what: str, instances: int, layout: Layout) -> Self:
        """Build a change that leads to this many instances."""
        return cls(what, instances, instances * layout.gpus_per_instance, layout.servers(instances))


@dataclass(frozen=True, slots=True)
class _Step:
    """A change of the configuration. `kind`: what it changes; two of one kind exclude each other."""

    kind: str
    what: str
    apply: Callable[[Question, Setup], Configured]


def changes(question: Question, option: FleetOption, cost_of: CostOf) -> list[Change]:
    """Change one input at a time and size again, then two together."""
    single = list(_arithmetic(question, option))
    setup, needed, most = option.instance.setup, option.fleet.needed, option.capacity.most
    single += [_sized(what, changed, option.instance, needed, most) for what, changed in _limits(question)]
    single += [_again(what, changed, setup, cost_of, needed) for what, changed in _lengths(question)]
    steps = list(_steps(question, option.instance))
    alone = [_again(step.what, *step.apply(question, setup), cost_of, needed) for step in steps]
    return [*single, *alone, *_pairs(question, option, cost_of, list(zip(steps, alone, strict=True)))]


def _pairs(question: Question, option: FleetOption, cost_of: CostOf, alone: list[tuple[_Step, Change]]) -> list[Change]:
    """Return pairs of steps that need fewer GPUs than the recommendation, and than either step alone."""
    setup, needed, now = option.instance.setup, option.fleet.needed, (option.fleet.servers, option.fleet.gpus)
    estimated: list[tuple[tuple[float, float], int, str, Configured, tuple[float, float]]] = []
    for (first, one), (second, other) in combinations(alone, 2):
        if first.kind == second.kind:
            continue
        bound = min(now, one.size, other.size)
        changed = second.apply(*first.apply(question, setup))
        estimate = _estimate(*changed, cost_of)
        if estimate < bound:
            estimated.append((estimate, len(estimated), f"{first.what}, {second.what}", changed, bound))
    together = []
    for _, _, what, changed, bound in sorted(estimated, key=lambda each: each[:2])[:SIMULATED_PAIRS]:
        change = _again(what, *changed, cost_of, needed)
        if change.size < bound:
            together.append(replace(change, together=True))
    return together


def _estimate(question: Question, setup: Setup, cost_of: CostOf) -> tuple[float, float]:
    """Return servers and GPUs at the rate under full load, which no limit of latency lowers: the least possible."""
    try:
        one = instance(question, setup, cost_of(setup))
    except UserError:
        return np.inf, np.inf
    slots = one.placed.concurrency.requests / setup.lanes
    tokens = full_load_rate(
        one.costed.cost, question.mean_isl, question.mean_osl, slots, float(one.limits.max_num_tokens)
    )
    layout = Layout(setup.gpus, question.gpu.gpus_per_server)
    rate = float(tokens) / question.mean_osl * setup.lanes
    size = fleet(question.demand.peak, rate, layout, headroom=question.headroom, spare=question.spare)
    return size.servers, size.gpus


def _arithmetic(question: Question, option: FleetOption) -> Iterator[Change]:
    """Changes that need no new simulation: the rate of an instance stays the same."""
    layout = Layout(option.gpus, question.gpu.gpus_per_server)
    rate, demand = option.capacity.rate, question.demand

    def sized(what: str, peak: float, headroom: float, spare: int) -> Change:
        return Change.to(what, fleet(peak, rate, layout, headroom=headroom, spare=spare).instances, layout)

    for side, sign in ((LESS, -1), (MORE, 1)):
        peak = demand.peak * (1 + sign * RATE)
        yield sized(f"peak {side}{100 * RATE:g} % ({peak:,.4g}/s)", peak, question.headroom, question.spare)
    headroom = question.headroom + HEADROOM
    if headroom < 1:
        yield sized(f"headroom {100 * headroom:g} %", demand.peak, headroom, question.spare)
    yield sized(f"{question.spare + 1} spare", demand.peak, question.headroom, question.spare + 1)


def _limits(question: Question) -> Iterator[tuple[str, Question]]:
    """Changes that keep the instance's setup."""
    for name, limit in question.slo.limits.items():
        for side, sign in ((LESS, -1), (MORE, 1)):
            value = limit * (1 + sign * LIMIT)
            slo = replace(question.slo, **{f"{name}_ms": value})  # type: ignore[arg-type]
            yield f"{WORDS[name]} limit {side}{100 * LIMIT:g} % ({value:g} ms)", replace(question, slo=slo)


def _lengths(question: Question) -> Iterator[tuple[str, Question]]:
    for name, now in (("isl", question.isl), ("osl", question.osl)):
        for side, sign in ((LESS, -1), (MORE, 1)):
            lengths = np.maximum(1, np.round(now * (1 + sign * LENGTH))).astype(np.int64)
            if (lengths != now).any():  # an answer of one token has no quarter more
                what = f"{name.upper()} {side}{100 * LENGTH:g} % ({lengths.mean():,.0f})"
                yield what, replace(question, **{name: lengths}, stated=None)


def _steps(question: Question, one: Instance) -> Iterator[_Step]:
    """Changes of the configuration: limits of the engine, other formats this GPU runs, half and twice the ranks."""
    limits, setup = question.terms.wanted, one.setup
    if limits.max_batch_size is not None or limits.max_num_tokens is not None:
        yield _limited(
            "limits", "limits chosen for the load", partial(replace, max_batch_size=None, max_num_tokens=None)
        )
    batch, tokens = one.limits.max_batch_size, one.limits.max_num_tokens
    for value in (batch // 2, 2 * batch) if batch > 1 else (2,):
        yield _limited("max_batch_size", f"max_batch_size {value:,}", partial(replace, max_batch_size=value))
    for value in (tokens // 2, 2 * tokens):
        yield _limited("max_num_tokens", f"max_num_tokens {value:,}", partial(replace, max_num_tokens=value))
    for qformat in proposed(runnable(setup)):
        if qformat != setup.qformat and not FORMATS[qformat].weights.at_build:
            kv_format = question.kv_of.get(qformat, setup.kv_format)
            with_kv = "" if kv_format == setup.kv_format else f", KV cache {_kv_word(kv_format)}"
            yield _other("format", f"format {qformat}{with_kv}", qformat=qformat, kv_format=kv_format)
    for kv_format in kv_formats_for(setup.gpu.sm):
        if kv_format != setup.kv_format:
            yield _other("KV cache", f"KV cache {_kv_word(kv_format)}", kv_format=kv_format)
    for tp in (setup.tp // 2, setup.tp * 2):
        if tp >= 1 and question.model.num_attention_heads % tp == 0 and tp <= question.gpu.gpus_per_server:
            apart = question.terms.sizes.attention_dp and tp > 1
            yield _other("TP", f"{'DEP' if apart else 'TP'} {tp}", tp=tp, attention_dp=apart)


def _kv_word(kv_format: KvFormat) -> str:
    return "16 bit" if kv_format is KvFormat.AUTO else str(kv_format)


def _limited(kind: str, what: str, change: Callable[[WantedLimits], WantedLimits]) -> _Step:
    def apply(question: Question, setup: Setup) -> Configured:
        return replace(question, terms=replace(question.terms, wanted=change(question.terms.wanted))), setup

    return _Step(kind, what, apply)


def _other(kind: str, what: str, **values: Any) -> _Step:
    def apply(question: Question, setup: Setup) -> Configured:
        return question, replace(setup, **values)

    return _Step(kind, what, apply)


def _again(what: str, question: Question, setup: Setup, cost_of: CostOf, guess: int) -> Change:
    try:
        question.check()
        one = instance(question, setup, cost_of(setup))
    except UserError as error:
        return Change(what, why=error.faults[0].message)
    return _sized(what, question, one, guess)


def _sized(what: str, question: Question, one: Instance, guess: int, most: float | None = None) -> Change:
    try:
        needed = instances_for(question, one, guess, most)
    except UserError as error:
        return Change(what, why=error.faults[0].message)
    except OutOfReachError as error:
        return Change(what, why=f"{WORDS[error.metric]} is {ms(error.seconds)} ms at less than {LIGHTEST}")
    layout = Layout(one.setup.gpus, question.gpu.gpus_per_server)
    return Change.to(what, needed + question.spare, layout)
