"""Whether decoded weights are those they were made from, and if not, what was done to them.

Every format has an error of its own, so errors are judged by that of the best possible codes: the source weight,
quantized again here. What remains is explained by hypotheses: rows in another order, another tensor in its place, one
factor for all, scales of another tensor. The one under which the error vanishes is the probable cause.

Shapes: O output channels, I input channels, G groups of input channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.formats import (
    FP4_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AS_FP8_WEIGHTS,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    WeightKind,
)

Array = np.ndarray[Any, Any]

ROUNDED_ONCE = 2.0**-8
"""Relative error of a value that was rounded to bfloat16, twice."""
FACTOR_OF_ERROR = 1.6
"""The error may be so many times that of the best codes: exporters search scales, and share them among q, k and v."""
FACTOR_OF_ROW = 4.0
"""Likewise for the worst row."""
WRONG_GAIN = 0.012
"""Deviation from 1 of the factor between source and decoded weight."""
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
E2M1_BOUNDS = (E2M1[1:] + E2M1[:-1]) / 2
MANY_ROWS = 4096
"""Rows that are compared with every other row, at most; these suffice to recognize an order."""
EXPLAINED = 0.25
"""A hypothesis holds if it leaves this share of the error, or an error that is no longer suspicious."""


@dataclass(frozen=True, slots=True)
class WeightError:
    """How far a decoded weight is from its source.

    Attributes:
        error: relative error, Frobenius norm.
        expected: of the best codes of the format.
        row: largest relative error of a row over the expected one of all rows.
        gain: factor between the two (least squares), over that of the best codes.
    """

    error: float
    expected: float
    row: float
    gain: float

    @property
    def ratio(self) -> float:
        """The error in units of the largest that is not suspicious; above 1 it is."""
        allowed = FACTOR_OF_ERROR * self.expected + ROUNDED_ONCE
        return max(self.error / allowed, self.row / FACTOR_OF_ROW, abs(self.gain - 1) / WRONG_GAIN)

    @property
    def suspicious(self) -> bool:
        """Whether the format does not explain the error."""
        return not self.ratio <= 1


def compare(source: Array, decoded: Array, expected: Array) -> WeightError:
    """Compare weights [O, I].

    Args:
        source: what it was made from.
        decoded: as it is multiplied.
        expected: the source with the format's own error.
    """
    norms = np.linalg.norm(source, axis=1)
    total = float(np.linalg.norm(norms)) or 1.0
    norms = np.maximum(norms, total / len(norms) ** 0.5 * 1e-2)  # rows of (nearly) nothing have no error of their own
    wrong, usual = (np.linalg.norm(each - source, axis=1) for each in (decoded, expected))
    error, least = (float(np.linalg.norm(each)) / total for each in (wrong, usual))
    wide = source.astype(np.float64)
    gain = float((wide * decoded).sum()) / (float((wide * expected).sum()) or 1.0)
    base = max(float((usual / norms).max()), ROUNDED_ONCE)
    return WeightError(error, least, float((wrong / norms).max()) / base, gain)


def best_codes(source: Array, kind: WeightKind, group: int) -> Array:
    """Return the weight [O, I] as the format holds it at best: scales from the largest values, nearest codes."""
    source = source.astype(np.float32)
    if kind is FP8_WEIGHTS:
        scale = np.abs(source).max() / 448 or np.float32(1)
        return _e4m3(source / scale) * scale
    if kind is INT8_WEIGHTS:
        return _integers(source, np.abs(source).max(1, keepdims=True), 127)
    if kind in (INT4_WEIGHTS, INT4_AS_FP8_WEIGHTS, FP4_WEIGHTS):
        grouped = source.reshape(len(source), -1, group)
        largest = np.abs(grouped).max(2, keepdims=True)
        if kind is not FP4_WEIGHTS:
            return _integers(grouped, largest, 7).reshape(source.shape)
        whole = np.abs(source).max() / (6 * 448) or np.float32(1)
        scale = np.maximum(_e4m3(largest / 6 / whole) * whole, np.float32(1e-30))
        codes = E2M1[np.searchsorted(E2M1_BOUNDS, np.abs(grouped) / scale)]
        source = (np.copysign(codes, grouped) * scale).reshape(source.shape)
    return source


def _integers(values: Array, largest: Array, bound: int) -> Array:
    scale = np.where(largest > 0, largest, 1) / np.float32(bound)
    found: Array = np.clip(np.rint(values / scale), -bound - 1, bound) * scale
    return found


def _e4m3(values: Array) -> Array:
    found: Array = np.clip(values, -448, 448).astype(numpy_dtype("F8_E4M3")).astype(np.float32)
    return found


@dataclass(frozen=True, slots=True)
class Suspect:
    """A weight to explain.

    Attributes:
        source: what it should be [O, I].
        decoded: what it is [O, I].
        expected: the source with the format's own error.
        heads: number of heads among the rows; 0 if rows are not heads.
        columns_are_heads: whether the input channels are heads (of the output projection).
    """

    source: Array
    decoded: Array
    expected: Array
    heads: int = 0
    columns_are_heads: bool = False


def explain(suspect: Suspect, others: Iterable[tuple[str, Array]]) -> str:
    """Return the probable cause, the end of a sentence.

    Args:
        suspect: the weight.
        others: (name, weight) of tensors of the same shape that may have taken its place.
    """
    return (
        _one_factor(suspect)
        or _order_of(suspect, rows=True)
        or _order_of(suspect, rows=False)
        or _another(suspect, others)
        or _factors(suspect)
        or "its values are not those of the model: it is damaged, or was made from other weights"
    )


def _holds(suspect: Suspect, corrected: Array) -> bool:
    """Return whether a corrected weight has no more than the format's own error."""
    before = compare(suspect.source, suspect.decoded, suspect.expected)
    after = compare(suspect.source, corrected, suspect.expected)
    return not after.suspicious or (after.error <= EXPLAINED * before.error and after.ratio < 2)


def _one_factor(suspect: Suspect) -> str:
    found = suspect.decoded.astype(np.float64)
    energy = float((found**2).sum())
    if not energy:
        return "all its values are zero"
    factor = energy / (float((found * suspect.source).sum()) or 1e-30)
    if abs(factor - 1) < WRONG_GAIN / 2 or not _holds(suspect, (found / factor).astype(np.float32)):
        return ""
    return (
        f"all its values are {factor:.4g} times too large"
        if factor > 1
        else f"all are {1 / factor:.4g} times too small"
    )


def _order_of(suspect: Suspect, *, rows: bool) -> str:
    """Recognize rows, or columns, in another order."""
    right, found = (each if rows else each.T for each in (suspect.source, suspect.decoded))
    if len(right) > MANY_ROWS:
        return ""
    likeness = _unit(found) @ _unit(right).T
    came_from = likeness.argmax(1)
    moved = np.flatnonzero(came_from != np.arange(len(right)))
    if not len(moved) or len(np.unique(came_from)) < len(right):
        return ""
    ordered = np.empty_like(found)
    ordered[came_from] = found
    if not _holds(suspect, ordered if rows else ordered.T):
        return ""
    return _name_of_order(came_from, moved, suspect, rows)


def _name_of_order(came_from: Array, moved: Array, suspect: Suspect, rows: bool) -> str:
    count, what = len(came_from), "rows" if rows else "columns"
    every = np.arange(count)
    if np.array_equal(came_from, every ^ 1):
        return "each two neighbouring rows are exchanged: the INT4 nibbles of a byte are in the wrong order"
    heads = suspect.heads if rows else suspect.heads if suspect.columns_are_heads else 0
    size = count // heads if heads else 0
    if heads > 1 and np.array_equal(came_from % size, every % size):
        return f"the heads are in another order: {(came_from[::size] // size).tolist()}"
    for ranks in (2, 4, 8):
        if count % ranks == 0 and np.array_equal(came_from, reversed_blocks(every, ranks)):
            return f"its {what} are {ranks} blocks in reverse order: the files of tensor-parallel ranks are exchanged"
    return f"{len(moved)} of its {what} are in another order, the first at {int(moved[0])}"


def reversed_blocks(values: Array, blocks: int) -> Array:
    """Return rows with blocks of them in reverse order."""
    return np.concatenate(np.split(values, blocks)[::-1])


def _unit(values: Array) -> Array:
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    found: Array = values / np.where(norms > 0, norms, 1)
    return found


def _another(suspect: Suspect, others: Iterable[tuple[str, Array]]) -> str:
    for name, values in others:
        if values.shape == suspect.decoded.shape:
            away = float(np.linalg.norm(suspect.decoded - values)) / (float(np.linalg.norm(values)) or 1.0)
            allowed = compare(suspect.source, suspect.expected, suspect.expected).error
            if away <= FACTOR_OF_ERROR * allowed + 2 * ROUNDED_ONCE:
                return f"it holds {name}"
    return ""


def _factors(suspect: Suspect) -> str:
    """Recognize a wrong factor for each input channel, or each output channel."""
    found, right = suspect.decoded.astype(np.float64), suspect.expected.astype(np.float64)
    for axis, what in ((0, "input channel"), (1, "output channel")):
        energy = (found**2).sum(axis, keepdims=True)
        factor = (found * right).sum(axis, keepdims=True) / np.where(energy > 0, energy, 1)
        if _holds(suspect, (found * factor).astype(np.float32)):
            return f"each {what} has a wrong factor, between {1 / factor.max():.3g} and {1 / factor.min():.3g}"
    return ""
