"""Inverse frequencies of rotary position embedding, plain and scaled (numpy, no OpenVINO)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.rotary import PLAIN_YARN, ROPE_TYPES, yarn_differences

MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}
"""What TensorRT-LLM takes where a block of yarn has none."""
YARN_FAST, YARN_SLOW = 32.0, 1.0
"""Turns over the original context above which, and below which, yarn does not mix."""


def inverse_frequencies(config: CheckpointConfig, *, local: bool = False) -> np.ndarray[Any, Any]:
    """Return the angle per position of each pair of channels, float32 [rotated channels / 2].

    base^(-2 i / rotated channels), then scaled as `rotary_scaling` says:
        linear  all divided by factor
        llama3  wavelengths above original / low_freq_factor divided by factor, below original / high_freq_factor
                kept, smoothly mixed between (Llama 3.1, `rope_type: llama3`)
        yarn    pairs that turn often over the original context kept, those that turn rarely divided by factor, a ramp
                over the pairs between (Peng et al., 2023), whose ends are whole pairs unless truncate=false
    and as `long_rope` says, within the original context: each pair divided by its own short factor. With yarn and
    long_rope, queries and keys also grow by `attention_factor`.

    Args:
        config: of the checkpoint.
        local: of layers with a window, if these have a base of their own (Gemma 3), which is not scaled.

    Raises:
        UserError: the scaling type is unknown.
    """
    rotated = int(config.head_size * float(config.raw.get("rotary_pct", 1.0)))
    exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    if local:
        return (float(config.raw["rope_local_base_freq"]) ** -exponents).astype(np.float32)
    plain = config.rotary_base**-exponents
    scaling, kind = config.rotary_scaling or {}, _kind(config)
    if kind not in ROPE_TYPES:
        raise UserError(
            f"The checkpoint has rotary_scaling of type '{kind}', which is not supported by engine=openvino.",
            allowed=f"Known: {', '.join(ROPE_TYPES)}.",
        )
    if original_context(config):
        plain = plain / _short_factors(config, len(plain))
    if kind == "linear":
        plain = plain / float(scaling["factor"])
    if kind == "llama3":
        plain = _llama3(plain, scaling)
    if kind == "yarn":
        plain = _yarn(plain, scaling, config.rotary_base)
    return plain.astype(np.float32)


def attention_factor(config: CheckpointConfig) -> float:
    """Return the factor of rotated queries and of rotated keys.

    For yarn the ratio of mscale (1 if absent) and mscale_all_dim (0), each 0.1 mscale ln(factor) + 1. For long_rope
    sqrt(1 + ln(positions / original) / ln(original)). Else 1.
    """
    if original := original_context(config):
        ratio = config.max_position_embeddings / original
        return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    if _kind(config) != "yarn":
        return 1.0
    scaling = config.rotary_scaling or {}
    (factor,) = _numbers(scaling, "yarn", "factor")
    one, other = (0.1 * scaling.get(key, usual) * math.log(max(factor, 1)) + 1 for key, usual in MSCALES.items())
    return float(one / other)


def original_context(config: CheckpointConfig) -> int:
    """Return the positions up to which long_rope has its short factors; 0 for other embeddings."""
    if config.raw.get("position_embedding_type") != "long_rope":
        return 0
    original = config.raw.get("original_max_position_embeddings")
    if type(original) is not int or original < 2:
        raise UserError(
            f"The checkpoint has position_embedding_type='long_rope' and original_max_position_embeddings={original}.",
            allowed="It must be a number of tokens.",
        )
    return original


def _short_factors(config: CheckpointConfig, pairs: int) -> np.ndarray[Any, Any]:
    factors = config.raw.get("longrope_scaling_short_factors")
    if not isinstance(factors, list) or len(factors) != pairs:
        raise UserError(
            f"The checkpoint has longrope_scaling_short_factors={str(factors)[:40]}.",
            allowed=f"It must be {pairs} numbers, one for every two channels that are rotated.",
        )
    return np.array(factors, np.float64)


def _kind(config: CheckpointConfig) -> str:
    scaling = config.rotary_scaling or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _numbers(scaling: Mapping[str, Any], kind: str, *keys: str) -> list[float]:
    try:
        values = [float(scaling[key]) for key in keys]
    except KeyError as missing:
        raise UserError(f"rotary_scaling of type '{kind}' has no {missing}.") from None
    for key, value in zip(keys, values, strict=True):
        if not value > 0:
            raise UserError(f"rotary_scaling of type '{kind}' has {key}={value:g}.", allowed="It must be positive.")
    return values


def _yarn(plain: np.ndarray[Any, Any], scaling: Mapping[str, Any], base: float) -> np.ndarray[Any, Any]:
    factor, original = _numbers(scaling, "yarn", "factor", "original_max_position_embeddings")
    betas = {"beta_fast": scaling.get("beta_fast") or YARN_FAST, "beta_slow": scaling.get("beta_slow") or YARN_SLOW}
    fast, slow = _numbers(betas, "yarn", *betas)
    if base <= 1 or (odd := yarn_differences(scaling)):
        what = f"rotary_base={base:g}" if base <= 1 else f"{' and '.join(odd)} in rotary_scaling of type 'yarn'"
        raise UserError(f"The checkpoint has {what}, which is not supported by engine=openvino.", allowed=PLAIN_YARN)
    size = 2 * len(plain)
    # the pair that turns so many times over the original context
    first, last = (size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, size - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    mixed: np.ndarray[Any, Any] = (1 - ramp) * plain + ramp * plain / factor
    return mixed


def _llama3(plain: np.ndarray[Any, Any], scaling: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    factor, low, high, original = _numbers(
        scaling, "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )
    turns = original * plain / (2 * math.pi)  # full rotations over the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    mixed: np.ndarray[Any, Any] = keep * plain + (1 - keep) * plain / factor
    return mixed
