"""Effect of changing one input of the recommended configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.predict.performance.memory import SMALL_BATCH
from pipelines.predict.performance.performance import Setup, runnable
from pipelines.predict.sizing.answer import WORDS, CostOf, FleetOption
from pipelines.predict.sizing.fleet import Layout, fleet
from pipelines.predict.sizing.instance import Instance, OutOfReachError, instance, instances_for
from pipelines.predict.sizing.question import Question

RATE, LIMIT, LENGTH, HEADROOM = 0.2, 0.25, 0.25, 0.1
LESS, MORE = "-", "+"


@dataclass(frozen=True, slots=True)
class Change:
    """One input changed, all else equal.

    Attributes:
        what: description, e.g. "ISL +25 % (2,500)".
        instances: instances needed then, with spares; None when the load cannot be served.
        gpus: GPUs that run them.
        servers: servers that hold them.
        why: reason why the load cannot be served.
    """

    what: str
    instances: int | None = None
    gpus: int | None = None
    servers: int | None = None
    why: str = ""

    @classmethod
    def to(cls, what: str, instances: int, layout: Layout) -> Change:
        """Build a change that leads to this many instances."""
        return cls(what, instances, instances * layout.gpus_per_instance, layout.servers(instances))


def changes(question: Question, option: FleetOption, cost_of: CostOf) -> list[Change]:
    """Change one input at a time and size again."""
    found = list(_arithmetic(question, option))
    setup, needed, most = option.instance.setup, option.fleet.needed, option.capacity.most
    found += [_sized(what, changed, option.instance, needed, most) for what, changed in _limits(question)]
    found += [_again(what, changed, setup, cost_of, needed) for what, changed in _questions(question)]
    found += [_again(what, question, other, cost_of, needed) for what, other in _setups(question, setup)]
    return found


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
    for name, word in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E")):
        limit = getattr(question.slo, name)
        for side, sign in ((LESS, -1), (MORE, 1)) if limit is not None else ():
            value = limit * (1 + sign * LIMIT)
            slo = replace(question.slo, **{name: value})
            yield f"{word} limit {side}{100 * LIMIT:g} % ({value:g} ms)", replace(question, slo=slo)


def _questions(question: Question) -> Iterator[tuple[str, Question]]:
    if question.limits.max_batch_size > SMALL_BATCH:  # leaves more memory for the KV cache
        limits = replace(question.limits, max_batch_size=SMALL_BATCH)
        yield f"max_batch_size {SMALL_BATCH}", replace(question, limits=limits)
    for name in ("isl", "osl"):
        for side, sign in ((LESS, -1), (MORE, 1)):
            lengths = np.maximum(1, np.round(getattr(question, name) * (1 + sign * LENGTH))).astype(np.int64)
            what = f"{name.upper()} {side}{100 * LENGTH:g} % ({lengths.mean():,.0f})"
            yield what, replace(question, **{name: lengths})


def _setups(question: Question, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Changes of the setup: other formats this GPU runs, and half and twice the ranks."""
    for qformat in runnable(setup):
        if qformat != setup.qformat and not FORMATS[qformat].weights.at_build:
            yield f"format {qformat}", replace(setup, qformat=qformat)
    for tp in (setup.tp // 2, setup.tp * 2):
        if tp >= 1 and question.model.num_attention_heads % tp == 0 and tp <= question.gpu.gpus_per_server:
            yield f"TP {tp}", replace(setup, tp=tp)


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
        return Change(what, why=f"{WORDS[error.metric]} is {1000 * error.seconds:,.0f} ms at almost no load")
    layout = Layout(one.setup.tp * one.setup.pp, question.gpu.gpus_per_server)
    return Change.to(what, needed + question.spare, layout)
