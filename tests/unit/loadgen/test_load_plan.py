"""What a level asks, and when."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.loadgen.plan import LevelPlan, PlannedLevel, PlannedRequest, loads
from pipelines.loadgen.prompts import PromptMaker
from tests.support.load_settings import TINY_LLAMA, benchmark, workload

S = 1_000_000_000


@pytest.fixture(scope="module")
def maker() -> PromptMaker:
    return PromptMaker(TINY_LLAMA)


def plan(maker: PromptMaker, work: dict[str, Any], rate: float | None = None, **how: Any) -> LevelPlan:
    settings = workload(isl=20, osl=5, **work)
    return LevelPlan(PlannedLevel(1, settings.arrival, None, rate), settings, benchmark(**how), maker)


def test_levels_follow_the_arrival() -> None:
    """Concurrency for a closed loop, its default included; rates for an open one; a burst is one level."""
    assert [load.concurrency for load in loads(workload(), benchmark())] == [1, 8, 32]
    assert [load.number for load in loads(workload(), benchmark(concurrency=[8, 9]))] == [1, 2]
    open_loop = loads(workload(arrival="poisson"), benchmark(request_rate=[2, 4]))
    assert [load.request_rate for load in open_loop] == [2, 4]
    assert loads(workload(arrival="burst"), benchmark(num_requests=9)) == [PlannedLevel(1, "burst", None, None)]


def test_a_steady_schedule_covers_warm_up_and_window(maker: PromptMaker) -> None:
    """10 per second, 1 s of warm-up, 2 s of window: due at 0.1, 0.2, ... 2.9 s; the window is [1 s, 3 s)."""
    made = plan(maker, {"arrival": "constant"}, 10, warmup_s=1, duration_s=2)
    times = [due for due, _ in made.schedule()]
    assert times == [k * S // 10 for k in range(1, 30)]
    assert made.window_ns(times) == (1 * S, 3 * S)


def test_the_number_of_requests_ends_the_window_sooner(maker: PromptMaker) -> None:
    """15 from 1.0 s on: the last is due at 2.4 s, and the window ends there."""
    made = plan(maker, {"arrival": "constant"}, 10, warmup_s=1, duration_s=2, num_requests=15)
    times = [due for due, _ in made.schedule()]
    assert times[-1] == 24 * S // 10
    assert made.window_ns(times) == (S, 24 * S // 10 + 1)


def test_a_slow_rate_still_sends_the_least_number(maker: PromptMaker) -> None:
    """1 per second for 2 s is 2 requests; min_requests=6 goes on until the sixth at 6 s."""
    made = plan(maker, {"arrival": "constant"}, 1, warmup_s=0.5, duration_s=2, min_requests=6)
    times = [due for due, _ in made.schedule()]
    assert times == [k * S for k in range(1, 7)]
    assert made.window_ns(times) == (S // 2, 6 * S + 1)


@pytest.mark.parametrize(("rate", "seconds"), [(50, 6), (10, 10), (4, 12)])
def test_an_open_window_is_as_long_as_its_requests_need(maker: PromptMaker, rate: float, seconds: float) -> None:
    """With duration_s=auto: 100 requests, but no less than 6 s and no more than 12."""
    made = plan(maker, {"arrival": "constant"}, rate, warmup_s=1)
    begin, end = made.window_ns([due for due, _ in made.schedule()])
    assert (end - begin) / S == pytest.approx(seconds)


def test_a_burst_is_due_at_once(maker: PromptMaker) -> None:
    """All of it at zero, every prompt its own."""
    schedule = plan(maker, {"arrival": "burst"}, num_requests=7).schedule()
    assert [due for due, _ in schedule] == [0] * 7
    assert len({ask.text for _, ask in schedule}) == 7


def test_turns_carry_all_before_them(maker: PromptMaker) -> None:
    """Turn k asks 20 new tokens on top of 20 + 5 per turn before: 20, 45, 70."""
    for conversation in plan(maker, {"turns": 3}).pool(6):
        assert [ask.isl for ask in conversation] == [20, 45, 70]
        assert [maker.count(ask.text) for ask in conversation] == [20, 45, 70]
        assert conversation[2].text.startswith(conversation[1].text)


def test_an_open_loop_goes_on_with_conversations_in_turn(maker: PromptMaker) -> None:
    """First turns of up to sixteen conversations, then their second turns."""
    schedule = plan(maker, {"turns": 2, "arrival": "burst"}, num_requests=6).schedule()
    assert [ask.isl for _, ask in schedule] == [20, 20, 20, 45, 45, 45]


def test_the_same_settings_ask_the_same_and_other_levels_other_prompts(maker: PromptMaker) -> None:
    """Comparable between formats; no KV reuse from level to level."""
    work, how = workload(isl=20), benchmark()
    first, again, second = (LevelPlan(PlannedLevel(n, "closed", 1, None), work, how, maker).pool(9) for n in (1, 1, 2))
    assert first == again
    assert not {ask.text for (ask,) in first} & {ask.text for (ask,) in second}


def test_no_prompt_of_an_earlier_run_is_sent_again(maker: PromptMaker) -> None:
    """Lengths stay, words do not: the server's KV cache knows none of them, unless a common prefix is wanted."""
    work, how, load = (
        workload(isl={"distribution": "uniform", "min": 8, "max": 40}),
        benchmark(),
        PlannedLevel(1, "closed", 1, None),
    )
    one, other = (LevelPlan(load, work, how, maker, nonce=nonce).pool(20) for nonce in "ab")
    assert [ask.isl for (ask,) in one] == [ask.isl for (ask,) in other]
    assert not {ask.text for (ask,) in one} & {ask.text for (ask,) in other}


def test_a_mix_has_each_part_by_its_share(maker: PromptMaker) -> None:
    """A fifth are long with short answers; the turns of a conversation are of one part."""
    work = workload(isl=10, osl=30, turns=2, mix=[{"share": 0.2, "isl": 50, "osl": 4}])
    pool = LevelPlan(PlannedLevel(1, "closed", 1, None), work, benchmark(), maker).pool(2000)
    kinds = [tuple((ask.isl, ask.osl) for ask in conversation) for conversation in pool]
    assert set(kinds) == {((10, 30), (50, 30)), ((50, 4), (104, 4))}
    assert 150 < kinds.count(((50, 4), (104, 4))) < 250
    assert (work.expected("isl"), work.longest("isl"), work.longest("osl")) == (pytest.approx(18), 50, 30)


@pytest.mark.parametrize("share", [0, 0.5])
def test_a_prompt_that_is_sent_again_has_another_word(maker: PromptMaker, share: float) -> None:
    """Behind the common prefix, and at the same length; later turns go on to begin with the earlier ones."""
    work = workload(isl=20, osl=4, turns=2, shared_prefix_share=share)
    load = PlannedLevel(1, "closed", 1, None)
    pool = LevelPlan(load, work, benchmark(), maker).pool(40)
    for times in (1, 2, 3):
        for conversation in pool:
            first, second = (request.renewed(maker.words, times) for request in conversation)
            assert first.text != conversation[0].text
            assert (maker.count(first.text), maker.count(second.text)) == (first.isl, second.isl)
            assert second.text.startswith(first.text)
            common = conversation[0].text.split(" ")[: round(share * 20)]
            assert first.text.split(" ")[: len(common)] == common
    texts = {pool[0][0].renewed(maker.words, times).text for times in range(50)}
    assert len(texts) == 50


def test_a_trace_asks_its_own_prompts(maker: PromptMaker, tmp_path: Path) -> None:
    """Given text stays as it is, counted by the tokenizer; given lengths are made."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "prompt": "hello there", "osl": 3}\n{"time": 2, "isl": 11, "osl": 4}\n')
    schedule = plan(maker, {"arrival": "trace", "trace": path}).schedule()
    assert schedule[0] == (0, PlannedRequest("hello there", maker.count("hello there"), 3))
    assert (schedule[1][0], schedule[1][1].isl, maker.count(schedule[1][1].text)) == (2 * S, 11, 11)
