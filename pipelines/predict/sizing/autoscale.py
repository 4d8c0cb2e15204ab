"""Replay a day's load on an autoscaled fleet, with a fixed fleet for comparison.

A day of requests has billions of tokens, so it is not simulated token by token. Only one instance is, at a ladder of
loads (`LoadCurve`); the day then advances in steps. In each step, arrivals are drawn (Poisson) and shared evenly among
the ready instances. The excess waits in one queue; each request of the step gets the latencies of the
ladder at the load served, plus the wait in the queue. At the end of the step the signal is checked, which may start an
instance (ready after the cold start) or stop one immediately.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.domain.benchmark import Slo
from pipelines.domain.summary import ordered, percentile
from pipelines.domain.units import HOUR
from pipelines.predict.config import AutoscalingSettings, Signal
from pipelines.predict.sizing.answer import FleetOption
from pipelines.predict.sizing.instance import see
from pipelines.predict.sizing.question import Question

BUSINESS = (15, 10, 8, 7, 8, 12, 20, 35, 60, 85, 95, 100, 90, 92, 100, 98, 90, 75, 60, 50, 42, 35, 28, 20)
"""A business day, hour by hour from midnight, in percent of the busiest hour. Assumed, not measured."""


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Simulated behaviour of one instance at a ladder of loads.

    Attributes:
        loads: float[m], requests per second, ascending.
        ttft: float[m, n], seconds, of n requests at each load, including network and tokenizer.
        itl: float[m, n]; NaN where a request has one token.
        e2e: float[m, n].
        queue: float[m], mean seconds spent waiting for a slot.
        kv_use: float[m], mean share of the KV cache in use.
        kv_limit: `kv_use` at the rate within the limits.
        most: requests per second that one instance can serve at all.
    """

    loads: Any
    ttft: Any
    itl: Any
    e2e: Any
    queue: Any
    kv_use: Any
    kv_limit: float
    most: float


RUNGS = (0.02, 0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0)
"""Loads, as shares of the most that an instance can serve."""


def curve(question: Question, option: FleetOption) -> LoadCurve:
    """Simulate the instance of an option at every rung."""
    most = option.capacity.most
    seen = [see(question, option.instance, share * most) for share in RUNGS]
    return LoadCurve(
        loads=np.array([one.rate for one in seen]),
        ttft=np.stack([one.ttft for one in seen]),
        itl=np.stack([one.itl for one in seen]),
        e2e=np.stack([one.e2e for one in seen]),
        queue=np.array([one.queue for one in seen]),
        kv_use=np.array([one.kv_use for one in seen]),
        kv_limit=option.capacity.seen.kv_use,
        most=most,
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of replaying a day. Arrays have one value per step.

    Attributes:
        hours: float[k], time of day.
        rate: float[k], requests per second that arrived.
        ready: int[k], instances that take requests.
        starting: int[k], instances that are starting.
        signal: float[k], divided by its limit.
        requests: requests of the day.
        over: share of requests over a limit.
        instance_hours: hours paid for, from the decision to start an instance until it stops.
    """

    hours: Any
    rate: Any
    ready: Any
    starting: Any
    signal: Any
    requests: int
    over: float
    instance_hours: float
    starts: int


def day_rates(shape: Sequence[float], busiest: float, step_s: float) -> Any:
    """Return float[steps], requests per second over a day, interpolated linearly between mid-hours around the clock.

    Args:
        shape: one number per hour; only the ratios matter.
        busiest: requests per second of the busiest hour.
        step_s: length of a step.
    """
    middles = (np.arange(-1, len(shape) + 1) + 0.5) * HOUR
    around = [shape[-1], *shape, shape[0]]
    times = np.arange(step_s / 2, len(shape) * HOUR, step_s)
    return np.interp(times, middles, around) * busiest / max(shape)


def counted_rates(times: Any, step_s: float) -> Any:
    """Return float[steps], requests per second of a trace whose arrival times, float[n], ascend from 0 s."""
    steps = int(times[-1] // step_s) + 1
    return np.bincount((times // step_s).astype(int), minlength=steps) / step_s


def replay(
    rates: Any, curve: LoadCurve, policy: AutoscalingSettings, slo: Slo, *, least: int, most: int, seed: int | None
) -> Replay:
    """Replay a day, starting with as many instances as its first load needs.

    Args:
        rates: float[steps], requests per second.
        curve: behaviour of one instance.
        policy: when instances start and stop.
        slo: a request counts as over when it misses any limit.
        least: instances that always run; as many as `most` are a fixed fleet.
        most: upper bound on the number of instances.
        seed: of the arrivals that are drawn from the rates; None takes the rates as they are, as of a trace.
    """
    mean = np.asarray(rates) * policy.step_s
    arrivals = mean if seed is None else np.random.default_rng(seed).poisson(mean)
    begin = min(most, max(least, math.ceil(rates[0] / (policy.up_at * curve.most))))
    scaler, signal = _Scaler(policy, least, most, begin), _signal(curve, policy.signal, slo)
    rows, over, total, queue = [], 0.0, 0.0, 0.0
    for count in arrivals:
        scaler.tick()
        ready = scaler.ready
        possible = curve.most * policy.step_s * ready
        waiting, served = queue, min(queue + count, possible)
        queue = queue + count - served
        # a queue that exists only at the end of the step was waited in for half the step on average
        wait = (waiting + queue) / 2 / (curve.most * ready)
        load = served / policy.step_s / ready
        over += count * _missed(curve, load, wait, slo)
        total += count
        value = signal(load, wait)
        rows.append((count / policy.step_s, ready, scaler.starting, value))
        scaler.observe(value)
    rate, held, starting, signals = (np.array(column) for column in zip(*rows, strict=True))
    return Replay(
        hours=(np.arange(len(rows)) + 0.5) * policy.step_s / HOUR,
        rate=rate,
        ready=held,
        starting=starting,
        signal=signals,
        requests=round(total),
        over=over / total if total else 0.0,
        instance_hours=scaler.paid_steps * policy.step_s / HOUR,
        starts=scaler.starts,
    )


class _Scaler:
    """Track the number of instances: ready ones, and the steps that starting ones still need."""

    def __init__(self, policy: AutoscalingSettings, least: int, most: int, begin: int) -> None:
        self._policy, self._least, self._most = policy, least, most
        self.ready = begin
        self._coming: list[int] = []
        self._above = self._below = 0.0
        self.starts, self.paid_steps = 0, 0

    @property
    def starting(self) -> int:
        return len(self._coming)

    def tick(self) -> None:
        self._coming = [left - 1 for left in self._coming]
        self.ready += self._coming.count(0)
        self._coming = [left for left in self._coming if left > 0]
        self.paid_steps += self.ready + len(self._coming)

    def observe(self, value: float) -> None:
        """End a step: start or stop one instance if the signal has called for it long enough."""
        policy = self._policy
        self._above = self._above + policy.step_s if value > policy.up_at else 0.0
        self._below = self._below + policy.step_s if value < policy.down_at else 0.0
        if self._above > policy.up_after_s and self.ready + self.starting < self._most:
            self._coming.append(1 + int(-(-(policy.cold_start_s or 0.0) // policy.step_s)))
            self.starts += 1
            self._above = 0.0
        elif self._below > policy.down_after_s and not self._coming and self.ready > self._least:
            self.ready -= 1
            self._below = 0.0


def _at(curve: LoadCurve, load: float) -> tuple[int, float]:
    """Return the rung below a load, and the fraction of the way to the next one (0 to 1)."""
    place = float(np.interp(load, curve.loads, np.arange(len(curve.loads))))
    low = min(int(place), max(0, len(curve.loads) - 2))
    return low, place - low


def _missed(curve: LoadCurve, load: float, wait: float, slo: Slo) -> float:
    """Return the share of requests that miss a limit, interpolated between two rungs of the ladder."""
    low, part = _at(curve, load)
    high = min(low + 1, len(curve.loads) - 1)
    return (1 - part) * _rung(curve, low, wait, slo) + part * _rung(curve, high, wait, slo)


def _rung(curve: LoadCurve, rung: int, wait: float, slo: Slo) -> float:
    late = False
    for name, limit in slo.limits.items():
        extra = 0.0 if name == "itl" else wait
        late = late | (getattr(curve, name)[rung] + extra > limit / 1000)  # NaN counts as meeting every limit
    return float(late.mean()) if late is not False else 0.0  # type: ignore[attr-defined]


def _signal(curve: LoadCurve, signal: Signal, slo: Slo) -> Callable[[float, float], float]:
    """Return a function of load and wait that yields the signal divided by its limit."""
    if signal == "kv_use":
        return lambda load, _: float(np.interp(load, curve.loads, curve.kv_use)) / curve.kv_limit
    if slo.ttft_ms is None:
        raise ValueError(f"signal '{signal}' needs a TTFT limit")
    limit = slo.ttft_ms / 1000
    seconds = [percentile(ordered(rung), 0.95) for rung in curve.ttft] if signal == "ttft" else curve.queue
    return lambda load, wait: (float(np.interp(load, curve.loads, seconds)) + wait) / limit
