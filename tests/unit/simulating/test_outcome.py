"""Numbers of a run: those of the load generator's summary over the same requests, and what only a simulator knows."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.domain.summary import summarise, whole_window
from pipelines.loadgen.columns import columns_of
from pipelines.predict.simulate.outcome import CountedWindow, LoadLabel, PolicyOutcome, measure
from pipelines.predict.simulator.cost import TickCost
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import simulate
from tests.support.simulated_records import timings


def run_of(engine: SchedulerLimits, osl: list[int], **other: float) -> tuple[SimulatedRun, PolicyOutcome]:
    load = OfferedLoad(np.full(len(osl), 32), np.array(osl), np.zeros(len(osl)))
    run = simulate(engine, load, TickCost(2, 1), iterations=True, backend="numpy", **other)
    return run, measure(
        run, engine, LoadLabel("all at once"), CountedWindow(0.0, run.end, 0, len(osl), whole=True), 0.0
    )


def test_a_whole_run_has_the_summary_of_the_load_generator() -> None:
    osl = np.random.default_rng(3).integers(1, 30, 60).tolist()
    run, found = run_of(SchedulerLimits(slots=5), osl)
    records = timings(run)
    summary = summarise(columns_of(records), whole_window(records))  # a tick counts as a second
    assert found.requests == summary.requests == 60
    assert found.tokens_rate == pytest.approx(summary.output_tokens_per_s)
    for mine, theirs in ((found.ttft, summary.ttft_s), (found.itl, summary.itl_s), (found.e2e, summary.e2e_s)):
        assert (mine.count, mine.mean, mine.p95) == pytest.approx((theirs.count, theirs.mean, theirs.p95))


def test_a_window_counts_the_requests_and_tokens_inside() -> None:
    run, _ = run_of(SchedulerLimits(slots=1), [3, 3, 3])  # each 2 + 2 ticks: done at 4, 8, 12
    found = measure(run, SchedulerLimits(slots=1), LoadLabel("x"), CountedWindow(4.5, 8.5, 1, 2), overhead=0.5)
    assert (found.requests, found.tokens_rate) == (1, 3 / 4)  # tokens at 6, 7, 8
    assert (found.ttft.mean, found.e2e.mean) == (6.5, 8.5)


def test_slots_in_use_are_a_mean_over_time() -> None:
    # Two prompts of 2 ticks together; then one request alone for 4 ticks: (2 x 4 + 1 x 4) / 8.
    assert run_of(SchedulerLimits(slots=2), [1, 5])[1].busy == pytest.approx(1.5)


def test_a_cut_run_counts_who_waits_and_only_who_got_that_far() -> None:
    _, found = run_of(SchedulerLimits(slots=1), [3, 3, 3], until=7.0)
    assert (found.requests, found.queue_end, found.ttft.count, found.e2e.count) == (1, 1, 2, 1)


def test_waiting_for_blocks_beside_a_free_slot_is_told_from_waiting_for_a_slot() -> None:
    full = SchedulerLimits(slots=4, kv_blocks=2, tokens_per_block=40)  # two requests of 36 tokens
    assert run_of(full, [4] * 6)[1].kv_binds == pytest.approx(2 / 3)  # until the last two run
    assert run_of(SchedulerLimits(slots=2, kv_blocks=9, tokens_per_block=40), [4] * 6)[1].kv_binds == 0
    assert run_of(SchedulerLimits(slots=2), [4])[1].kv_share is None
