"""Log probabilities of rows of logits, and the likeliest tokens."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BLOCK = 64
"""Logits whose maximum is taken first, to find the likeliest tokens: sorting whole rows takes longer than the head."""
VALUES_AT_ONCE = 2**20
"""Values that are widened to float64 together, 8 MiB."""


def norms_of(logits: Array) -> Array:
    """Return the log normalizer of each row of logits [N, V], float64 [N]: subtract it to get log probabilities.

    256,000 terms are added; a few rows at a time, which bounds the memory.
    """
    norms = np.empty(len(logits))
    step = max(1, VALUES_AT_ONCE // logits.shape[1])
    for start in range(0, len(logits), step):
        wide = logits[start : start + step].astype(np.float64)
        top = wide.max(axis=1)
        norms[start : start + step] = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return norms


def likeliest(logits: Array, norms: Array, top: int) -> tuple[Array, Array]:
    """Return the `top` likeliest tokens of each row, int32 [N, top], and their log probabilities, float64 [N, top].

    The likeliest comes first; of equal ones, the lowest id.
    """
    size = logits.shape[1]
    top = min(top, size)
    # `top` blocks have a maximum of at least `floor`, so the likeliest tokens are not below it
    peaks = np.maximum.reduceat(logits, np.arange(0, size, BLOCK), axis=1)
    floors = np.partition(peaks, -top, axis=1)[:, -top] if top <= peaks.shape[1] else np.full(len(logits), -np.inf)
    tokens = np.empty((len(logits), top), dtype=np.int32)
    for row, floor, best in zip(logits, floors, tokens, strict=True):
        near = np.flatnonzero(row >= floor)
        near = near if len(near) >= top else np.arange(size)  # NaN
        best[:] = near[np.argsort(-row[near], kind="stable")[:top]]
    values = np.take_along_axis(logits, tokens.astype(np.int64), axis=1)
    return tokens, values.astype(np.float64) - norms[:, None]
