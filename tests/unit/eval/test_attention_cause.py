"""What a wrong attention is told to be, where the model's scale is the usual one and where it is not (Granite)."""

import pytest

np = pytest.importorskip("numpy")

from eval.diagnose.arithmetic import attend, attention_cause  # noqa: E402 - after the skip

Q, K, V = (np.random.default_rng(n).normal(size=(heads, 6, 8)).astype(np.float32) for n, heads in enumerate((4, 2, 2)))
USUAL, OWN = 8**-0.5, 0.015625


def test_a_usual_scale_that_is_missing() -> None:
    cause = attention_cause(attend(Q, K, V, 1.0), Q, K, V, USUAL, hidden=64)
    assert cause == "the attention scale is 1 (it is missing), not 1 / sqrt(head size)"


def test_a_models_own_scale_that_is_left_out() -> None:
    cause = attention_cause(attend(Q, K, V, USUAL), Q, K, V, OWN, hidden=64)
    assert cause == "the attention scale is 1 / sqrt(head size), not 0.01562"


def test_masks_are_tried_with_the_models_own_scale() -> None:
    cause = attention_cause(attend(Q, K, V, OWN, causal=False), Q, K, V, OWN, hidden=64)
    assert cause == "later tokens are not masked"


def test_a_window_that_is_not_applied() -> None:
    assert (
        attention_cause(attend(Q, K, V, USUAL), Q, K, V, USUAL, 64, window=3) == "the window of 3 tokens is not applied"
    )
    near = attend(Q[:, -1:], K[:, -3:], V[:, -3:], USUAL, causal=False)
    assert np.allclose(attend(Q, K, V, USUAL, window=3)[:, -1:], near, atol=1e-6)
