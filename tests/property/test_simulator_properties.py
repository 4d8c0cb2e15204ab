"""What holds for every simulation."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from pipelines.domain.summary import summarise, whole_window
from pipelines.predict.simulator.interface import Iterations, OfferedLoad, SchedulerLimits, SimulatedRun, Stays
from pipelines.predict.simulator.run import Cost, simulate
from tests.support.load_records import columns_of
from tests.support.random_loads import simulations
from tests.support.simulated_records import cells_over_time, stamps, timings

Case = tuple[SchedulerLimits, OfferedLoad, Cost]


def tables(case: Case) -> tuple[SimulatedRun, Iterations, Stays]:
    run = simulate(*case, iterations=True, backend="numpy")
    assert run.iterations is not None
    assert run.stays is not None
    return run, run.iterations, run.stays


@settings(max_examples=100)
@given(simulations())
def test_every_token_is_computed_once_without_a_pause_and_again_after_one(case: Case) -> None:
    engine, load, _ = case
    run, table, stays = tables(case)
    cached = np.minimum(engine.prefix_tokens if load.cached is None else load.cached, load.isl - 1)
    once = int((load.isl - cached + load.osl - 1).sum())
    assert int(table.tokens.sum()) == once if not run.requests.preemptions.any() else table.tokens.sum() > once
    assert int(stays.tokens.sum()) == int(load.osl.sum())
    assert len(stays.request) == len(load.isl) + int(run.requests.preemptions.sum())


@settings(max_examples=100)
@given(simulations())
def test_times_of_a_request_are_in_order(case: Case) -> None:
    r = simulate(*case, backend="numpy").requests
    assert (r.arrival <= r.admitted).all()
    assert (r.admitted < r.first_token).all()
    assert (r.first_token <= r.end).all()


@settings(max_examples=100)
@given(simulations())
def test_who_comes_first_is_admitted_first(case: Case) -> None:
    r = simulate(*case, backend="numpy").requests
    assert (np.diff(r.arrival) >= 0).all()
    assert (np.diff(r.admitted) >= 0).all()


@settings(max_examples=100)
@given(simulations())
def test_limits_of_the_engine_are_kept_in_every_iteration(case: Case) -> None:
    engine = case[0]
    _, table, stays = tables(case)
    assert (table.decoding + table.prefilling <= engine.slots).all()
    if engine.kv_blocks is not None:
        assert (table.kv_blocks <= engine.kv_blocks).all()
    if engine.max_num_tokens is not None:
        over = table.tokens > engine.max_num_tokens  # a prompt that is longer goes alone
        assert (table.prefilling[over] == 1).all()
        assert (table.decoding[over] == 0).all()
        assert engine.policy != "inflight_chunked" or not over.any()
    if engine.policy == "one_prefill":
        assert (table.prefilling <= 1).all()
    assert (stays.slot < engine.slots).all()


@settings(max_examples=100)
@given(simulations())
def test_a_static_batch_is_refilled_when_it_is_empty_only(case: Case) -> None:
    engine, load, cost = case
    _, _, stays = tables((replace(engine, policy="static"), load, cost))
    for joined in set(stays.joined.tolist()):
        before = stays.joined < joined
        assert (stays.last[before] < joined).all()


@settings(max_examples=100)
@given(simulations())
def test_every_slot_holds_one_request_at_a_time_and_the_picture_shows_it(case: Case) -> None:
    run, table, stays = tables(case)
    cells = cells_over_time(run, case[0].slots)
    assert cells.shape[0] == len(table.start)
    order = np.lexsort((stays.joined, stays.slot))
    for one, two in pairwise(order):
        assert stays.slot[one] != stays.slot[two] or stays.last[one] < stays.joined[two]
    assert (cells == 3).sum() == (case[1].osl - 1 > 0).sum() - _paused_for_the_last_token(run, stays)
    assert ((cells == 2) | (cells == 3)).sum(axis=1).tolist() == table.decoding.tolist()


def _paused_for_the_last_token(run: SimulatedRun, stays: Stays) -> int:
    """Requests whose last stay yielded one token only: its prefill's, which is drawn as Context."""
    last = dict(zip(stays.request.tolist(), range(len(stays.request)), strict=True))
    return sum(int(stays.tokens[row] == 1 and run.requests.osl[request] > 1) for request, row in last.items())


@settings(max_examples=100)
@given(simulations())
def test_the_same_simulation_gives_the_same_numbers(case: Case) -> None:
    one, two = (simulate(*case, backend="numpy").requests for _ in "ab")
    for name in one.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@settings(max_examples=100)
@given(simulations())
def test_records_of_simulated_requests_summarise_like_measured_ones(case: Case) -> None:
    run, _, _ = tables(case)
    r, records = run.requests, timings(run)
    assert [len(times) for times in stamps(run)] == r.osl.tolist()
    found = summarise(columns_of(records), whole_window(columns_of(records)))
    assert found.requests == len(r.osl)
    np.testing.assert_allclose(found.ttft_s.mean or 0, (r.first_token - r.arrival).mean(), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.e2e_s.p50 or 0, np.median(r.end - r.arrival), rtol=1e-6, atol=1e-8)
    several = r.osl > 1
    itl = (r.end - r.first_token)[several] / (r.osl[several] - 1)
    assert found.itl_s.count == several.sum()
    np.testing.assert_allclose(found.itl_s.max or 0, itl.max(initial=0), rtol=1e-6, atol=1e-8)
