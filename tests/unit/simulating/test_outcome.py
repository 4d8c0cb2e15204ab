"""Numbers of a run: those of the load generator's summary over the same requests, and what only a simulator knows."""

import dataclasses

import numpy as np
import pytest

from pipelines.domain.summary import summarise, whole_window
from pipelines.predict.simulate.outcome import PolicyOutcome, SimulatedLevel, limits_in_words, measure
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import TickCost, simulate
from tests.support.load_records import columns_of
from tests.support.simulated_records import timings


def run_of(engine: SchedulerLimits, osl: list[int], **other: float) -> tuple[SimulatedRun, PolicyOutcome]:
    load = OfferedLoad(np.full(len(osl), 32), np.array(osl), np.zeros(len(osl)))
    run = simulate(engine, load, TickCost(2, 1), iterations=True, backend="numpy", **other)
    return run, measure(run, engine, SimulatedLevel(load, None, 0, len(osl), True, "all at once"), 0.0)


def test_a_whole_run_has_the_summary_of_the_load_generator() -> None:
    osl = np.random.default_rng(3).integers(1, 30, 60).tolist()
    run, found = run_of(SchedulerLimits(slots=5), osl)
    records = timings(run)
    summary = summarise(columns_of(records), whole_window(columns_of(records)))  # a tick counts as a second
    assert found.requests == summary.requests == 60
    assert found.tokens_rate == pytest.approx(summary.output_tokens_per_s)
    for mine, theirs in ((found.ttft, summary.ttft_s), (found.itl, summary.itl_s), (found.e2e, summary.e2e_s)):
        assert (mine.count, mine.mean, mine.p95) == pytest.approx((theirs.count, theirs.mean, theirs.p95))


def test_a_window_counts_the_requests_and_tokens_inside() -> None:
    engine, load = SchedulerLimits(slots=1), OfferedLoad(np.full(3, 32), np.full(3, 3), np.array([0.0, 3.0, 8.0]))
    run = simulate(engine, load, TickCost(2, 1), iterations=True, backend="numpy")  # each 2 + 2 ticks: done at 4, 8, 12
    found = measure(run, engine, SimulatedLevel(load, None, 1, 2, False, "x"), overhead=0.5)
    assert (found.requests, found.tokens_rate) == (1, 4 / 5)  # from 3 to 8: tokens at 3.5, 4.5, 6.5, 7.5
    assert (found.ttft.mean, found.e2e.mean) == (3.5, 5.5)


def test_slots_in_use_are_a_mean_over_time() -> None:
    # Two prompts of 2 ticks together; then one request alone for 4 ticks: (2 x 4 + 1 x 4) / 8.
    assert run_of(SchedulerLimits(slots=2), [1, 5])[1].busy == pytest.approx(1.5)


def test_a_cut_run_counts_who_waits_and_only_who_got_that_far() -> None:
    _, found = run_of(SchedulerLimits(slots=1), [3, 3, 3], until=7.0)
    assert (found.requests, found.queue_end, found.ttft.count, found.e2e.count) == (1, 1, 2, 1)


def test_waiting_for_blocks_beside_a_free_slot_is_told_from_waiting_for_a_slot() -> None:
    full = SchedulerLimits(slots=4, kv_blocks=2, tokens_per_block=40)  # two requests of 36 tokens
    assert run_of(full, [4] * 6)[1].waiting == {"kv_blocks": pytest.approx(2 / 3)}  # until the last two run
    half = run_of(SchedulerLimits(slots=2, kv_blocks=9, tokens_per_block=40), [4] * 6)[1]
    assert half.waiting == {"slots": pytest.approx(2 / 3)}
    assert run_of(SchedulerLimits(slots=2), [4])[1].kv_share is None


def test_waiting_for_token_budget_beside_a_nearly_empty_cache_is_not_called_a_full_cache() -> None:
    """Prompts of 32 tokens, 48 per iteration: one prompt at a time, and at most 6 % of the cache in use."""
    engine = SchedulerLimits(slots=8, max_num_tokens=48, kv_blocks=200, tokens_per_block=40)
    _, found = run_of(engine, [20] * 6)
    assert found.kv_share == pytest.approx(0.06)
    assert found.waiting == {"max_num_tokens": pytest.approx(10 / 31)}  # five prompts of 2 ticks, of 6 x 2 + 19 ticks
    assert limits_in_words(found) == (
        "requests waited 32 % of the time because the next prompt did not fit into the token budget of 48 "
        "(max_num_tokens)."
    )


def test_every_policy_gives_its_own_reason() -> None:
    _, one = run_of(SchedulerLimits("one_prefill", slots=8), [9] * 3)
    assert set(one.waiting) == {"one_prefill"}
    assert "because another prompt was being processed." in limits_in_words(one)
    _, chunked = run_of(SchedulerLimits("inflight_chunked", slots=8, max_num_tokens=16), [9] * 3)
    assert set(chunked.waiting) == {"max_num_tokens"}
    assert "because the token budget of 16 (max_num_tokens) was used up." in limits_in_words(chunked)
    _, free = run_of(SchedulerLimits("inflight", slots=8), [9] * 3)
    assert (free.waiting, limits_in_words(free)) == ({}, "no request waited for a slot.")
    rare = dataclasses.replace(free, waiting={"slots": 0.004, "kv_blocks": 0.001})
    assert limits_in_words(rare) == "requests waited less than 1 % of the time because all 8 slots were in use."


def test_a_static_engine_names_what_closed_its_batches() -> None:
    def closed(**limits: int) -> PolicyOutcome:
        return run_of(SchedulerLimits("static", **{"slots": 4, "max_num_tokens": None, **limits}), [5] * 6)[1]  # type: ignore[arg-type]

    assert closed().batches == {"": 1, "slots": 1}
    assert limits_in_words(closed()).endswith(
        "of the time for the running batch to end; of 2 batches 1 took all requests that waited, 1 filled all 4 slots."
    )
    assert closed(kv_blocks=3, tokens_per_block=40).batches == {"": 1, "kv_blocks": 1}
    assert closed(max_num_tokens=64).batches == {"": 1, "max_num_tokens": 2}
    assert "2 used up the token budget of 64 (max_num_tokens)" in limits_in_words(closed(max_num_tokens=64))
    assert closed(slots=6).waiting == {}
