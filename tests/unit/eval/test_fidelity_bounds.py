"""The bound from a few known probabilities is never above the divergence, and equals it where all are known."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from scipy.special import log_softmax, rel_entr

from eval.fidelity.bounds import BoundFigures, BoundsResult, KnownTokens, TextBounds, bound_logits, measure_served
from eval.fidelity.divergence import compare_logits
from eval.fidelity.fidelity_text import at_least, bounds_table
from eval.fidelity.measure import Side, Windows
from pipelines.document.blocks import render_text
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress

LOGITS = st.floats(-30, 30, width=32)
PAIRS = st.integers(2, 12).flatmap(
    lambda size: st.tuples(
        arrays(np.float64, (3, size), elements=LOGITS),
        arrays(np.float64, (3, size), elements=LOGITS),
        arrays(np.int64, (3,), elements=st.integers(0, size - 1)),
        st.integers(1, size),
    )
)


def known(other, targets, k):
    logprobs = log_softmax(other, axis=1)
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    each = np.arange(len(targets))
    return KnownTokens(ids, np.take_along_axis(logprobs, ids, axis=1), targets, logprobs[each, targets])


@settings(max_examples=300)
@given(PAIRS)
def test_the_bound_is_never_above_the_divergence(drawn):
    reference, other, targets, k = drawn
    exact = compare_logits(reference, other, targets)
    for rounding in (1e-9, 1e-5):
        found = bound_logits(reference, known(other, targets, k), rounding)
        assert (found.kl_at_least <= exact.kl + 1e-10 * (1 + exact.kl)).all()
        assert (found.kl_at_least >= 0).all()
        assert found.reference_nll == pytest.approx(exact.reference_nll)
        assert found.other_nll == pytest.approx(exact.other_nll)
        if k == reference.shape[1]:
            assert found.kl_at_least == pytest.approx(exact.kl, rel=1e-9, abs=1e-9 + rounding)
            assert found.known_mass == pytest.approx(1)


@settings(max_examples=100)
@given(PAIRS, st.integers(0, 2**32 - 1))
def test_it_holds_for_log_probabilities_that_were_rounded(drawn, seed):
    reference, other, targets, k = drawn
    said = known(other, targets, k)
    errors = np.random.default_rng(seed).uniform(-9e-6, 9e-6, said.logprobs.shape)
    rounded = KnownTokens(said.ids, said.logprobs + errors, said.targets, said.target_logprobs + 9e-6)
    exact = compare_logits(reference, other, targets)
    assert (bound_logits(reference, rounded).kl_at_least <= exact.kl + 1e-9 * (1 + exact.kl)).all()


@pytest.mark.parametrize("seed", range(5))
def test_no_other_distribution_that_agrees_is_nearer(seed):
    """SciPy's constrained minimum over the unknown probabilities is the bound: it cannot be made tighter."""
    dice = np.random.default_rng(seed)
    reference, other = dice.normal(0, 3, (1, 9)), dice.normal(0, 1, (1, 9))
    said = known(other, np.array([int(other.argmax())]), 3)
    p = np.exp(log_softmax(reference, axis=1))[0]
    q = np.exp(said.logprobs[0])
    unknown = np.setdiff1d(np.arange(9), said.ids[0])
    rest = 1 - q.sum()
    found = minimize(
        lambda x: rel_entr(p[unknown], x).sum(),
        np.full(6, rest / 6),
        bounds=[(1e-12, q.min())] * 6,
        constraints={"type": "eq", "fun": lambda x: x.sum() - rest},
        options={"maxiter": 1000, "ftol": 1e-13},
    )
    least = rel_entr(p[said.ids[0]], q).sum() + found.fun
    assert bound_logits(reference, said, rounding=0.0).kl_at_least[0] == pytest.approx(least, abs=1e-6)


def test_a_token_that_was_not_returned_may_have_any_probability():
    """Two servers with the same top 2: the divergences differ a thousandfold, and the bound is that of the nearer."""
    p = np.log([[0.5, 0.3, 0.1, 0.1]])
    near, far = np.log([[0.5, 0.3, 0.1, 0.1]]), np.log([[0.5, 0.3, 0.2 - 1e-30, 1e-30]])
    targets = np.array([0])
    bounds = [bound_logits(p, known(q, targets, 2), rounding=0.0).kl_at_least[0] for q in (near, far)]
    assert bounds == pytest.approx([0, 0], abs=1e-12)
    assert compare_logits(p, far, targets).kl[0] > 6


def test_likelier_unknown_tokens_are_held_at_the_least_likely_returned_one():
    """P expects token 3, which the server did not return among its 2 likeliest, of which the second has 0.1."""
    p, q = np.log([[0.05, 0.05, 0.05, 0.85]]), np.log([[0.75, 0.1, 0.08, 0.07]])
    found = bound_logits(p, known(q, np.array([0]), 2), rounding=0.0)
    by_hand = 0.05 * np.log(0.05 / 0.75) + 0.05 * np.log(0.5) + 0.85 * np.log(8.5) + 0.05 * np.log(0.05 / 0.05)
    assert found.kl_at_least[0] == pytest.approx(by_hand)
    assert found.kl_at_least[0] < compare_logits(p, q, np.array([0])).kl[0]
    assert not found.same_top[0]


def test_figures():
    dice = np.random.default_rng(0)
    reference, other = dice.normal(0, 2, (50, 30)), dice.normal(0, 2, (50, 30))
    targets = dice.integers(0, 30, 50)
    exact = compare_logits(reference, other, targets)
    figures = BoundFigures.of(bound_logits(reference, known(other, targets, 5)))
    assert 0 < figures.kl_mean_at_least < exact.kl.mean()
    assert figures.kl_max_at_least <= exact.kl.max()
    assert figures.top1_agreement == exact.same_top.mean()
    assert figures.perplexity_ratio == pytest.approx(np.exp((exact.other_nll - exact.reference_nll).mean()))


FIGURES = BoundFigures(4_000, 0.00199, 0.0, 0.039, 1.59, 0.9712, 0.97, 4.0, 4.2)
RESULT = BoundsResult(
    "tiny", "http://h/v1", "served", "f32", 512, 1920, 20, 1e-5, FIGURES, (TextBounds("bundled", FIGURES),)
)


def test_a_bound_is_shown_as_one_and_rounded_down():
    text = render_text([bounds_table(RESULT)])
    row = next(line for line in text.splitlines() if line.startswith("bundled"))
    assert row.split() == ["bundled", "4,000", ">=", "0.0019", ">=", "0", ">=", "0.039", ">=", "1.5", "97.00", "1.0500"]
    flat = " ".join(text.split())
    assert "served at http://h/v1 beside those of tiny in 16 bit, windows of 512 tokens, arithmetic f32" in flat
    assert "probabilities of 20 of 1,920 tokens, which hold 97.12 % of the 16-bit model's probability" in flat
    assert "There is no upper bound" in flat
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("value", [1e-9, 0.000123, 0.00199, 0.0999, 0.1, 0.3, 0.7, 1.0, 1.99, 9.99, 12.9, 129.0])
def test_what_is_shown_is_never_above_the_bound(value):
    shown = float(at_least(value).removeprefix(">= "))
    assert 0.9 * value <= shown <= value * (1 + 1e-12)


def test_a_result_is_kept(tmp_path):
    RESULT.save(tmp_path / "bounds.json")
    kept = json.loads((tmp_path / "bounds.json").read_text())
    assert BoundsResult.from_json(kept, "bounds.json") == RESULT
    assert "kl_mean" not in kept["overall"]
    with pytest.raises(UserError, match=r"bounds\.json is not a result of fidelity bounds: .*window"):
        BoundsResult.from_json({name: value for name, value in kept.items() if name != "window"}, "bounds.json")


@pytest.mark.parametrize(
    ("ids", "logprobs", "own", "said"),
    [
        ([[1, 99]], [[-1.0, -2.0]], [-1.0], "returned token 99, and tiny has 10: it serves another model"),
        ([[1, 2]], [[-0.1, -0.2]], [-0.1], r"add up to 1\.7235\d\d, so they are not of one distribution"),
        ([[2, 3]], [[-0.5, -1.0]], [-0.5], r"add up to 1\.58"),  # with the text's own token
    ],
)
def test_what_cannot_be_of_this_model_is_refused(ids, logprobs, own, said):
    server = SimpleNamespace(top_logprobs=lambda *_: [{"ids": ids, "logprobs": logprobs, "own": own}])
    side = Side("tiny", SimpleNamespace(vocabulary=10))
    text = Windows("user", ((0, 1),), unseen=True)
    with pytest.raises(UserError, match=said):
        measure_served(side, server, [text], 2, SilentProgress())
    with pytest.raises(UserError, match="top_logprobs=11 is more than tiny has tokens: 10"):
        measure_served(side, server, [text], 11, SilentProgress())
