"""A series against its own noise: what is a change, what is not, and since when."""

from pipelines.nightly.verdict import SHIFT_NIGHTS, ChangeRule, quantile, replay

RATE = ChangeRule(higher_is_better=True, floor=0.05, chance=0.001, window=20)
LATENCY = ChangeRule(higher_is_better=False, floor=0.05, chance=0.001, window=20)
QUIET = [1000.0, 1004.0, 998.0, 1001.0, 999.0, 1002.0, 997.0, 1000.0]


def states(values, rule=RATE, restarts=frozenset()):
    return [judged.state for judged in replay(values, rule, restarts)]


def test_too_few_nights_say_nothing():
    assert states([1000, 500, 1000, 2000]) == ["learning"] * 4


def test_the_same_again_is_level():
    assert states(QUIET)[4:] == ["level"] * 4


def test_a_quiet_series_is_worse_beyond_the_floor_alone():
    assert states([*QUIET, 952.5])[-1] == "level"  # 5 % floor: 1000 / 1.05 = 952.4
    assert states([*QUIET, 951.0])[-1] == "worse"


def test_latency_is_worse_when_it_rises():
    assert states([*QUIET, 1060.0], LATENCY)[-1] == "worse"
    assert states([*QUIET, 940.0], LATENCY)[-1] == "better"


def test_noise_widens_the_limit():
    noisy = [1000.0, 900.0, 1100.0, 950.0, 1050.0, 980.0, 1020.0, 1000.0]
    assert states([*noisy, 850.0])[-1] == "level"


def test_a_regression_stays_one_until_it_is_repaired():
    found = replay([*QUIET, *[900.0] * 30, 1000.0], RATE)
    assert {judged.state for judged in found[8:38]} == {"worse"}
    assert {judged.since for judged in found[8:38]} == {8}
    assert found[38].state == "level"


def test_a_single_slow_night_is_no_shift():
    values = [*QUIET, 700.0, *QUIET]
    assert states(values)[8] == "worse"  # that night itself, which was measured three times
    assert states(values)[9:] == ["level"] * 8


def test_a_shift_smaller_than_a_nights_noise_is_found_after_some_nights():
    noisy = [1000.0, 960.0, 1040.0, 970.0, 1030.0, 985.0, 1015.0, 1000.0] * 2
    slower = [0.92 * value for value in (1000.0, 990.0, 1010.0, 1000.0)]
    found = replay([*noisy, *slower], ChangeRule(True, 0.05, 0.001, 20))
    assert [judged.state for judged in found[16:19]] == ["level"] * 3
    assert (found[19].state, found[19].since) == ("worse", 16)


def test_losing_a_lasting_gain_is_a_regression():
    values = [*QUIET, *[1200.0, 1203.0, 1198.0, 1201.0, 1199.0]]
    assert states([*values, 1000.0])[-1] == "worse"
    assert states([*QUIET, 1200.0, 1000.0])[-1] == "level"  # one good night is no new level


def test_an_accepted_level_starts_anew():
    values = [*QUIET, *[900.0, 902.0, 899.0, 901.0, 900.0]]
    assert states(values)[-1] == "worse"
    assert states(values, restarts=frozenset({8}))[8:] == ["learning"] * 4 + ["level"]


def test_nights_without_a_value_are_left_out():
    assert states([*QUIET, None, 0.0, 1000.0])[-3:] == ["no value", "no value", "level"]


def test_the_limit_is_the_value_that_counts():
    judged = replay([*QUIET, 1000.0], RATE)[-1]
    assert round(judged.before, 1) == 1000.0  # median of 997, 998, 999, 1000, 1000, 1001, 1002, 1004
    assert round(judged.limit, 2) == 952.38


def test_quantiles_are_students():
    """Table of Student's t: one-sided 0.001, 13 degrees of freedom: 3.852."""
    assert round(quantile(13, 0.001), 3) == 3.852
    assert SHIFT_NIGHTS == 4
