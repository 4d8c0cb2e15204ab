"""A load through the simulator, read under the protocol it was measured with; numbers by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.domain.benchmark import Distribution
from pipelines.predict.performance.measured import MeasuredLevel, Sent
from pipelines.predict.performance.modelled import ModelledDeployment, run_trial, trial
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import IterationCost, simulate

NOTHING = Distribution(0)
COST = IterationCost(0.0, 0.0, 0.0, 0.0, fixed=0.01)
"""Every iteration lasts 10 ms, whatever is in it."""
DEPLOYMENT = ModelledDeployment(SchedulerLimits(slots=8), COST, overhead_s=0.005, client_gap_s=0.001)


def level(arrival="closed", users=None, rate=None, count=40, sent=None, steady=True, osl=11):
    return MeasuredLevel(
        arrival, users, rate, 100, osl, count, 1.0, NOTHING, NOTHING, NOTHING, steady=steady, sent=sent
    )


def test_one_user_waits_for_its_own_iterations_and_the_way():
    """11 tokens: TTFT 10 + 5 ms, ITL 10 ms, E2E 110 + 5 ms, a request every 110 + 5 + 1 ms."""
    found = run_trial(trial(level(users=1)), DEPLOYMENT)
    assert found.ttft_s.p50 == pytest.approx(0.015)
    assert found.itl_s.mean == pytest.approx(0.010)
    assert found.e2e_s.mean == pytest.approx(0.115)
    assert found.requests_per_s == pytest.approx(1 / 0.116, rel=0.02)
    assert found.output_tokens_per_s == pytest.approx(11 / 0.116, rel=0.02)


def test_a_burst_is_measured_from_its_start_to_its_last_response():
    """16 requests, 8 slots, 11 iterations each: 220 ms and the way; the second half waits 110 ms for a slot."""
    found = run_trial(trial(level("burst", count=16, steady=False)), DEPLOYMENT)
    assert found.ttft_s.min == pytest.approx(0.015)
    assert found.ttft_s.max == pytest.approx(0.125)
    assert found.requests_per_s == pytest.approx(16 / 0.225)


def test_percentiles_are_taken_as_the_tool_takes_them():
    """Half of the burst has 15 ms, half 125 ms: sorted[int(16 * 0.5)] is the ninth; the middle lies between."""
    load = trial(level("burst", count=16, steady=False))
    assert run_trial(load, DEPLOYMENT, "index").ttft_s.p50 == pytest.approx(0.125)
    assert run_trial(load, DEPLOYMENT, "linear").ttft_s.p50 == pytest.approx(0.070)


def test_answers_of_one_token_have_no_itl():
    assert run_trial(trial(level(users=2, osl=1)), DEPLOYMENT).itl_s.count == 0


def test_the_very_requests_are_sent_again_and_only_those_in_the_window_count():
    """Ten requests a second apart, of which those due in [3 s, 8 s) count: five, one per second."""
    due = np.arange(10.0)
    sent = Sent(due, np.full(10, 100), np.full(10, 11), (3.0, 8.0))
    found = run_trial(trial(level("poisson", rate=1.0, sent=sent)), DEPLOYMENT)
    assert (found.ttft_s.count, found.requests_per_s) == (5, pytest.approx(1.0))
    assert found.ttft_s.mean == pytest.approx(0.015)


def test_a_closed_loop_is_sent_again_with_as_many_requests_of_warm_up():
    """Four users, 20 requests, 8 of them before the window: 12 count, and it ends when the next would leave."""
    due = np.repeat(np.arange(5), 4) * 0.116
    sent = Sent(due, np.full(20, 100), np.full(20, 11), (0.2, 10.0))
    found = run_trial(trial(level(users=4, sent=sent)), DEPLOYMENT)
    assert found.ttft_s.count == 12
    assert found.requests_per_s == pytest.approx(4 / 0.116, rel=0.05)


def test_a_start_inside_the_window_is_in_the_numbers():
    """The start burst of 8 users with a slow prompt: its requests wait for each other's prompts."""
    slow = replace(DEPLOYMENT, cost=replace(COST, prefill=0.02))
    inside = run_trial(trial(level(users=8, count=16, steady=False)), slow)
    without = run_trial(trial(level(users=8, count=16)), slow)
    assert inside.ttft_s.max >= without.ttft_s.max
    assert inside.ttft_s.count == without.ttft_s.count == 16


@pytest.mark.parametrize(("arrival", "gaps"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 2.0)])
def test_rates_that_nobody_kept_the_requests_of_are_drawn(arrival, gaps):
    load = replace(level(arrival, rate=4.0, count=4000), cv=2.0)
    arrivals = trial(load).load.arrival
    between = np.diff(arrivals)
    assert between.mean() == pytest.approx(0.25, rel=0.1)
    assert between.std() / between.mean() == pytest.approx(gaps, abs=0.15)


def test_users_who_think_come_back_later():
    """A second of thinking beside 116 ms of waiting."""
    found = run_trial(trial(replace(level(users=1), think_s=1.0)), DEPLOYMENT)
    assert found.requests_per_s == pytest.approx(1 / 1.116, rel=0.02)


def test_what_only_the_cpu_engine_pays():
    """10 ms; with prompts in it 5 ms once, however many."""
    cost = replace(COST, prompts=0.005)
    assert cost.seconds(5, 5) == pytest.approx(0.010)
    assert cost.seconds(200, 5, prefills=2) == pytest.approx(0.015)
    burst = run_trial(trial(level("burst", count=5, steady=False, osl=1)), replace(DEPLOYMENT, cost=cost))
    assert burst.ttft_s.max == pytest.approx(0.020)  # one iteration of five prompts and the way


def test_an_end_holds_up_those_that_go_on():
    """Iterations of 10 ms; 5 ms to see one off, which its own client does not wait for."""
    load = OfferedLoad([1, 1], [1, 3], arrival=np.zeros(2))
    run = simulate(DEPLOYMENT.engine, load, replace(COST, end=0.005), iterations=True)
    assert run.requests.end == pytest.approx([0.010, 0.035])
    assert run.iterations.start == pytest.approx([0.0, 0.015, 0.025])


def test_pipeline_stages_work_on_batches_of_their_own():
    """With one slot per batch: two users do not wait for each other, four requests at once take two rounds."""
    two = replace(DEPLOYMENT, lanes=2, engine=SchedulerLimits(slots=1))
    alone, together = (run_trial(trial(level(users=n, count=20)), two) for n in (1, 2))
    assert together.requests_per_s == pytest.approx(2 * alone.requests_per_s, rel=0.01)
    assert together.ttft_s.max == pytest.approx(0.015)
    burst = level("burst", count=4, steady=False, osl=1)
    assert run_trial(trial(burst), two).ttft_s.max == pytest.approx(0.025)  # two rounds of 10 ms and the way
    assert run_trial(trial(burst), replace(two, lanes=1)).ttft_s.max == pytest.approx(0.045)
