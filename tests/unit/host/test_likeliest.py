"""The likeliest tokens of rows of logits."""

import numpy as np

from pipelines.host.log_probs import likeliest, norms_of


def test_the_likeliest_tokens_are_those_of_a_sort() -> None:
    """With many equal logits, as bf16 gives them: of these, the lowest id."""
    logits = np.random.default_rng(0).normal(size=(50, 1000)).astype(np.float16).astype(np.float32).round(1)
    for top in (1, 3, 20, 999, 1000, 1001):
        tokens, found = likeliest(logits, norms_of(logits), top)
        np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=1, kind="stable")[:, :top])
        expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found, np.take_along_axis(expected, tokens.astype(np.int64), axis=1), atol=1e-5)


def test_rows_with_nan_have_as_many() -> None:
    logits = np.zeros((2, 200), np.float32)
    logits[1, 5] = np.nan
    tokens, found = likeliest(logits, norms_of(logits), 4)
    assert tokens.tolist()[0] == [0, 1, 2, 3]
    assert np.isnan(found[1]).all()
