"""Round to 8-bit and 4-bit number formats inside the graph, exact to the last code.

OpenVINO's FakeConvert to f8e4m3 is not used: it goes through f16, which moves values within 2^-11 of a tie onto the
tie (0.25 % of the values of a tensor get the neighbouring code, which a few layers amplify to 1 % of the logits),
and it takes 40 ns per value. Adding and subtracting a large number rounds exactly, in a few ns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

E4M3_MAX, E2M1_MAX, NVFP4_BLOCK = 448.0, 6.0, 16


def round_e4m3(x: ov.Node) -> ov.Node:
    """Round to the nearest E4M3 value, ties to even, saturating at +-448.

    E4M3 values are 2^(e-3) apart in [2^e, 2^(e+1)) and 2^-9 apart below 2^-6. A float32 a little below 2^20 |x| has
    the same spacing (just below a power of two half of it, which still rounds to that power), and near 1.5 * 2^14 the
    spacing is 2^-9. So subtracting the larger of the two from |x| and adding it back rounds |x| as required.
    """
    bounded = _in_float32(op.clamp(x, -E4M3_MAX, E4M3_MAX))
    size = _in_float32(op.abs(bounded))
    large = _in_float32(op.maximum(_in_float32(op.multiply(size, scalar(2.0**20))), scalar(1.5 * 2.0**14)))
    # negated separately: the plugin rewrites a Subtract, and a Multiply by -1, without the float32 mark
    minus = _in_float32(op.minimum(_in_float32(op.multiply(size, scalar(-(2.0**20)))), scalar(-1.5 * 2.0**14)))
    rounded = _in_float32(op.add(_in_float32(op.add(size, minus)), large))
    return _in_float32(op.multiply(rounded, _in_float32(op.sign(bounded))))


def to_fp8(x: ov.Node, scale: np.float32) -> ov.Node:
    """Round to multiples of `scale` that are E4M3 values."""
    scaled = _in_float32(op.multiply(x, scalar(np.float32(1) / scale)))
    return _in_float32(op.multiply(round_e4m3(scaled), scalar(scale)))


def to_int8(x: ov.Node, scale: np.float32) -> ov.Node:
    """Round to the 256 multiples of `scale` from -128 to 127."""
    low, high = scalar(np.float32(-128) * scale), scalar(np.float32(127) * scale)
    return op.fake_quantize(x, low, high, low, high, levels=256)


def to_nvfp4(x: ov.Node, scale: np.float32) -> ov.Node:
    """Round blocks of 16 values to E2M1 under an E4M3 block scale: the block's largest value becomes 6.

    E2M1 has steps of 0.5 below 2, 1 below 4 and 2 up to 6; rounding m / step half to even, times step, is its
    round-to-nearest-even. A block whose scale rounds to (nearly) 0 is divided by 1, as ModelOpt's kernel does.

    Args:
        x: float32 [B, T, I], I a multiple of 16.
        scale: amax of the tensor / (6 * 448), i.e. `activation_scaling_factor`.
    """
    blocked = op.reshape(x, np.array([0, 0, -1, NVFP4_BLOCK], dtype=np.int64), special_zero=True)
    magnitude = op.abs(blocked)
    block_max = op.reduce_max(magnitude, np.array([-1], dtype=np.int64), keep_dims=True)
    block_scale = to_fp8(_in_float32(op.multiply(block_max, scalar(1 / E2M1_MAX))), scale)
    block_scale = _in_float32(op.select(op.less(block_scale, scalar(1e-5)), scalar(1), block_scale))
    ratio = _in_float32(op.divide(magnitude, block_scale))
    scaled = _in_float32(op.minimum(ratio, scalar(E2M1_MAX)))
    step = _in_float32(op.select(op.less(scaled, scalar(4)), scalar(1), scalar(2)))
    step = _in_float32(op.select(op.less(scaled, scalar(2)), scalar(0.5), step))
    codes = _in_float32(op.round(_in_float32(op.divide(scaled, step)), "half_to_even"))
    rounded = _in_float32(op.multiply(codes, step))
    signed = _in_float32(op.multiply(_in_float32(op.multiply(rounded, op.sign(blocked))), block_scale))
    return op.reshape(signed, op.shape_of(x), special_zero=False)


def scalar(value: Any) -> ov.Node:
    """Return a float32 constant with one value."""
    return op.constant(np.float32(value))


def _in_float32(node: ov.Node) -> ov.Node:
    """Mark a node to be computed in float32 under a bf16 hint; effective once the model was saved and read."""
    node.set_rt_info("", "precise_0")
    return node
