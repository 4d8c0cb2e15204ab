"""The numbers a quantized checkpoint stands for, in float32 numpy.

Shape legend: O output channels, I input channels, G groups of input channels. What each format stores:
`reference/trtllm_facts.md` 3.5 restated: scale = amax / maxbound, so weight = code * scale.

The result is the weight as the kernel multiplies it with the *prequantized* activation: a linear computes
dequantized_OI @ (prequant_scaling_factor_I * x_I).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.errors import UserError
from pipelines.domain.formats import (
    FLOAT_WEIGHTS,
    FORMATS,
    FP8_WEIGHTS,
    INT4_AS_FP8_WEIGHTS,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""FP4 E2M1: the value of each 4-bit code; bit 3 is the sign."""


def unpack_int4(packed: Array) -> Array:
    """Unpack AWQ weights [O/2, I] to signed codes [O, I] int8.

    A byte holds two neighbouring *output* channels: row 2o in the low nibble, row 2o + 1 in the high one.
    """
    import numpy as np

    raw = packed.view(np.uint8)
    codes = np.stack([raw & 0x0F, raw >> 4], axis=1).reshape(2 * raw.shape[0], raw.shape[1])
    signed: Array = (codes ^ 8).astype(np.int8) - np.int8(8)  # (c ^ 8) - 8 extends the sign of 4 bits
    return signed


def unpack_e2m1(packed: Array) -> Array:
    """Unpack NVFP4 weights [O, I/2] to float32 [O, I]; even input channels are in the low nibble."""
    import numpy as np

    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values: Array = np.asarray(E2M1_VALUES, dtype=np.float32)[codes]
    return values


def scale_groups(values: Array, scales: Array) -> Array:
    """Multiply [O, I] with one scale per group [O, G]; I / G input channels share a scale."""
    import numpy as np

    out, groups = scales.shape
    grouped = values.reshape(out, groups, -1).astype(np.float32) * scales.astype(np.float32)[:, :, None]
    return grouped.reshape(values.shape)


def quantize_weight_only(weight: Array, bits: int) -> tuple[Array, Array]:
    """Quantize float weights [O, I] as trtllm-build does for W8A16 and W4A16.

    TensorRT-LLM `cutlass_preprocessors.cpp`, `symmetric_quantize`: per output channel, scale = amax / 2^(bits-1),
    codes rounded half away from zero and clipped to [-2^(bits-1), 2^(bits-1) - 1]. The codes are made with the
    float32 scale; the stored scale is rounded to the weights' dtype.

    Returns:
        codes int8 [O, I] and scales [O] in the dtype of `weight`.
    """
    import numpy as np

    bound = 2 ** (bits - 1)
    values = weight.astype(np.float32)
    scale = np.abs(values).max(axis=1) / np.float32(bound)
    scaled = values / np.where(scale == 0, 1, scale)[:, None]
    rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return np.clip(rounded, -bound, bound - 1).astype(np.int8), scale.astype(weight.dtype)


def dequantize(checkpoint: Checkpoint, module: str) -> Array:
    """Return the weight of one linear as float32 [O, I].

    Args:
        checkpoint: an open checkpoint.
        module: e.g. "transformer.layers.0.mlp.fc" or "lm_head".

    Raises:
        UserError: the module has no weight, or its tensors do not fit the checkpoint's format.
    """
    import numpy as np

    weight, kind = checkpoint.tensor(f"{module}.weight"), FORMATS[checkpoint.config.qformat].weights
    if kind is FLOAT_WEIGHTS or checkpoint.config.quantization.excludes(module):
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
        return scale_groups(unpack_int4(weight), scale)
    second = checkpoint.tensor(f"{module}.weights_scaling_factor_2").astype(np.float32)
    if kind is INT4_AS_FP8_WEIGHTS:
        # the kernel widens INT4 to FP8 with scale / scale_2 and multiplies scale_2 after the product
        widened = scale_groups(unpack_int4(weight), scale / second)
        return widened.astype(numpy_dtype("F8_E4M3")).astype(np.float32) * second
    return scale_groups(unpack_e2m1(weight), scale.astype(np.float32) * second)


def check_weight_dtype(checkpoint: Checkpoint, module: str) -> None:
    """Refuse a quantized linear whose stored weight is not what its format says.

    Raises:
        UserError: naming the tensor, the dtype found and the one expected.
    """
    name = f"{module}.weight"
    found, expected = checkpoint.spec(name).dtype, FORMATS[checkpoint.config.qformat].weights.stored
    if found != expected:
        raise UserError(
            f"{checkpoint.folder}: '{name}' is {found},"
            f" but {checkpoint.config.quantization.quant_algo} stores {expected}.",
            allowed="A module left in 16 bit must be named in quantization.exclude_modules.",
        )
