"""Inverse frequencies of rotary position embedding, plain and scaled (numpy, no OpenVINO)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.domain.errors import UserError

SCALINGS = ("default", "linear", "llama3")


def inverse_frequencies(config: CheckpointConfig) -> np.ndarray[Any, Any]:
    """Return the angle per position of each pair of channels, float32 [head_size / 2].

    base^(-2 i / head_size), then scaled as `rotary_scaling` says:
        linear  all divided by factor
        llama3  wavelengths above original / low_freq_factor divided by factor, below original / high_freq_factor
                kept, smoothly mixed between (Llama 3.1, `rope_type: llama3`)

    Raises:
        UserError: the scaling type is unknown, or only a part of each head is rotated.
    """
    if config.raw.get("rotary_pct", 1.0) != 1.0:
        raise UserError(
            f"The checkpoint has rotary_pct={config.raw['rotary_pct']}.",
            allowed="Only 1.0 is supported by engine=openvino.",
        )
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    plain = config.rotary_base**-exponents
    scaling = config.rotary_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SCALINGS:
        raise UserError(
            f"The checkpoint has rotary_scaling of type '{kind}', which is not supported by engine=openvino.",
            allowed=f"Known: {', '.join(SCALINGS)}.",
        )
    if kind == "linear":
        plain = plain / float(scaling["factor"])
    if kind == "llama3":
        plain = _llama3(plain, scaling)
    return plain.astype(np.float32)


def _llama3(plain: np.ndarray[Any, Any], scaling: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    try:
        factor, low, high, original = (
            float(scaling[key])
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
    except KeyError as missing:
        raise UserError(f"rotary_scaling of type 'llama3' has no {missing}.") from None
    turns = original * plain / (2 * math.pi)  # full rotations over the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    mixed: np.ndarray[Any, Any] = keep * plain + (1 - keep) * plain / factor
    return mixed
