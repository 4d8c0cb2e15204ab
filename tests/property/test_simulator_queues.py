"""The simulator as a queue: Little's law, and waiting times that queueing theory gives in closed form.

An iteration costs the same whatever is in it, so a request's service is its output tokens times that; output lengths
that are geometric with a large mean are as good as exponential.
"""

from collections.abc import Callable
from math import factorial
from typing import Any

import numpy as np
import pytest

from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import IterationCost, TickCost, simulate

STEPS = 400  # mean output tokens
SERVICE = 1.0  # mean seconds of service
FLAT = IterationCost(0, 0, 0, 0, fixed=SERVICE / STEPS)
REAL = IterationCost(1e-5, 1e-6, 8e-3, 1e-4, kv_token=2e-8, prefill_attention=1e-10, fixed=1e-3, sequence=1e-5)
REQUESTS, SEEDS = 6000, 24


def waits(slots: int, load: float, lengths: Callable[[np.random.Generator], Any]) -> Any:
    """float[SEEDS]: mean waiting time of runs that differ in chance only, the filling of the queue left out."""
    found = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        arrival = np.cumsum(rng.exponential(SERVICE / (load * slots), REQUESTS))
        osl = np.maximum(lengths(rng), 1)
        engine = SchedulerLimits(slots=slots, max_num_tokens=None)
        r = simulate(engine, OfferedLoad(np.ones(REQUESTS, np.int64), osl, arrival), FLAT).requests
        found.append((r.admitted - r.arrival)[REQUESTS // 5 :].mean())
    return np.array(found)


def assert_mean(values: Any, expected: float) -> None:
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) < 3 * error, f"{values.mean():.4f} +- {error:.4f}, not {expected:.4f}"


def constant(rng: np.random.Generator) -> Any:
    return np.full(REQUESTS, STEPS)


def geometric(rng: np.random.Generator) -> Any:
    return rng.geometric(1 / STEPS, REQUESTS)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_with_constant_service_is_md1(load: float) -> None:
    assert_mean(waits(1, load, constant), load * SERVICE / (2 * (1 - load)))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.75])
def test_one_slot_with_exponential_service_is_mm1(load: float) -> None:
    assert_mean(waits(1, load, geometric), load * SERVICE / (1 - load))


@pytest.mark.parametrize(("slots", "load"), [(2, 0.6), (4, 0.75), (8, 0.8)])
def test_several_slots_are_mmc(slots: int, load: float) -> None:
    """Erlang C; one that finds others running waits for the iteration's end, half of one on average."""
    offered = slots * load
    tail = offered**slots / factorial(slots) / (1 - load)
    erlang_c = tail / (sum(offered**k / factorial(k) for k in range(slots)) + tail)
    boundary = FLAT.fixed / 2
    assert_mean(waits(slots, load, geometric) - boundary, erlang_c * SERVICE / (slots * (1 - load)))


@pytest.mark.parametrize("policy", ["inflight", "inflight_chunked", "one_prefill", "static"])
def test_littles_law(policy: Any) -> None:
    rng = np.random.default_rng(1)
    isl, osl = rng.integers(20, 400, 1500), rng.integers(20, 200, 1500)
    arrival = np.cumsum(rng.exponential(0.12, 1500))
    run = simulate(
        SchedulerLimits(policy, slots=48, max_num_tokens=1024), OfferedLoad(isl, osl, arrival), REAL, iterations=True
    )
    table, r = run.iterations, run.requests
    assert table is not None
    inside = float(((table.queue + table.decoding + table.prefilling) * table.seconds).sum()) / run.end
    rate, time = len(isl) / run.end, float((r.end - r.arrival).mean())
    assert inside == pytest.approx(rate * time, rel=0.01)


def drained(policy: Any, osl: Any, cost: Any, slots: int = 8) -> SimulatedRun:
    load = OfferedLoad(np.full(len(osl), 100), osl, arrival=np.zeros(len(osl)))
    return simulate(SchedulerLimits(policy, slots=slots, max_num_tokens=None), load, cost)


@pytest.mark.parametrize("cost", [REAL, TickCost()], ids=["seconds", "ticks"])
def test_in_flight_batching_drains_a_queue_sooner_on_average(cost: Any) -> None:
    lengths = [np.random.default_rng(seed).integers(1, 120, 64) for seed in range(30)]
    static, inflight = ([drained(policy, osl, cost).end for osl in lengths] for policy in ("static", "inflight"))
    assert np.mean(inflight) < 0.9 * np.mean(static)


@pytest.mark.parametrize("cost", [REAL, TickCost()], ids=["seconds", "ticks"])
def test_equal_lengths_leave_nothing_for_in_flight_batching_to_gain(cost: Any) -> None:
    osl = np.full(64, 37)
    assert drained("inflight", osl, cost).end == pytest.approx(drained("static", osl, cost).end, rel=1e-12)


def test_more_slots_do_not_lower_throughput_on_average() -> None:
    ends = []
    for slots in (1, 2, 4, 8, 16, 32):
        runs = [
            drained("inflight", np.random.default_rng(seed).integers(1, 200, 400), REAL, slots) for seed in range(10)
        ]
        ends.append(np.mean([run.end for run in runs]))
    assert ends == sorted(ends, reverse=True)
