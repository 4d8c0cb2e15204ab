"""Paired statistics, each expected number worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from eval.paired import Paired, above_chance, compare_pair, mcnemar_exact
from pipelines.domain.errors import UserError
from tests.conftest import REFERENCE


@pytest.mark.parametrize(
    ("lost", "gained", "expected"),
    [
        (0, 0, 1.0),  # nothing changed
        (5, 0, 0.0625),  # 2 * C(5,0) / 2^5 = 2/32
        (6, 0, 0.03125),  # 2 * 1 / 2^6
        (0, 6, 0.03125),  # the same seen from the other side
        (8, 1, 0.0390625),  # 2 * (C(9,0) + C(9,1)) / 2^9 = 2 * 10 / 512
        (7, 3, 0.34375),  # 2 * (1 + 10 + 45 + 120) / 1024 = 352/1024
        (4, 4, 1.0),  # 2 * (1+8+28+56+70) / 256 = 1.27, at most 1
    ],
)
def test_mcnemar_exact(lost: int, gained: int, expected: float) -> None:
    """The exact binomial tail, two-sided."""
    assert mcnemar_exact(lost, gained) == expected


def test_mcnemar_of_a_full_mmlu() -> None:
    """Thousands of changed questions neither overflow nor take long.

    2,100 lost, 1,900 gained: z = (200 - 1) / sqrt(4000) = 3.1465, two-sided p = 0.00165.
    """
    assert mcnemar_exact(2100, 1900) == pytest.approx(0.00165, abs=2e-5)


def test_loss_with_standard_error(result) -> None:
    """20 questions, 6 of 12 right ones lost.

    difference = -6/20 = -0.3; sum of squares 6; variance (6 - 20 * 0.09) / 19 = 0.2210526;
    stderr = sqrt(0.2210526 / 20) = 0.1051315; interval -0.3 -+ 1.959964 * 0.1051315.
    """
    pair = compare_pair(result([1] * 12 + [0] * 8), result([0] * 6 + [1] * 6 + [0] * 8, qformat="fp8"))
    assert (pair.questions, pair.lost, pair.gained, pair.flips) == (20, 6, 0, 6)
    assert (pair.baseline_accuracy, pair.accuracy) == (0.6, 0.3)
    assert pair.difference == -0.3
    assert pair.stderr == pytest.approx(0.1051315, abs=1e-7)
    assert pair.interval == pytest.approx((-0.5060540, -0.0939460), abs=1e-6)
    assert pair.loss_percent == pytest.approx(50.0)  # 0.3 of 0.6
    assert pair.verdict == "loses accuracy"  # p = 0.03125


def test_five_lost_of_ten_decides_nothing(result) -> None:
    """A p-value of 0.0625 is not below 0.05, but accuracy fell from 1 to 0.5: that is not "no loss"."""
    pair = compare_pair(result([1] * 10), result([0] * 5 + [1] * 5))
    assert (pair.p_value, pair.verdict) == (0.0625, "not decided")


@pytest.mark.parametrize(
    ("questions", "lost", "gained", "verdict"),
    [
        (1000, 2, 2, "no measurable loss"),  # interval 0 -+ 1.96 * 0.002: a loss of 0.4 points at most
        (1000, 30, 20, "not decided"),  # -1 point, interval to -2.4: p is 0.2
        (301, 0, 0, "no measurable loss"),  # 3 / 301 < 0.01
        (300, 0, 0, "not decided"),
        (1, 0, 0, "not decided"),  # no interval at all
    ],
)
def test_no_measurable_loss_needs_a_loss_of_one_point_excluded(result, questions, lost, gained, verdict) -> None:
    same = questions - lost - gained
    before = result([1] * lost + [0] * gained + [1] * same)
    after = result([0] * lost + [1] * gained + [1] * same)
    assert compare_pair(before, after).verdict == verdict


def test_gain(result) -> None:
    """6 gained of 10: p = 0.03125, and a negative loss of 6/4 = 150 %."""
    pair = compare_pair(result([1] * 4 + [0] * 6), result([1] * 10))
    assert pair.verdict == "gains"
    assert pair.loss_percent == pytest.approx(-150.0)


def test_same_answers(result) -> None:
    """No change: no loss, no spread, p = 1."""
    pair = compare_pair(result([1, 0, 1, 0]), result([1, 0, 1, 0]))
    assert (pair.difference, pair.stderr, pair.p_value, pair.loss_percent) == (0.0, 0.0, 1.0, 0.0)


def test_baseline_of_zero_has_no_percent(result) -> None:
    """Nothing right before: a percentage of it does not exist, and is not 0."""
    assert compare_pair(result([0, 0]), result([1, 0])).loss_percent is None


def test_one_question_has_no_interval(result) -> None:
    """A single question gives no spread; "no value" is not 0."""
    pair = compare_pair(result([1, 1]), result([1, 0]))
    assert pair.stderr == pytest.approx(math.sqrt(0.5 / 2))  # two: sum (x + 0.5)^2 = 0.5, / 1, / 2
    lone = result([1])
    assert compare_pair(lone, lone).interval is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_fewshot": 0}, "num_fewshot is 5 and 0"),
        ({"task": "mmlu"}, "task is 'mini_mmlu' and 'mmlu'"),
        ({"prompts_sha256": "cd"}, "prompts_sha256 is 'abab.*' and 'cd'"),
    ],
)
def test_other_questions_are_refused(result, changes, said) -> None:
    """Pairing different questions would be a number without meaning."""
    with pytest.raises(UserError, match=said):
        compare_pair(result([1, 0]), result([1, 0], qformat="fp8", **changes))


@pytest.mark.parametrize(("right", "expected"), [(33, True), (32, False), (25, False)])
def test_above_chance(result, right: int, expected: bool) -> None:
    """100 questions, four choices: 0.25 + 1.644854 * sqrt(0.25 * 0.75 / 100) = 0.32122 must be exceeded.

    33 of 100 does. For 32, 0.32 is below 0.32122.
    """
    assert above_chance(result([1] * right + [0] * (100 - right))) is expected


SEED = json.loads((REFERENCE / "seed_cases.json").read_text())


@pytest.mark.parametrize("model", SEED["mmlu"])
def test_published_losses_are_percent_of_the_baseline(model):
    """Falcon-180B: 70.4 to 68.6 is a loss of 2.56 %; over 1,000 questions a tenth of a percent is one of them."""
    base = SEED["mmlu"][model]["base"]
    for name, loss in SEED["mmlu_loss_pct"][model].items():
        after = SEED["mmlu"][model][name]
        lost = round(10 * (base - after))
        pair = Paired(1000, base / 100, after / 100, lost, 0, lost, (after - base) / 100, None, 1.0)
        assert round(pair.loss_percent, 2) == loss
