"""Inverse frequencies of rotary position embedding, plain and scaled (numpy, no OpenVINO)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.rotary import PLAIN_YARN, yarn_differences

SCALINGS = ("default", "linear", "llama3", "yarn")

YARN_FAST, YARN_SLOW = 32.0, 1.0
"""Turns over the original context above which, and below which, yarn does not mix."""


def inverse_frequencies(config: CheckpointConfig, *, local: bool = False) -> np.ndarray[Any, Any]:
    """Return the angle per position of each pair of channels, float32 [head_size / 2].

    base^(-2 i / head_size), then scaled as `rotary_scaling` says:
        linear  all divided by factor
        llama3  wavelengths above original / low_freq_factor divided by factor, below original / high_freq_factor
                kept, smoothly mixed between (Llama 3.1, `rope_type: llama3`)
        yarn    pairs that turn often over the original context kept, those that turn rarely divided by factor, a ramp
                over the pairs between (Peng et al., 2023), whose ends are whole pairs unless truncate=false; queries
                and keys also grow by `attention_factor`

    Args:
        config: of the checkpoint.
        local: of layers with a window, if these have a base of their own (Gemma 3), which is not scaled.

    Raises:
        UserError: the scaling type is unknown, or only a part of each head is rotated.
    """
    if config.raw.get("rotary_pct", 1.0) != 1.0:
        raise UserError(
            f"The checkpoint has rotary_pct={config.raw['rotary_pct']}.",
            allowed="Only 1.0 is supported by engine=openvino.",
        )
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    if local:
        return (float(config.raw["rope_local_base_freq"]) ** -exponents).astype(np.float32)
    plain = config.rotary_base**-exponents
    scaling, kind = config.rotary_scaling or {}, _kind(config)
    if kind not in SCALINGS:
        raise UserError(
            f"The checkpoint has rotary_scaling of type '{kind}', which is not supported by engine=openvino.",
            allowed=f"Known: {', '.join(SCALINGS)}.",
        )
    if kind == "linear":
        plain = plain / float(scaling["factor"])
    if kind == "llama3":
        plain = _llama3(plain, scaling)
    if kind == "yarn":
        plain = _yarn(plain, scaling, config.rotary_base)
    return plain.astype(np.float32)


def attention_factor(config: CheckpointConfig) -> float:
    """Return the factor of rotated queries and of rotated keys: 0.1 ln(factor) + 1 for yarn, else 1."""
    if _kind(config) != "yarn":
        return 1.0
    (factor,) = _numbers(config.rotary_scaling or {}, "yarn", "factor")
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


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
