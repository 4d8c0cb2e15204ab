"""The nightly's judgement under noise: false alarms, what it finds and when, and what it must not depend on."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.nightly.verdict import ChangeRule, replay

pytestmark = pytest.mark.thorough

RATE = ChangeRule(higher_is_better=True, floor=0.05, chance=0.05 / 200, window=20)
"""As in a run of 100 series with two questions each."""

positive = st.floats(min_value=1e-3, max_value=1e6)


def rates(rng, noise, nights, shift=0.0, after=0):
    """Nights with normal noise of the logarithm, then `after` more that are slower by `shift`."""
    factors = [1.0] * nights + [1 - shift] * after
    return [1000 * factor * math.exp(rng.gauss(0, noise)) for factor in factors]


def found_after(noise, shift, chance=RATE.chance, trials=200):
    """Share of trials in which a shift is found on the first night, and within four."""
    rng = random.Random(7)
    rule = ChangeRule(True, RATE.floor, chance, 20)
    first = four = 0
    for _ in range(trials):
        worse = [judged.state == "worse" for judged in replay(rates(rng, noise, 24, shift, 4), rule)[24:]]
        first += worse[0]
        four += any(worse)
    return first / trials, four / trials


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
def test_an_unchanged_system_is_called_worse_as_rarely_as_promised(noise):
    """Two questions a night, each with a chance of 1 %, over 100 series of 30 nights: standard error 0.3 %."""
    rng = random.Random(3)
    rule = ChangeRule(True, 0.0001, 0.01, 20)
    judged = [night.state for _ in range(100) for night in replay(rates(rng, noise, 30), rule)]
    nights = sum(state != "learning" for state in judged)
    assert judged.count("worse") / nights <= 2 * 0.01 + 2 * 0.003


def test_all_series_of_a_run_together_keep_the_promise():
    """40 series, false_alarms 0.2, so each of 80 questions has a chance of 0.25 %: 150 runs, standard error 3.3 %."""
    rng = random.Random(5)
    rule = ChangeRule(False, 0.0001, 0.2 / 80, 20)
    alarms = sum(any(replay(rates(rng, 0.03, 20), rule)[-1].state == "worse" for _ in range(40)) for _ in range(150))
    assert alarms / 150 <= 0.2 + 2 * 0.033


@pytest.mark.parametrize(
    ("noise", "shift", "first", "four"),
    [
        (0.01, 0.10, 0.99, 1.0),
        (0.02, 0.10, 0.6, 0.95),
        (0.02, 0.20, 0.99, 1.0),
        (0.05, 0.20, 0.4, 0.95),
        (0.05, 0.10, 0.0, 0.15),  # two nights' noise: four nights are not enough, and nobody is told otherwise
    ],
)
def test_shifts_are_found(noise, shift, first, four):
    at_once, soon = found_after(noise, shift)
    assert at_once >= first
    assert soon >= four


def test_a_change_below_the_floor_is_never_a_regression():
    rng = random.Random(1)
    values = rates(rng, 0.001, 20, 0.04, 20)
    assert "worse" not in {judged.state for judged in replay(values, RATE)}


def test_a_slow_measurement_is_told_from_a_slow_night_by_measuring_again():
    """One in ten measurements is 40 % slow for a reason of its own; of up to three the median counts."""

    def measure(rng):
        return 1000 * math.exp(rng.gauss(0, 0.01)) * (0.6 if rng.random() < 0.1 else 1)

    alarms = {0: 0, 2: 0}
    for confirmations in alarms:
        rng = random.Random(11)
        for _ in range(400):
            before = rates(rng, 0.01, 15)
            taken = [measure(rng)]
            while (
                replay([*before, statistics.median(taken)], RATE)[-1].state == "worse" and len(taken) <= confirmations
            ):
                taken.append(measure(rng))
            alarms[confirmations] += replay([*before, statistics.median(taken)], RATE)[-1].state == "worse"
    assert 0.06 < alarms[0] / 400 < 0.14
    assert alarms[2] < alarms[0] / 3


@settings(max_examples=50)
@given(value=positive, nights=st.integers(5, 30), higher=st.booleans())
def test_the_very_same_value_is_always_level(value, nights, higher):
    rule = ChangeRule(higher, 0.0, 0.001, 20)
    assert {judged.state for judged in replay([value] * nights, rule)[4:]} == {"level"}


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6), power=st.integers(-20, 20))
def test_units_do_not_matter(seed, power):
    """Milliseconds or seconds: the verdict is the same (a power of two scales without rounding)."""
    values = rates(random.Random(seed), 0.05, 15, 0.2, 3)
    scaled = [value * 2.0**power for value in values]
    assert [j.state for j in replay(values, RATE)] == [j.state for j in replay(scaled, RATE)]


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_a_rate_and_its_time_are_judged_alike(seed):
    values = rates(random.Random(seed), 0.05, 15, 0.2, 3)
    times = [1 / value for value in values]
    other = ChangeRule(False, RATE.floor, RATE.chance, RATE.window)
    assert [j.state for j in replay(values, RATE)] == [j.state for j in replay(times, other)]


@settings(max_examples=50)
@given(values=st.lists(st.one_of(st.none(), st.just(0.0), positive), max_size=40), restart=st.integers(0, 39))
def test_any_series_gets_one_verdict_per_night_that_later_nights_do_not_change(values, restart):
    restarts = frozenset({restart})
    found = replay(values, RATE, restarts)
    assert len(found) == len(values)
    for length in range(len(values)):
        assert replay(values[:length], RATE, restarts) == found[:length]
    for night, judged in enumerate(found):
        assert (judged.since is not None) == (judged.state == "worse")
        assert judged.since is None or judged.since <= night
