"""What an instance holds at a load: the same as the simulator's own table of iterations says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines.predict.simulator.interface import OfferedLoad
from pipelines.predict.simulator.run import simulate
from pipelines.predict.sizing.instance import FULL, Instance, instance, watch
from pipelines.predict.sizing.question import Question
from tests.support.sizing_questions import COUNT, made_up, question

RANDOM = np.random.default_rng(5)
ASKED = question(isl=RANDOM.integers(300, 1000, COUNT), osl=RANDOM.integers(20, 200, COUNT))
ARRIVAL = np.cumsum(ASKED.gaps) / 25


def held(asked: Question, **engine: object) -> tuple[Instance, float, int]:
    """The instance, and mean and most KV blocks of its table over a run that never stands still."""
    setup = next(asked.setups())
    one = instance(asked, setup, made_up(setup))
    one = replace(one, placed=replace(one.placed, engine=replace(one.engine, **engine)))
    run = simulate(one.engine, OfferedLoad(asked.isl, asked.osl, ARRIVAL), one.costed.cost, iterations=True)
    idle = run.end - run.iterations.seconds.sum()
    used = (run.iterations.kv_blocks * run.iterations.seconds).sum() + idle * one.engine.shared_blocks
    return one, used / run.end, int(run.iterations.kv_blocks.max())


@pytest.mark.parametrize("prefix", [0, 250, 300])
def test_blocks_in_use_are_those_of_the_simulation(prefix: int) -> None:
    """300 of the shortest prompt's 300 tokens are cached but for the last one."""
    one, mean, _ = held(ASKED, kv_blocks=4000, prefix_tokens=prefix)
    assert watch(ASKED, one, ARRIVAL, 25).kv_use == pytest.approx(mean / 4000, rel=1e-9)


def test_blocks_that_are_taken_one_by_one_are_half_of_the_answers() -> None:
    one, mean, _ = held(ASKED, kv_blocks=4000, prefix_tokens=250, admission="MAX_UTILIZATION")
    assert watch(ASKED, one, ARRIVAL, 25).kv_use == pytest.approx(mean / 4000, rel=0.03)


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
