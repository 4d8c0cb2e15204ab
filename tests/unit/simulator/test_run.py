"""What a simulation says of small loads that can be worked out by hand, and of input that cannot be simulated."""

from typing import Any

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.predict.simulator import backend
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import IterationCost, TickCost, simulate
from tests.support.simulated_records import stamps

SECOND = IterationCost(0, 0, 0, 0, fixed=1.0)


def load(isl: list[int], osl: list[int], **arrival: Any) -> OfferedLoad:
    return OfferedLoad(np.array(isl), np.array(osl), **arrival)


def plain(engine: SchedulerLimits, asked: OfferedLoad, cost: Any = SECOND, **options: Any) -> SimulatedRun:
    return simulate(engine, asked, cost, backend="numpy", iterations=True, **options)


def test_a_freed_slot_is_refilled_at_once_without_a_client_delay_and_after_the_iteration_with_one() -> None:
    engine = SchedulerLimits(slots=2)
    at_once = plain(engine, load([1] * 3, [2, 5, 2], users=2))
    assert at_once.requests.admitted.tolist() == [0, 0, 2]
    late = plain(engine, load([1] * 3, [2, 5, 2], users=2, client_delay=0.1))
    assert late.requests.arrival.tolist() == [0, 0, 2.1]
    assert late.requests.admitted.tolist() == [0, 0, 3]


def test_an_idle_engine_takes_a_request_when_it_comes_but_a_tick_when_it_ticks() -> None:
    asked = load([1, 1], [1, 1], arrival=np.array([0.0, 4.3]))
    assert plain(SchedulerLimits(), asked).requests.admitted.tolist() == [0, 4.3]
    assert plain(SchedulerLimits(), asked, TickCost()).requests.admitted.tolist() == [0, 5]


def test_prompts_share_the_token_budget_in_order() -> None:
    run = plain(SchedulerLimits(slots=8, max_num_tokens=100), load([60, 30, 20, 5], [3] * 4, arrival=np.zeros(4)))
    assert run.requests.admitted.tolist() == [0, 0, 1, 1]  # the last would fit beside the first two, but waits its turn
    assert run.iterations is not None
    assert run.iterations.tokens.tolist() == [90, 27, 4, 2]


def test_a_prompt_is_cut_into_what_decoding_leaves_of_the_budget() -> None:
    engine = SchedulerLimits("inflight_chunked", slots=8, max_num_tokens=16)
    run = plain(engine, load([10, 30], [4, 2], arrival=np.zeros(2)))
    assert run.iterations is not None
    assert run.iterations.tokens.tolist() == [16, 16, 10, 2]
    assert run.requests.first_token.tolist() == [1, 3]


def test_a_prompt_longer_than_the_budget_goes_alone() -> None:
    run = plain(SchedulerLimits(slots=4, max_num_tokens=16), load([4, 30, 4], [3, 1, 1], arrival=np.zeros(3)))
    assert run.requests.admitted.tolist() == [0, 3, 4]


def test_a_batch_chosen_ahead_takes_a_request_one_iteration_later_but_an_idle_engine_at_once() -> None:
    asked = load([1, 1, 1], [6, 2, 1], arrival=np.array([0.0, 1.5, 20.0]))
    assert plain(SchedulerLimits(), asked).requests.admitted.tolist() == [0, 2, 20]
    for backend_name in ("numpy", "auto"):
        ahead = simulate(SchedulerLimits(ahead=True), asked, SECOND, backend=backend_name)  # type: ignore[arg-type]
        assert ahead.requests.admitted.tolist() == [0, 3, 20]


def test_each_prompt_may_have_another_part_in_the_cache() -> None:
    asked = load([20, 20, 20], [1, 1, 1], arrival=np.zeros(3), cached=np.array([0, 16, 40]))
    run = plain(SchedulerLimits(slots=4, kv_blocks=10, tokens_per_block=8), asked)
    assert run.iterations is not None
    assert run.iterations.tokens.tolist() == [20 + 4 + 1]  # the last token of a prompt is always computed
    assert run.iterations.kv_blocks.tolist() == [3 + 1 + 1]


def test_cached_prefix_is_neither_prefilled_nor_stored_twice() -> None:
    engine = SchedulerLimits(slots=4, kv_blocks=4, tokens_per_block=8, prefix_tokens=16)
    run = plain(engine, load([20, 20], [2, 2], arrival=np.zeros(2)))
    assert run.iterations is not None
    assert run.iterations.tokens.tolist() == [8, 2]
    assert run.iterations.kv_blocks.tolist() == [4, 4]  # two of the prefix, one for the rest of each


def test_reserving_makes_wait_and_taking_on_demand_pauses() -> None:
    asked = load([8, 8], [9, 9], arrival=np.zeros(2))
    blocks = {"kv_blocks": 3, "tokens_per_block": 8}
    reserved = plain(SchedulerLimits(slots=2, **blocks), asked)  # type: ignore[arg-type]
    assert reserved.requests.admitted.tolist() == [0, 9]
    paused = plain(SchedulerLimits(slots=2, admission="MAX_UTILIZATION", **blocks), asked)  # type: ignore[arg-type]
    assert paused.requests.admitted.tolist() == [0, 0]
    assert paused.requests.preemptions.tolist() == [0, 1]
    assert paused.iterations is not None
    assert paused.iterations.prefilling.tolist()[:2] == [2, 0]
    first, second = stamps(paused)
    assert first.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert second.tolist() == [1, 10, 11, 12, 13, 14, 15, 16, 17]  # the first token's prompt is prefilled again


def test_the_end_cuts_an_iteration_and_what_it_would_have_given_is_not_counted() -> None:
    run = plain(SchedulerLimits(), load([1], [9], arrival=np.zeros(1)), until=3.5)
    assert run.end == 4
    assert run.requests.produced.tolist() == [3]
    assert np.isnan(run.requests.end[0])


def test_nothing_to_do_ends_at_once() -> None:
    run = plain(SchedulerLimits(), load([], [], arrival=np.zeros(0)))
    assert (run.end, run.request_iterations, len(run.requests.end)) == (0, 0, 0)


def test_records_need_the_iterations() -> None:
    with pytest.raises(ValueError, match="without iterations"):
        stamps(simulate(SchedulerLimits(), load([1], [1], users=1), SECOND, backend="numpy"))


@pytest.mark.parametrize(
    ("engine", "asked", "message"),
    [
        (SchedulerLimits(slots=0), load([1], [1], users=1), "slots=0.* At least 1"),
        (SchedulerLimits(max_num_tokens=0), load([1], [1], users=1), "max_num_tokens=0"),
        (SchedulerLimits(prefix_tokens=-1), load([1], [1], users=1), "prefix_tokens=-1"),
        (SchedulerLimits(), load([1, 1], [1, 1], users=1, cached=np.array([1])), "does not state 2 cached lengths"),
        (SchedulerLimits("orca"), load([1], [1], users=1), "policy='orca'.*one_prefill"),  # type: ignore[arg-type]
        (SchedulerLimits(admission="ANY"), load([1], [1], users=1), "admission='ANY'"),  # type: ignore[arg-type]
        (
            SchedulerLimits(kv_blocks=3),
            load([60, 90], [4, 40], users=1),
            "Request 1 with 90 input and 40 output .* 5 KV blocks",
        ),
        (SchedulerLimits(), load([0], [1], users=1), "isl=0"),
        (SchedulerLimits(), load([1], [-2], users=1), "osl=-2"),
        (SchedulerLimits(), load([1, 1], [1], users=1), "2 input and 1 output"),
        (SchedulerLimits(), load([1], [1]), "users=0"),
        (SchedulerLimits(), load([1], [1], users=1, client_delay=-0.5), "client_delay=-0.5"),
        (SchedulerLimits(), load([1, 1], [1, 1], arrival=np.array([2.0, 1.0])), "not ascending"),
        (SchedulerLimits(), load([1, 1], [1, 1], arrival=np.array([1.0])), "1 arrivals for 2 requests"),
    ],
)
def test_what_cannot_be_simulated_is_refused(engine: SchedulerLimits, asked: OfferedLoad, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plain(engine, asked)


def test_an_unknown_or_missing_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'cuda' is unknown.*auto, numba, numpy"):
        simulate(SchedulerLimits(), load([1], [1], users=1), SECOND, backend="cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="'numba' is not installed"):
        simulate(SchedulerLimits(), load([1], [1], users=1), SECOND, backend="numba")
    assert simulate(SchedulerLimits(), load([1], [1], users=1), SECOND).backend == "numpy"
