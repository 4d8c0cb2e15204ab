"""The tick model against worked examples: tests/reference/seed_cases.json, `simulator_tick_model`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import TickCost, simulate
from tests.support.simulated_records import gap_before_last

MODEL = json.loads((Path(__file__).parents[2] / "reference/seed_cases.json").read_text())["simulator_tick_model"]
STATIC, ONE, CHUNKED = MODEL["cases"]


def hundred_at_once(policy: Any, chunks: int = 1) -> SimulatedRun:
    load = OfferedLoad(isl=np.full(100, 10), osl=np.full(100, 10), arrival=np.zeros(100))
    engine = SchedulerLimits(policy, slots=4, max_num_tokens=None)
    return simulate(engine, load, TickCost(2, 1, chunks), until=100, iterations=True, backend="numpy")


@pytest.mark.parametrize(
    ("policy", "chunks", "case"),
    [("static", 1, STATIC), ("inflight", 1, STATIC), ("one_prefill", 1, ONE), ("one_prefill", 2, CHUNKED)],
)
def test_worked_example_comes_out_exactly(policy: str, chunks: int, case: dict[str, Any]) -> None:
    run = hundred_at_once(policy, chunks)
    ended = ~np.isnan(run.requests.end)
    assert ended.sum() == case["done"]
    assert round(run.requests.end[ended].mean(), 4) == case["e2e"]
    assert round(np.nanmean(run.requests.first_token), 4) == case["ttft"]
    assert round(gap_before_last(run), 4) == case["itl"]
    assert ended.sum() * 10 == case["req_per_1k"]
    assert run.requests.produced.sum() * 10 == case["tok_per_1k"]
    assert run.iterations is not None
    assert run.iterations.queue[-1] == case.get("queue_end", run.iterations.queue[-1])


def test_first_iteration_prefills_all_slots() -> None:
    transcript = MODEL["transcript"]
    run = hundred_at_once("inflight")
    assert run.iterations is not None
    assert run.iterations.seconds[0] == transcript["first_iteration_ends_at_tick"]
    assert run.iterations.queue[0] == transcript["queue_after_first_admission"]
    assert run.requests.first_token[:4].tolist() == [transcript["first_ttft_ticks"]] * 4


def test_idle_ticks_beyond_a_million_are_refused() -> None:
    """Each is a row of the table; the simulation of a rate of 1e-9 a tick filled the memory."""
    load = OfferedLoad(isl=np.full(2, 10), osl=np.full(2, 10), arrival=np.array([0.0, 5e9]))
    engine = SchedulerLimits("inflight", slots=4, max_num_tokens=None)
    with pytest.raises(UserError, match=r"arrives at tick 5,000,000,000\. At most 1,000,000.*benchmark\.request_rate"):
        simulate(engine, load, TickCost(2, 1, 1), iterations=True, backend="numpy")
    assert simulate(engine, load, TickCost(2, 1, 1), until=20, iterations=True, backend="numpy").end >= 20
    assert simulate(engine, load, TickCost(2, 1, 1), backend="numpy").end > 5e9
