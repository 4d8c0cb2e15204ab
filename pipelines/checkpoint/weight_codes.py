"""Integer codes of quantized weights: unpack and check those of a checkpoint, compute those of weight-only formats.

Shape legend: O output channels, I input channels. What each format stores: `reference/trtllm_facts.md` 3.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.read import Checkpoint
from pipelines.domain.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def unpack_int4(packed: Array) -> Array:
    """Unpack AWQ weights [O/2, I] to signed codes [O, I] int8.

    A byte holds two neighbouring *output* channels: row 2o in the low nibble, row 2o + 1 in the high one.
    """
    import numpy as np

    raw = packed.view(np.uint8)
    codes = np.stack([raw & 0x0F, raw >> 4], axis=1).reshape(2 * raw.shape[0], raw.shape[1])
    signed: Array = (codes ^ 8).astype(np.int8) - np.int8(8)  # (c ^ 8) - 8 sign-extends 4 bits
    return signed


def zero_points(checkpoint: Checkpoint, module: str) -> Array | None:
    """Return what is added to each group of an INT4 weight after its scale, float32 [O, G]; None without zero points.

    With the code q = 0..15 of a weight and the zero point z, code = q - 8 is stored, and zero = (8 - z) * scale.
    Source: TensorRT-LLM `quantization/layers.py` (WeightOnlyGroupwiseQuantLinear).
    """
    import numpy as np

    name = f"{module}.zero"
    return checkpoint.tensor(name).astype(np.float32).T if name in checkpoint else None


def quantize_weight_only(weight: Array, bits: int) -> tuple[Array, Array]:
    """Quantize float weights [O, I] as trtllm-build does for W8A16 and W4A16.

    TensorRT-LLM `cutlass_preprocessors.cpp`, `symmetric_quantize`: per output channel, scale = amax / 2^(bits-1),
    codes rounded half away from zero and clipped to [-2^(bits-1), 2^(bits-1) - 1]. The codes are computed with the
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


def check_weight_dtype(checkpoint: Checkpoint, module: str) -> None:
    """Reject a quantized linear whose weight is not stored in its format's dtype.

    Raises:
        UserError: names the tensor, the dtype found and the one expected.
    """
    name = f"{module}.weight"
    form = checkpoint.config.format_of(module)
    found, expected = checkpoint.spec(name).dtype, form.weights.stored
    if found != expected:
        raise UserError(
            f"{checkpoint.folder}: '{name}' is {found}, but {form.quant_algo} stores {expected}.",
            allowed="A module left in 16 bit must be named in quantization.exclude_modules.",
        )
