"""Boxes of the pictures and the trace: the same as what the simulator says of every slot in every iteration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.predict.simulator.interface import (
    CONTEXT,
    EOS,
    GEN,
    NOOP,
    Box,
    OfferedLoad,
    SchedulerLimits,
    SimulatedRun,
    boxes,
    with_gaps,
)
from pipelines.predict.simulator.run import TickCost, simulate
from tests.support.simulated_records import cells_over_time


def run_of(engine: SchedulerLimits, osl: list[int], until: float | None = None, gap: float = 0.0) -> SimulatedRun:
    load = OfferedLoad(np.full(len(osl), 16), np.array(osl), gap * np.arange(len(osl)))
    return simulate(engine, load, TickCost(2, 1), until=until, iterations=True, backend="numpy")


def test_a_request_is_its_prompt_its_tokens_and_its_last_token() -> None:
    # 2 ticks of prompt yield the first of four tokens; two more, and the last.
    assert boxes(run_of(SchedulerLimits(slots=1), [4])) == [
        Box(0, CONTEXT, 0, 2, 0),
        Box(0, GEN, 2, 4, 0),
        Box(0, EOS, 4, 5, 0),
    ]


def test_one_token_comes_with_the_prompt() -> None:
    assert boxes(run_of(SchedulerLimits(slots=1), [1])) == [Box(0, CONTEXT, 0, 2, 0)]


def test_an_empty_slot_does_nothing_between_and_after() -> None:
    run = run_of(SchedulerLimits("static", slots=2), [1, 3, 2])
    # 2 x 2 ticks of prompts, two tokens more; then the third: 2 ticks and one token.
    second = [box for box in with_gaps(boxes(run), 2, until=12) if box.slot == 0]
    assert [(box.kind, box.start, box.end) for box in second] == [
        (CONTEXT, 0, 4), (NOOP, 4, 6), (CONTEXT, 6, 8), (EOS, 8, 9), (NOOP, 9, 12),
    ]  # fmt: skip


def test_a_run_without_iterations_has_no_boxes() -> None:
    run = simulate(
        SchedulerLimits(slots=1), OfferedLoad(np.array([4]), np.array([4]), np.zeros(1)), TickCost(), backend="numpy"
    )
    with pytest.raises(ValueError, match="without iterations"):
        boxes(run)


@given(
    osl=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    policy=st.sampled_from(["static", "inflight", "one_prefill", "inflight_chunked"]),
    blocks=st.sampled_from([None, 26, 40]),
    gap=st.sampled_from([0.0, 3.5]),
    until=st.sampled_from([None, 11.0]),
)
def test_boxes_say_what_the_table_of_slots_says(osl, slots, policy, blocks, gap, until) -> None:
    engine = SchedulerLimits(policy, slots, admission="MAX_UTILIZATION", kv_blocks=blocks, tokens_per_block=1)
    run = run_of(engine, osl, until, gap)
    cells = cells_over_time(run, slots)
    painted = np.zeros_like(cells)
    for box in boxes(run):
        inside = (run.iterations.start >= box.start) & (run.iterations.start < box.end)
        assert (painted[inside, box.slot] == NOOP).all()
        painted[inside, box.slot] = box.kind
    assert painted.tolist() == cells.tolist()
