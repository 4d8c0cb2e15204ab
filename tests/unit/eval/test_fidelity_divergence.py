"""KL divergence, agreement and perplexity against SciPy, and against sums worked out by hand."""

import math

import numpy as np
import pytest
from scipy.special import kl_div, log_softmax, softmax

from eval.fidelity.divergence import Figures, Positions, compare_logits

VOCABULARY = 256_000


def expected(reference, other):
    """KL per position in float64, as SciPy computes it."""
    p, q = (softmax(each.astype(np.float64), axis=1) for each in (reference, other))
    return kl_div(p, q).sum(axis=1)


@pytest.mark.parametrize(("spread", "error"), [(1.0, 0.5), (4.0, 0.1), (8.0, 4.0), (3.0, 1e-3), (3.0, 1e-5)])
def test_kl_of_a_whole_vocabulary_is_scipys(spread, error):
    """From a divergence of several nats down to one of 1e-11, on a vocabulary of 256,000."""
    draw = np.random.default_rng(1)
    reference = draw.normal(0, spread, (3, VOCABULARY)).astype(np.float32)
    other = (reference + draw.normal(0, error, reference.shape)).astype(np.float32)
    targets = np.array([0, 7, VOCABULARY - 1])
    found = compare_logits(reference, other, targets)
    assert found.kl == pytest.approx(expected(reference, other), rel=1e-6)
    assert found.kl.min() > 0
    rows = np.arange(3)
    for nll, logits in ((found.reference_nll, reference), (found.other_nll, other)):
        assert nll == pytest.approx(-log_softmax(logits.astype(np.float64), axis=1)[rows, targets], rel=1e-12)
    assert found.same_top.tolist() == (reference.argmax(1) == other.argmax(1)).tolist()


def test_a_shift_of_all_logits_changes_nothing():
    """Softmax ignores it; float32 logits near 1,000 would overflow without subtracting the largest."""
    logits = np.random.default_rng(2).normal(0, 2, (4, 500)).astype(np.float32)
    found = compare_logits(logits, logits + np.float32(1024), np.zeros(4, dtype=int))
    assert found.kl.max() < 1e-7
    assert compare_logits(logits, logits, np.zeros(4, dtype=int)).kl.tolist() == [0.0] * 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("likelihood", [-2000.0, 0.0, 50.0])
def test_a_logit_that_is_not_finite_leaves_a_divergence_that_is_not(side, value, likelihood):
    """Also for a token so unlikely that its probability is 0 in float64."""
    sides = np.random.default_rng(4).normal(0, 1, (2, 3, 100)).astype(np.float32)
    sides[:, 1, 17] = likelihood
    sides[side, 1, 17] = value
    found = compare_logits(*sides, np.zeros(3, dtype=int))
    assert np.isfinite(found.kl).tolist() == [True, False, True]


def test_two_tokens_by_hand():
    """For p = (1/2, 1/2) and q = (1/4, 3/4): KL = ln 2 / 2 + ln(2/3) / 2."""
    p, q = np.log(np.array([[0.5, 0.5]])), np.log(np.array([[0.25, 0.75]]))
    found = compare_logits(p, q, np.array([0]))
    assert found.kl[0] == pytest.approx((math.log(2) + math.log(2 / 3)) / 2, rel=1e-12)
    assert (found.reference_nll[0], found.other_nll[0]) == pytest.approx((math.log(2), math.log(4)), rel=1e-12)


def test_blocks_of_rows_give_what_all_rows_give(monkeypatch):
    draw = np.random.default_rng(3)
    reference, other = draw.normal(0, 3, (2, 37, 64)).astype(np.float32)
    targets = draw.integers(0, 64, 37)
    whole = compare_logits(reference, other, targets)
    monkeypatch.setattr("eval.fidelity.divergence.VALUES_AT_ONCE", 5 * 64)
    assert compare_logits(reference, other, targets).kl.tolist() == whole.kl.tolist()


def figures(**given):
    usual = {"tokens": 4, "kl_mean": 0.1, "kl_median": 0.1, "kl_p99": 0.1, "kl_max": 0.1, "top1_agreement": 0.9}
    return Figures(**{**usual, "reference_perplexity": 4.0, "perplexity": 4.4, **given})


def test_figures_by_hand():
    nll = np.log(np.array([2.0, 8.0, 2.0, 8.0]))
    found = Figures.of(
        Positions(np.array([0.0, 0.1, 0.2, 0.5]), np.array([True, True, True, False]), nll, nll + math.log(1.5))
    )
    assert (found.tokens, found.top1_agreement) == (4, 0.75)
    assert (found.kl_mean, found.kl_median, found.kl_max) == pytest.approx((0.2, 0.15, 0.5))
    assert found.kl_p99 == pytest.approx(0.2 + 0.97 * 0.3)  # linear between the 3rd and the 4th: 0.99 * 3 = 2.97
    assert (found.reference_perplexity, found.perplexity_ratio) == pytest.approx((4.0, 1.5))


def test_only_what_is_no_worse_than_the_reference_itself_is_within_the_noise():
    noise = figures()
    assert figures().within(noise) == {
        *("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement", "perplexity_ratio")
    }
    worse = figures(kl_mean=0.2, kl_max=0.3, top1_agreement=0.89, perplexity=4.0 / 1.2)
    assert worse.within(noise) == {"kl_median", "kl_p99"}
