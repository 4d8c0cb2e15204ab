"""The steps of a decoder and the codes of its weights in numpy, and which fault explains a result that differs.

Shapes: T tokens, H hidden size, N heads, K KV heads, D head size, O output channels, I input channels, G groups of
input channels.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.formats import (
    FP4_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AS_FP8_WEIGHTS,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    Activation,
    WeightKind,
)

Array = np.ndarray[Any, Any]

SAME = 1e-3
"""Relative error of a result that a hypothesis explains."""


def split_heads(x: Array, heads: int) -> Array:
    """Reshape [T, heads D] -> [heads, T, D]."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def rotate(x: Array, angles: Array) -> Array:
    """Rotate [heads, T, D] by angles [T, D / 2]: the first half of the channels against the second."""
    half = x.shape[2] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def rotation_cause(actual: Array, plain: Array, angles: Array) -> str:
    """Explain rotated queries or keys [heads, T, D] that are wrong."""
    if np.allclose(actual, plain, rtol=1e-3, atol=1e-5):
        return "queries or keys are not rotated"
    if np.allclose(actual, rotate(plain, -angles), rtol=1e-2, atol=1e-3):
        return "they are rotated in the wrong direction"
    return "they are not rotated by the angles of their positions"


def attend(
    q: Array, k: Array, v: Array, scale: float, *, window: int = 0, tiled: bool = False, causal: bool = True
) -> Array:
    """Attend causally, to the last `window` tokens (0 is all): q [N, T, D], k and v [K, T, D]; N / K heads share."""
    times = len(q) // len(k)
    k, v = (np.tile(x, (times, 1, 1)) if tiled else np.repeat(x, times, axis=0) for x in (k, v))
    scores = (q @ k.transpose(0, 2, 1)) * np.float32(scale)
    if causal:
        seen = np.tril(np.ones(scores.shape[1:], dtype=bool))
        scores = np.where(seen & ~np.tril(seen, -window) if window else seen, scores, np.float32(-1e30))
    shares = np.exp(scores - scores.max(2, keepdims=True))
    result: Array = (shares / shares.sum(2, keepdims=True)) @ v
    return result


def attention_cause(actual: Array, q: Array, k: Array, v: Array, scale: float, hidden: int, window: int = 0) -> str:
    """Explain an attention [N, T, D] that is wrong, whose scale should be `scale`."""
    size, near = q.shape[2], partial(attend, window=window)
    tries = {
        "query heads are grouped wrongly: neighbouring ones do not share a KV head": near(q, k, v, scale, tiled=True),
        "later tokens are not masked": attend(q, k, v, scale, causal=False),
        **({f"the window of {window} tokens is not applied": attend(q, k, v, scale)} if window else {}),
    }
    usual = "1 / sqrt(head size)"
    scales = {
        usual: size**-0.5,
        "1 (it is missing)": 1.0,
        "1 / head size": 1 / size,
        "1 / sqrt(hidden size / heads)": (hidden / len(q)) ** -0.5,
        "1 / sqrt(hidden size)": hidden**-0.5,
        "1 / sqrt(2 head size)": (2 * size) ** -0.5,
        "1 / sqrt(head size / 2)": (size / 2) ** -0.5,
    }
    right = usual if math.isclose(scale, scales[usual], rel_tol=1e-6) else f"{scale:.4g}"
    tries |= {
        f"the attention scale is {name}, not {right}": near(q, k, v, each)
        for name, each in scales.items()
        if name != right
    }
    return _nearest(actual, tries) or "attention is computed wrongly: its scale, mask or heads"


def _nearest(actual: Array, tries: Mapping[str, Array]) -> str:
    """Return the name of the array that equals the result; empty if none does."""
    size = float(np.linalg.norm(actual)) or 1.0
    errors = {name: float(np.linalg.norm(actual - right)) / size for name, right in tries.items()}
    name = min(errors, key=lambda key: errors[key])
    return name if errors[name] <= SAME else ""


def act_cause(actual: Array, gate: Array, up: Array, act: str) -> str:
    """Explain a wrong product of the activated gate and up, [T, I]."""
    tries = {f"the activation function is {name}, not {act}": each(gate) * up for name, each in _ALL_ACTS.items()}
    tries |= {"gate and up are exchanged": ACTS[act](up) * gate, "the gate is missing": gate * up}
    return _nearest(actual, tries) or f"the product of {act}(gate) and up is wrong"


def normed(x: Array, eps: float) -> Array:
    """Return x over the root of its mean square, without the weight; [T, H]."""
    wide = x.astype(np.float64)
    result: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return result.astype(np.float32)


def norm_cause(actual: Array, x: Array, weight: Array, eps: float, offset: float) -> str:
    """Explain a wrong result of a norm, [T, H]."""
    if offset and _nearest(actual, {"minus": normed(x, eps) * (weight - np.float32(offset))}):
        return f"the norm lacks the + {offset:g} of this family"
    tries = {
        f"norm_epsilon is {other:g}, not {eps:g}": normed(x, other) * weight for other in _EPSILONS if other != eps
    }
    if cause := _nearest(actual, tries):
        return cause
    per_channel = np.median(actual / np.where(normed(x, eps) == 0, 1, normed(x, eps)), axis=0)
    if _nearest(actual, {"weight": normed(x, eps) * per_channel}):
        return "the factors of the norm are not the checkpoint's"
    return f"the norm is computed wrongly: its epsilon is not {eps:g}, or its mean is taken over something else"


_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def input_cause(actual: Array, x: Array, right: Array, prequant: Array | None) -> str:
    """Explain a wrong input of a linear, [T, I]: smoothed and rounded where the format does."""
    if np.array_equal(actual, x):
        return "the input is passed on as it is: neither scaled nor rounded"
    if prequant is not None and float(np.linalg.norm(actual - x)) < 0.1 * float(np.linalg.norm(right - x)):
        return "the smoothing factor of each input channel is not applied"
    return "the input is rounded with another scale than the checkpoint's"


def scale_cause(actual: Array, right: Array, what: str, otherwise: str) -> str:
    """Recognize one factor for all."""
    if actual.shape != right.shape:
        return f"{what} has the shape {list(actual.shape)}, not {list(right.shape)}"
    gain = float((actual.astype(np.float64) * right).sum()) / (float((right.astype(np.float64) ** 2).sum()) or 1.0)
    if float(np.linalg.norm(actual - np.float32(gain) * right)) <= SAME * float(np.linalg.norm(actual)):
        return f"{what} is {gain:.4g} times what it should be ({otherwise})"
    return f"{what} is not what it should be ({otherwise})"


def _tanh_gelu(x: Array) -> Array:
    result: Array = 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return result


def _silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x.astype(np.float64)))
    return result.astype(np.float32)


ACTS: Mapping[str, Callable[[Array], Array]] = {"silu": _silu, "gelu": _tanh_gelu, "gelu_pytorch_tanh": _tanh_gelu}
_ALL_ACTS: Mapping[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu (tanh)": _tanh_gelu,
    "quick gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "the identity": lambda x: x,
}


def _to_fp4(x: Array, scale: float) -> Array:
    blocks = x.reshape(-1, 16)
    block_scale = e4m3(np.abs(blocks).max(1, keepdims=True) / np.float32(6), np.float32(scale))
    block_scale = np.where(block_scale >= 1e-5, block_scale, np.float32(1))
    return e2m1(blocks, block_scale).reshape(x.shape)


ROUNDINGS: Mapping[Activation, Callable[[Array, float], Array]] = {
    "16bit": lambda x, _: x,
    "fp8": lambda x, scale: e4m3(x, np.float32(scale)),
    "int8": lambda x, scale: integers(x, np.float32(scale), 127),
    "fp4": _to_fp4,
}


# Whether decoded weights are those they were made from, and if not, what was done to them.
#
# Every format has an error of its own, so errors are judged by that of the best possible codes: the source weight,
# quantized again here. The rest is explained by hypotheses: rows in another order, another tensor in its place, one
# factor for all, scales of another tensor. The one under which the error vanishes is the probable cause.

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
        row: largest relative error of a row over the expected one of all rows; infinite if a row or column has the
            other sign, which no rounding gives it.
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


def compare(source: Array, decoded: Array, expected: Array, *, rounded_alone: bool = True) -> WeightError:
    """Compare weights [O, I].

    Args:
        source: what it was made from.
        decoded: as it is multiplied.
        expected: the source with the format's own error.
        rounded_alone: each weight was rounded by itself, so that none has the other sign.
    """
    norms = np.linalg.norm(source, axis=1)
    total = float(np.linalg.norm(norms)) or 1.0
    norms = np.maximum(norms, total / len(norms) ** 0.5 * 1e-2)  # rows of (nearly) nothing have no error of their own
    wrong, usual = (np.linalg.norm(each - source, axis=1) for each in (decoded, expected))
    error, least = (float(np.linalg.norm(each)) / total for each in (wrong, usual))
    wide = source.astype(np.float64)
    gain = float((wide * decoded).sum()) / (float((wide * expected).sum()) or 1.0)
    base = max(float((usual / norms).max()), ROUNDED_ONCE)
    row = float((wrong / norms).max()) / base
    if rounded_alone and any((np.einsum(f"oi,oi->{axis}", source, decoded) < 0).any() for axis in "oi"):
        row = math.inf
    return WeightError(error, least, row, gain)


def best_codes(source: Array, kind: WeightKind, group: int) -> Array:
    """Return the weight [O, I] as the format holds it at best: scales from the largest values, nearest codes."""
    source = source.astype(np.float32)
    if kind is FP8_WEIGHTS:
        return e4m3(source, np.abs(source).max() / 448 or np.float32(1))
    if kind is INT8_WEIGHTS:
        return _integers_to(np.abs(source).max(1, keepdims=True), source, 127)
    if kind in (INT4_WEIGHTS, INT4_AS_FP8_WEIGHTS, FP4_WEIGHTS):
        grouped = source.reshape(len(source), -1, group)
        largest = np.abs(grouped).max(2, keepdims=True)
        if kind is not FP4_WEIGHTS:
            return _integers_to(largest, grouped, 7).reshape(source.shape)
        scale = e4m3(largest / 6, np.abs(source).max() / (6 * 448) or np.float32(1))
        source = e2m1(grouped, np.maximum(scale, np.float32(1e-30))).reshape(source.shape)
    return source


def _integers_to(largest: Array, values: Array, bound: int) -> Array:
    return integers(values, np.where(largest > 0, largest, 1) / np.float32(bound), bound)


def integers(values: Array, scale: Array | np.float32, bound: int) -> Array:
    """Round to multiples of a scale, from -bound - 1 to bound of them."""
    result: Array = np.clip(np.rint(values / scale), -bound - 1, bound) * scale
    return result


def e4m3(values: Array, scale: Array | np.float32) -> Array:
    """Round to multiples of a scale that are FP8 codes."""
    result: Array = np.clip(values / scale, -448, 448).astype(numpy_dtype("F8_E4M3")).astype(np.float32) * scale
    return result


def e2m1(values: Array, scale: Array) -> Array:
    """Round to multiples of a scale that are FP4 codes."""
    codes = E2M1[np.searchsorted(E2M1_BOUNDS, np.abs(values) / scale)]
    result: Array = np.copysign(codes, values) * scale
    return result


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
    actual = suspect.decoded.astype(np.float64)
    energy = float((actual**2).sum())
    if not energy:
        return "all its values are zero"
    factor = energy / (float((actual * suspect.source).sum()) or 1e-30)
    if abs(factor - 1) < WRONG_GAIN / 2 or not _holds(suspect, (actual / factor).astype(np.float32)):
        return ""
    return (
        f"all its values are {factor:.4g} times too large"
        if factor > 1
        else f"all are {1 / factor:.4g} times too small"
    )


def _order_of(suspect: Suspect, *, rows: bool) -> str:
    right, actual = (each if rows else each.T for each in (suspect.source, suspect.decoded))
    if len(right) > MANY_ROWS:
        return ""
    likeness = _unit(actual) @ _unit(right).T
    came_from = likeness.argmax(1)
    moved = np.flatnonzero(came_from != np.arange(len(right)))
    if not len(moved) or len(np.unique(came_from)) < len(right):
        return ""
    ordered = np.empty_like(actual)
    ordered[came_from] = actual
    if not _holds(suspect, ordered if rows else ordered.T):
        return ""
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
    result: Array = values / np.where(norms > 0, norms, 1)
    return result


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
    actual, right = suspect.decoded.astype(np.float64), suspect.expected.astype(np.float64)
    for axis, what in ((0, "input channel"), (1, "output channel")):
        energy = (actual**2).sum(axis, keepdims=True)
        factor = (actual * right).sum(axis, keepdims=True) / np.where(energy > 0, energy, 1)
        sizes = 1 / factor[factor != 0]  # a channel of zeros has none
        if sizes.size and _holds(suspect, (actual * factor).astype(np.float32)):
            return f"each {what} has a wrong factor, between {sizes.min():.3g} and {sizes.max():.3g}"
    return ""
