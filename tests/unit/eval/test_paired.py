"""Paired statistics, each expected number worked out by hand."""

import json

import pytest
from scipy.stats import binomtest

from eval.exact import OUTSIDE, Answered, Changed, Evidence, _possible_gains
from eval.results import Paired, above_chance, compare_pair, mcnemar_exact
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


def test_loss(result) -> None:
    """20 questions, 6 of 12 right ones lost: -6/20, which is half of the baseline's accuracy."""
    pair = compare_pair(result([1] * 12 + [0] * 8), result([0] * 6 + [1] * 6 + [0] * 8, qformat="fp8"))
    assert (pair.questions, pair.lost, pair.gained, pair.flips) == (20, 6, 0, 6)
    assert (pair.baseline_accuracy, pair.accuracy) == (0.6, 0.3)
    assert pair.difference == -0.3
    assert pair.loss_percent == pytest.approx(50.0)  # 0.3 of 0.6
    assert pair.evidence == Evidence.once(Changed(20, 6, 0), Answered(12, ((0.25, 20),)))


def test_gain(result) -> None:
    """6 gained of 10: a negative loss of 6/4 = 150 %."""
    assert compare_pair(result([1] * 4 + [0] * 6), result([1] * 10)).loss_percent == pytest.approx(-150.0)


def test_same_answers(result) -> None:
    """No change: no loss."""
    pair = compare_pair(result([1, 0, 1, 0]), result([1, 0, 1, 0]))
    assert (pair.difference, pair.flips, pair.loss_percent) == (0.0, 0, 0.0)


def test_baseline_of_zero_has_no_percent(result) -> None:
    """Nothing right before: a percentage of it does not exist, and is not 0."""
    assert compare_pair(result([0, 0]), result([1, 0])).loss_percent is None


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
        once = Evidence.once(Changed(1000, lost, 0))
        pair = Paired(1000, base / 100, after / 100, lost, 0, lost, (after - base) / 100, once)
        assert round(pair.loss_percent, 2) == loss


@pytest.mark.parametrize(("gained", "questions"), [(0, 100), (3, 100), (40, 513), (1, 57)])
def test_rates_of_gains_span_scipys_exact_interval(gained: int, questions: int) -> None:
    """Clopper-Pearson, as scipy.stats computes it."""
    rates = _possible_gains(Changed(questions=questions, lost=0, gained=gained), 0.0)
    low, high = binomtest(gained, questions).proportion_ci(1 - OUTSIDE, method="exact")
    assert (rates[0], rates[-1]) == pytest.approx((low, min(high, 0.5)), rel=1e-6, abs=1e-12)
