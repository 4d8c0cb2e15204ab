"""The steps of a decoder in numpy, and which fault explains a result that differs.

Shapes: T tokens, H hidden size, N heads, K KV heads, D head size, I input channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eval.diagnose import weights
from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.formats import Activation

Array = np.ndarray[Any, Any]

SAME = 1e-3
"""Relative error of a result that a hypothesis explains."""


def frequencies(config: Any) -> Array:
    """Return the angle per position [D / 2], computed by Transformers' definition in float64."""
    size, scaling = config.head_size, dict(config.rotary_scaling or {})
    plain = config.rotary_base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "linear":
        plain = plain / scaling["factor"]
    if kind == "llama3":
        low, high = (
            scaling["original_max_position_embeddings"] / scaling[f"{end}_freq_factor"] for end in ("low", "high")
        )
        wavelength, slow = 2 * np.pi / plain, plain / scaling["factor"]
        share = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        mixed = (1 - share) * slow + share * plain
        plain = np.where(wavelength > low, slow, np.where(wavelength < high, plain, mixed))
    if kind == "yarn":
        plain = _yarn(plain, scaling, config.rotary_base)
    found: Array = plain.astype(np.float32)
    return found


def _yarn(plain: Array, scaling: dict[str, Any], base: float) -> Array:
    """Mix kept and divided frequencies by a ramp between two pairs of channels."""
    turns = np.array([scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1], dtype=np.float64)
    pairs = len(plain) * np.log(scaling["original_max_position_embeddings"] / (2 * np.pi * turns)) / np.log(base)
    low, high = max(np.floor(pairs[0]), 0), min(np.ceil(pairs[1]), 2 * len(plain) - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0, 1)
    found: Array = plain * (1 - ramp + ramp / scaling["factor"])
    return found


def magnification(config: Any) -> float:
    """Return the factor that rotated queries and keys have besides their rotation."""
    scaling = config.rotary_scaling or {}
    yarn = (scaling.get("rope_type") or scaling.get("type")) == "yarn"
    return float(1 + 0.1 * np.log(max(scaling["factor"], 1))) if yarn else 1.0


def split_heads(x: Array, heads: int) -> Array:
    """Reshape [T, heads D] -> [heads, T, D]."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def rotate(x: Array, angles: Array) -> Array:
    """Rotate [heads, T, D] by angles [T, D / 2]: the first half of the channels against the second."""
    half = x.shape[2] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def rotation_cause(found: Array, plain: Array, angles: Array) -> str:
    """Explain rotated queries or keys [heads, T, D] that are wrong."""
    if np.allclose(found, plain, rtol=1e-3, atol=1e-5):
        return "queries or keys are not rotated"
    if np.allclose(found, rotate(plain, -angles), rtol=1e-2, atol=1e-3):
        return "they are rotated in the wrong direction"
    return "they are not rotated by the angles of their positions"


def attend(
    q: Array, k: Array, v: Array, scale: float | None = None, *, tiled: bool = False, causal: bool = True
) -> Array:
    """Attend causally: q [N, T, D], k and v [K, T, D]; each KV head serves N / K neighbouring query heads."""
    times = len(q) // len(k)
    k, v = (np.tile(x, (times, 1, 1)) if tiled else np.repeat(x, times, axis=0) for x in (k, v))
    scores = (q @ k.transpose(0, 2, 1)) * np.float32(q.shape[2] ** -0.5 if scale is None else scale)
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], dtype=bool)), scores, np.float32(-1e30))
    shares = np.exp(scores - scores.max(2, keepdims=True))
    found: Array = (shares / shares.sum(2, keepdims=True)) @ v
    return found


def attention_cause(found: Array, q: Array, k: Array, v: Array, hidden: int) -> str:
    """Explain an attention [N, T, D] that is wrong."""
    size = q.shape[2]
    tries = {
        "query heads are grouped wrongly: neighbouring ones do not share a KV head": attend(q, k, v, tiled=True),
        "later tokens are not masked": attend(q, k, v, causal=False),
    }
    scales = {
        "1 (it is missing)": 1.0,
        "1 / head size": 1 / size,
        "1 / sqrt(hidden size / heads)": (hidden / len(q)) ** -0.5,
        "1 / sqrt(hidden size)": hidden**-0.5,
        "1 / sqrt(2 head size)": (2 * size) ** -0.5,
        "1 / sqrt(head size / 2)": (size / 2) ** -0.5,
    }
    tries |= {
        f"the attention scale is {name}, not 1 / sqrt(head size)": attend(q, k, v, s) for name, s in scales.items()
    }
    return _nearest(found, tries) or "attention is computed wrongly: its scale, mask or heads"


def _nearest(found: Array, tries: Mapping[str, Array]) -> str:
    """Return the name of the array that equals the result; empty if none does."""
    size = float(np.linalg.norm(found)) or 1.0
    errors = {name: float(np.linalg.norm(found - right)) / size for name, right in tries.items()}
    name = min(errors, key=lambda key: errors[key])
    return name if errors[name] <= SAME else ""


def act_cause(found: Array, gate: Array, up: Array, act: str) -> str:
    """Explain a wrong product of the activated gate and up, [T, I]."""
    tries = {f"the activation function is {name}, not {act}": each(gate) * up for name, each in _ALL_ACTS.items()}
    tries |= {"gate and up are exchanged": ACTS[act](up) * gate, "the gate is missing": gate * up}
    return _nearest(found, tries) or f"the product of {act}(gate) and up is wrong"


def normed(x: Array, eps: float) -> Array:
    """Return x over the root of its mean square, without the weight; [T, H]."""
    wide = x.astype(np.float64)
    found: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return found.astype(np.float32)


def norm_cause(found: Array, x: Array, weight: Array, eps: float, offset: float) -> str:
    """Explain a wrong result of a norm, [T, H]."""
    if offset and _nearest(found, {"minus": normed(x, eps) * (weight - np.float32(offset))}):
        return f"the norm lacks the + {offset:g} of this family"
    tries = {
        f"norm_epsilon is {other:g}, not {eps:g}": normed(x, other) * weight for other in _EPSILONS if other != eps
    }
    if cause := _nearest(found, tries):
        return cause
    per_channel = np.median(found / np.where(normed(x, eps) == 0, 1, normed(x, eps)), axis=0)
    if _nearest(found, {"weight": normed(x, eps) * per_channel}):
        return "the factors of the norm are not the checkpoint's"
    return f"the norm is computed wrongly: its epsilon is not {eps:g}, or its mean is taken over something else"


_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def input_cause(found: Array, x: Array, right: Array, prequant: Array | None) -> str:
    """Explain a wrong input of a linear, [T, I]: smoothed and rounded where the format does."""
    if np.array_equal(found, x):
        return "the input is passed on as it is: neither scaled nor rounded"
    if prequant is not None and float(np.linalg.norm(found - x)) < 0.1 * float(np.linalg.norm(right - x)):
        return "the smoothing factor of each input channel is not applied"
    return "the input is rounded with another scale than the checkpoint's"


def scale_cause(found: Array, right: Array, what: str, otherwise: str) -> str:
    """Recognize one factor for all."""
    if found.shape != right.shape:
        return f"{what} has the shape {list(found.shape)}, not {list(right.shape)}"
    gain = float((found.astype(np.float64) * right).sum()) / (float((right.astype(np.float64) ** 2).sum()) or 1.0)
    if float(np.linalg.norm(found - np.float32(gain) * right)) <= SAME * float(np.linalg.norm(found)):
        return f"{what} is {gain:.4g} times what it should be ({otherwise})"
    return f"{what} is not what it should be ({otherwise})"


def _tanh_gelu(x: Array) -> Array:
    found: Array = 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    return found


def _silu(x: Array) -> Array:
    found: Array = x / (1 + np.exp(-x.astype(np.float64)))
    return found.astype(np.float32)


ACTS: Mapping[str, Callable[[Array], Array]] = {"silu": _silu, "gelu": _tanh_gelu, "gelu_pytorch_tanh": _tanh_gelu}
_ALL_ACTS: Mapping[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu (tanh)": _tanh_gelu,
    "quick gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "the identity": lambda x: x,
}


def _to_fp8(x: Array, scale: float) -> Array:
    found: Array = np.clip(x / np.float32(scale), -448, 448).astype(numpy_dtype("F8_E4M3")).astype(np.float32)
    return found * np.float32(scale)


def _to_int8(x: Array, scale: float) -> Array:
    found: Array = np.clip(np.rint(x / np.float32(scale)), -128, 127) * np.float32(scale)
    return found


def _to_fp4(x: Array, scale: float) -> Array:
    blocks = x.reshape(-1, 16)
    block_scale = _to_fp8(np.abs(blocks).max(1, keepdims=True) / np.float32(6), scale)
    block_scale = np.where(block_scale >= 1e-5, block_scale, np.float32(1))
    codes = weights.E2M1[np.searchsorted(weights.E2M1_BOUNDS, np.abs(blocks) / block_scale)]
    found: Array = (np.copysign(codes, blocks) * block_scale).reshape(x.shape)
    return found


ROUNDINGS: Mapping[Activation, Callable[[Array, float], Array]] = {
    "16bit": lambda x, _: x,
    "fp8": _to_fp8,
    "int8": _to_int8,
    "fp4": _to_fp4,
}
