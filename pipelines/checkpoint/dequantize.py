"""Dequantize a checkpoint to float32 with numpy: the reference for the arithmetic of engines, in tests and diagnoses.

Shape legend: O output channels, I input channels, G groups of input channels. What each format stores:
`reference/trtllm_facts.md` 3.5 restated: scale = amax / maxbound, so weight = code * scale.

The result is the weight as the kernel multiplies it with the *prequantized* activation: a linear computes
dequantized_OI @ (prequant_scaling_factor_I * x_I).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.checkpoint.read import Checkpoint, check_weight_dtype, quantize_weight_only, unpack_int4, zero_points
from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.formats import (
    FLOAT_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AS_FP8_WEIGHTS,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
)

Array = np.ndarray[Any, Any]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""FP4 E2M1: the value of each 4-bit code; bit 3 is the sign."""


def unpack_e2m1(packed: Array) -> Array:
    """Unpack NVFP4 weights [O, I/2] to float32 [O, I]; even input channels are in the low nibble."""
    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values: Array = np.asarray(E2M1_VALUES, dtype=np.float32)[codes]
    return values


def scale_groups(values: Array, scales: Array) -> Array:
    """Multiply [O, I] with one scale per group [O, G]; I / G input channels share a scale."""
    out, groups = scales.shape
    grouped = values.reshape(out, groups, -1).astype(np.float32) * scales.astype(np.float32)[:, :, None]
    return grouped.reshape(values.shape)


def dequantize(checkpoint: Checkpoint, module: str) -> Array:
    """Return the weight of one linear as float32 [O, I].

    Args:
        checkpoint: an open checkpoint.
        module: e.g. "transformer.layers.0.mlp.fc" or "lm_head".

    Raises:
        UserError: the module has no weight, or its tensors do not fit its format.
    """
    weight, kind = checkpoint.tensor(f"{module}.weight"), checkpoint.config.format_of(module).weights
    if kind is FLOAT_WEIGHTS:
        return weight.astype(np.float32)
    if kind.at_build:
        codes, scale = quantize_weight_only(weight, kind.bits)
        return codes.astype(np.float32) * scale.astype(np.float32)[:, None]
    check_weight_dtype(checkpoint, module)
    scale = checkpoint.tensor(f"{module}.weights_scaling_factor")
    if kind is FP8_WEIGHTS:
        return weight.astype(np.float32) * scale.astype(np.float32)
    if kind is INT8_WEIGHTS:
        return weight.astype(np.float32) * scale.astype(np.float32)[:, None]
    if kind is INT4_WEIGHTS:
        scaled, zeros = scale_groups(unpack_int4(weight), scale), zero_points(checkpoint, module)
        return scaled if zeros is None else scaled + np.repeat(zeros, weight.shape[1] // scale.shape[1], axis=1)
    second = checkpoint.tensor(f"{module}.weights_scaling_factor_2").astype(np.float32)
    if kind is INT4_AS_FP8_WEIGHTS:
        # the kernel widens INT4 to FP8 with scale / scale_2 and multiplies by scale_2 after the product
        widened = scale_groups(unpack_int4(weight), scale / second)
        return widened.astype(numpy_dtype("F8_E4M3")).astype(np.float32) * second
    return scale_groups(unpack_e2m1(weight), scale.astype(np.float32) * second)
