"""What packed weights stand for, by hand-worked numbers."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pipelines.checkpoint.read import Checkpoint, dequantize, quantize_weight_only, unpack_e2m1, unpack_int4
from pipelines.domain.errors import UserError

Write = Callable[..., Path]


FC = "transformer.layers.0.mlp.fc"


def fc(folder_of: Write, algo: str, weight: np.ndarray, **scales: np.ndarray) -> np.ndarray:
    """Write one linear with its scales and decode it."""
    tensors = {f"{FC}.weight": weight, **{f"{FC}.{leaf}": values for leaf, values in scales.items()}}
    return dequantize(Checkpoint(folder_of([tensors], quantization={"quant_algo": algo})), FC)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_int4_nibbles_are_two_output_channels() -> None:
    """0x81: low nibble 1 is row 0, high nibble 8 is -8 in row 1. 0x7F: -1 and 7."""
    assert unpack_int4(np.array([[0x81, 0x7F]], dtype=np.uint8).view(np.int8)).tolist() == [[1, -1], [-8, 7]]


def test_e2m1_nibbles_are_two_input_channels() -> None:
    """0x72: low nibble 2 is 1.0, high nibble 7 is 6.0. 0x9F: 15 is -6.0, 9 is -0.5."""
    assert unpack_e2m1(np.array([[0x72, 0x9F]], dtype=np.uint8)).tolist() == [[1.0, 6.0, -6.0, -0.5]]


def test_fp8_is_code_times_scale(write_checkpoint: Write) -> None:
    """448 * 0.5 = 224; -1.125 * 0.5 = -0.5625."""
    weight = f32(448, -1.125).reshape(1, 2).astype(ml_dtypes.float8_e4m3fn)
    assert fc(write_checkpoint, "FP8", weight, weights_scaling_factor=f32(0.5)).tolist() == [[224.0, -0.5625]]


def test_int8_has_a_scale_per_output_channel(write_checkpoint: Write) -> None:
    weight = np.array([[100, -2], [3, 4]], dtype=np.int8)
    decoded = fc(write_checkpoint, "W8A8_SQ_PER_CHANNEL", weight, weights_scaling_factor=f32(0.5, 2.0))
    assert decoded.tolist() == [[50.0, -1.0], [6.0, 8.0]]


def test_int4_awq_has_a_scale_per_group(write_checkpoint: Write) -> None:
    """Two groups of two input channels. Row 0: codes 1 2 | 3 4; row 1: -1 -2 | -3 -4."""
    codes = np.array([[1, 2, 3, 4], [-1, -2, -3, -4]])
    packed = ((codes[0] & 15) | ((codes[1] & 15) << 4)).astype(np.uint8).view(np.int8)[None]
    scales = f32(0.5, 10, 2, 100).reshape(2, 2)
    decoded = fc(write_checkpoint, "W4A16_AWQ", packed, weights_scaling_factor=scales)
    assert decoded.tolist() == [[0.5, 1.0, 30.0, 40.0], [-2.0, -4.0, -300.0, -400.0]]


def test_w4a8_rounds_through_fp8(write_checkpoint: Write) -> None:
    """Code 7, scale 0.13, scale_2 0.5: 7 * 0.26 = 1.82 is rounded to the E4M3 value 1.875, times 0.5 = 0.9375."""
    packed = np.array([[0x77]], dtype=np.uint8).view(np.int8)
    decoded = fc(
        write_checkpoint, "W4A8_AWQ", packed, weights_scaling_factor=f32(0.13, 0.13).reshape(2, 1),
        weights_scaling_factor_2=f32(0.5),
    )  # fmt: skip
    assert decoded.tolist() == [[0.9375], [0.9375]]


def test_nvfp4_has_two_levels_of_scales(write_checkpoint: Write) -> None:
    """16 codes of 6.0 with block scale 1.5 and tensor scale 0.25: 6 * 1.5 * 0.25 = 2.25."""
    decoded = fc(
        write_checkpoint, "NVFP4", np.full((1, 8), 0x77, dtype=np.uint8),
        weights_scaling_factor=f32(1.5).reshape(1, 1).astype(ml_dtypes.float8_e4m3fn),
        weights_scaling_factor_2=np.array(0.25, dtype=np.float32),
    )  # fmt: skip
    assert decoded.tolist() == [[2.25] * 16]


def test_weight_only_int8_divides_by_128() -> None:
    """Amax 1.28: scale 0.01; 0.005 is half a step and goes away from zero; amax itself is clipped to 127."""
    codes, scale = quantize_weight_only(f32(1.28, 0.005, -0.005, -1.28).reshape(1, 4), 8)
    assert codes.tolist() == [[127, 1, -1, -128]]
    np.testing.assert_allclose(scale, [0.01], rtol=1e-6)


def test_weight_only_int4_divides_by_8() -> None:
    """Amax 8: scale 1; 8 is clipped to 7, 2.5 rounds to 3."""
    codes, scale = quantize_weight_only(f32(8, 2.5, -8, -2.5).reshape(1, 4), 4)
    assert (codes.tolist(), scale.tolist()) == ([[7, 3, -8, -3]], [1.0])


def test_weight_only_scale_is_kept_in_the_weights_type() -> None:
    """3 / 128 = 0.0234375 is exact in bf16."""
    _, scale = quantize_weight_only(f32(3).reshape(1, 1).astype(ml_dtypes.bfloat16), 8)
    assert scale.dtype == ml_dtypes.bfloat16
    assert scale.astype(np.float32).tolist() == [0.0234375]


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scale = quantize_weight_only(np.zeros((1, 4), dtype=np.float32), 8)
    assert not codes.any()
    assert not scale.any()


def test_weight_only_checkpoints_decode_what_the_build_makes(write_checkpoint: Write) -> None:
    """Amax 8 at 4 bits: 8 -> 7, 2.5 -> 3."""
    assert fc(write_checkpoint, "W4A16", f32(8, 2.5).reshape(1, 2).astype(np.float16)).tolist() == [[7.0, 3.0]]


def test_a_weight_of_another_format_is_refused(write_checkpoint: Write) -> None:
    weight = np.zeros((2, 2), dtype=np.float16)
    with pytest.raises(UserError, match=rf"'{FC}\.weight' is F16, but FP8 stores F8_E4M3"):
        fc(write_checkpoint, "FP8", weight, weights_scaling_factor=f32(1))


def test_zero_points_are_added_after_the_scale(write_checkpoint: Write) -> None:
    """The codes q = 9 and 4 with the zero point 10 and the scale 0.5: (9 - 10) * 0.5 and (4 - 10) * 0.5.

    Stored are q - 8 = 1 and -4, and zero = (8 - 10) * 0.5, [G, O].
    """
    packed = np.array([[(1 & 15) | ((-4 & 15) << 4)]], dtype=np.uint8).view(np.int8)
    zero = f32(-1, -1).reshape(1, 2).astype(ml_dtypes.bfloat16)
    decoded = fc(write_checkpoint, "W4A16_AWQ", packed, weights_scaling_factor=f32(0.5, 0.5).reshape(2, 1), zero=zero)
    assert decoded.tolist() == [[-0.5], [-3.0]]
