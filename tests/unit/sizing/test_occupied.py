"""What an instance holds at a load: the same as the simulator's own table of iterations says."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.predict.simulator.interface import OfferedLoad
from pipelines.predict.simulator.run import simulate
from pipelines.predict.sizing.instance import FULL, WARM_UP, Instance, input_share, instance, saturation, watch
from pipelines.predict.sizing.question import Question
from tests.support.sizing_questions import COUNT, made_up, question

RANDOM = np.random.default_rng(5)
ASKED = question(isl=RANDOM.integers(300, 1000, COUNT), osl=RANDOM.integers(20, 200, COUNT))
ARRIVAL = np.cumsum(ASKED.gaps) / 25


def held(asked: Question, **engine: object) -> tuple[Instance, float, int]:
    """The instance, and the KV blocks of its table: their mean while requests come after the warm-up, and the most."""
    setup = next(asked.setups())
    one = instance(asked, setup, made_up(setup))
    one = replace(one, placed=replace(one.placed, engine=replace(one.engine, **engine)))
    run = simulate(one.engine, OfferedLoad(asked.isl, asked.osl, ARRIVAL), one.costed.cost, iterations=True)
    table, window = run.iterations, (ARRIVAL[int(WARM_UP * COUNT)], ARRIVAL[-1])
    seconds = np.clip(table.start + table.seconds, *window) - np.clip(table.start, *window)
    idle = window[1] - window[0] - seconds.sum()
    used = (table.kv_blocks * seconds).sum() + idle * one.engine.shared_blocks
    return one, used / (window[1] - window[0]), int(table.kv_blocks.max())


@pytest.mark.parametrize("prefix", [0, 250, 300])
def test_blocks_in_use_are_those_of_the_simulation(prefix: int) -> None:
    """300 of the shortest prompt's 300 tokens are cached but for the last one."""
    one, mean, _ = held(ASKED, kv_blocks=4000, prefix_tokens=prefix)
    assert watch(ASKED, one, ARRIVAL, 25).kv_use == pytest.approx(mean / 4000, rel=1e-9)


def test_blocks_that_are_taken_one_by_one_are_half_of_the_answers() -> None:
    one, mean, _ = held(ASKED, kv_blocks=4000, prefix_tokens=250, admission="MAX_UTILIZATION")
    assert watch(ASKED, one, ARRIVAL, 25).kv_use == pytest.approx(mean / 4000, rel=0.03)


def test_requests_in_slots_are_their_rate_times_their_stay() -> None:
    """Little's law; over the whole run, with its filling and its emptying, the mean would be less."""
    asked = question(isl=np.full(COUNT, 100), osl=np.full(COUNT, 600))
    one = instance(asked, next(asked.setups()), made_up(next(asked.setups())))
    ran = simulate(one.engine, OfferedLoad(asked.isl, asked.osl, ARRIVAL), one.costed.cost)
    stay = (ran.requests.end - ran.requests.admitted)[int(WARM_UP * COUNT) :].mean()
    rate = (1 - WARM_UP) * COUNT / (ARRIVAL[-1] - ARRIVAL[int(WARM_UP * COUNT)])
    assert watch(asked, one, ARRIVAL, 25).batch == pytest.approx(rate * stay, rel=0.03)
    assert stay * COUNT / ran.end < 0.95 * rate * stay


def test_requests_that_all_arrive_at_once_are_counted_over_the_whole_run() -> None:
    one, _, _ = held(ASKED, kv_blocks=4000)
    seen = watch(ASKED, one, np.zeros(COUNT), 25)
    ran = simulate(one.engine, OfferedLoad(ASKED.isl, ASKED.osl, np.zeros(COUNT)), one.costed.cost)
    assert seen.batch == pytest.approx((ran.requests.end - ran.requests.admitted).sum() / ran.end)
    assert 0 < seen.kv_use < 1


def test_the_cache_is_full_when_one_more_request_would_not_have_gone_in() -> None:
    _, _, most = held(ASKED, kv_blocks=4000, prefix_tokens=250)
    largest = int(replace(held(ASKED)[0].engine, prefix_tokens=250).own_blocks(ASKED.isl, ASKED.isl + ASKED.osl).max())
    for blocks, full in ((most + largest, ""), (most + largest - 1, "KV cache")):
        one, _, again = held(ASKED, kv_blocks=blocks, prefix_tokens=250)
        assert again == most  # nobody had to wait
        assert watch(ASKED, one, ARRIVAL, 25).full == full


def test_a_request_that_takes_the_place_of_another_does_not_count_twice() -> None:
    one, _, _ = held(ASKED, kv_blocks=None)
    table = simulate(
        one.engine, OfferedLoad(ASKED.isl, ASKED.osl, ARRIVAL), one.costed.cost, iterations=True
    ).iterations
    most = int((table.decoding + table.prefilling).max())
    for slots, full in ((int(most / FULL), "max_batch_size"), (int(most / FULL) + 1, "")):
        same = replace(one, placed=replace(one.placed, engine=replace(one.engine, slots=slots)))
        assert watch(ASKED, same, ARRIVAL, 25).full == full


def test_a_pause_says_that_the_cache_was_full() -> None:
    one, _, _ = held(ASKED, kv_blocks=60, admission="MAX_UTILIZATION")
    assert watch(ASKED, one, ARRIVAL, 25).full == "KV cache"


def test_saturation_is_measured_between_the_filling_and_the_emptying_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1,000 requests those after half and up to 85 % end four times as fast as the others."""
    middle = (np.arange(COUNT) > COUNT // 2) & (np.arange(COUNT) <= 17 * COUNT // 20)
    ends = np.cumsum(np.where(middle, 0.25, 1.0))
    ran = SimpleNamespace(end=ends[-1], requests=SimpleNamespace(end=ends))
    monkeypatch.setattr("pipelines.predict.sizing.instance.simulate", lambda *_: ran)
    setup = next(ASKED.setups())
    one = instance(ASKED, setup, made_up(setup))
    placed = replace(one.placed, concurrency=replace(one.placed.concurrency, requests=1))
    assert saturation(ASKED, replace(one, placed=placed)) == pytest.approx(4.0)


def test_the_share_of_the_prompts_is_what_they_add_to_an_iteration() -> None:
    """A prompt of 100 tokens attends to 100 * 50 and adds a second here; an answer has two iterations of a second."""
    asked = question(isl=np.full(COUNT, 100), osl=np.full(COUNT, 3))
    cost = SimpleNamespace(window=0, seconds=lambda *_, q_ctx=0.0, **__: 1 + q_ctx / (100 * 50))
    one = SimpleNamespace(costed=SimpleNamespace(cost=cost), setup=SimpleNamespace(lanes=1))
    for batch, share in ((1, 1 / 3), (2, 1 / 2)):
        found = SimpleNamespace(seen=SimpleNamespace(batch=batch))
        assert input_share(asked, one, found) == pytest.approx(share)  # type: ignore[arg-type]
