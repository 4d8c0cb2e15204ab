"""Turn checkpoint weights into OpenVINO constants: packed in the engine file, exact when multiplied.

Every function returns a float32 node of shape [O, I] made of the packed constant, a Convert and a Multiply, the
pattern that the CPU plugin recognizes as a compressed weight. Constants share the checkpoint's memory map where the
layouts agree; what is packed again, such as INT4 and grouped experts, is held in memory until the model is saved.

Measured (2026.4.1, AVX512-VNNI): i4, i8 and f4e2m1 stay packed at run time, f8e4m3 is widened to f32. f16 and bf16 stay
16 bit because `build.py` marks their conversions in the saved graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.checkpoint.read import Checkpoint, quantize_weight_only, unpack_int4, zero_points
from pipelines.domain.errors import UserError
from pipelines.domain.formats import (
    FLOAT_WEIGHTS,
    FP4_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AS_FP8_WEIGHTS,
    INT4_AT_BUILD,
    INT4_WEIGHTS,
    INT8_AT_BUILD,
    INT8_WEIGHTS,
    WeightKind,
)

# Round to 8-bit and 4-bit number formats inside the graph, exact to the last code.
#
# OpenVINO's FakeConvert to f8e4m3 is not used: it goes through f16, which moves values within 2^-11 of a tie onto the
# tie (0.25 % of the values of a tensor get the neighbouring code, which a few layers amplify to 1 % of the logits),
# and it takes 40 ns per value. Adding and subtracting a large number rounds exactly, in a few ns.

E4M3_MAX, E2M1_MAX, NVFP4_BLOCK = 448.0, 6.0, 16

PIECE_ROWS = 4096
"""Rows of a vocabulary rounded at once, in float32."""


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


Array = np.ndarray[Any, Any]
Rows = slice
"""Output channels of a merged linear layer, e.g. the k part of qkv."""

_OV_TYPES = {
    "BF16": ov.Type.bf16,
    "F16": ov.Type.f16,
    "F32": ov.Type.f32,
    "F8_E4M3": ov.Type.f8e4m3,
    "I8": ov.Type.i8,
}


@dataclass
class WeightStore:
    """Creates constants from one checkpoint and keeps their buffers alive until the model is saved."""

    checkpoint: Checkpoint
    _buffers: list[Array] = field(default_factory=list)

    def of(self, checkpoint: Any) -> "WeightStore":
        """Return the store of another checkpoint, a part of this one, whose buffers live as long."""
        return WeightStore(checkpoint, self._buffers)

    def raw(self, values: Array, element_type: ov.Type, shape: list[int]) -> ov.Node:
        """Return a constant over the bytes of `values`; shared, so the array is kept."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._buffers.append(flat)
        return op.constant(ov.Tensor(flat, ov.Shape(shape), element_type), shared_memory=True)

    def stored(self, name: str, rows: Rows = slice(None)) -> ov.Node:
        """Return a tensor as it is stored, in its own element type."""
        values = self.checkpoint.tensor(name)
        values = values[rows] if values.ndim else values
        return self.raw(values, _OV_TYPES[self.checkpoint.dtype(name)], list(values.shape))

    def float32(self, name: str) -> Array:
        """Return a small tensor (scale, norm) as float32 numpy."""
        return self.checkpoint.tensor(name).astype(np.float32)

    def scalar(self, name: str) -> np.float32:
        """Return a per-tensor scale.

        Raises:
            UserError: the tensor holds more than one value, or one that is not a positive number.
        """
        values = self.float32(name).reshape(-1)
        if values.size != 1 or not np.isfinite(values[0]) or values[0] <= 0:
            raise UserError(
                f"{self.checkpoint.folder}: '{name}' is {values[:4]}.", allowed="It must be one positive number."
            )
        return np.float32(values[0])

    def weight(self, module: str, rows: Rows = slice(None)) -> ov.Node:
        """Return the weight of a linear layer in its own format, float32 [O, I]."""
        return _BUILDERS[self.checkpoint.config.format_of(module).weights](self, module, rows)

    def stacked(self, parts: Sequence[Any], module: str, *pieces: Rows) -> ov.Node:
        """Return the weights of one linear layer of all experts, packed as each alone is.

        Args:
            parts: stand for the checkpoint of one expert each.
            module: the linear layer.
            pieces: output channels, O of each; of several, the channels alternate.

        Returns:
            float32 [E, pieces O, I].
        """
        stores = [WeightStore(part) for part in parts]  # each owns what is packed, until it is copied
        return self._stacked([[store.weight(module, rows) for rows in pieces] for store in stores])

    def _stacked(self, nodes: Sequence[Sequence[ov.Node]]) -> ov.Node:
        first, kind = nodes[0][0], nodes[0][0].get_type_name()
        out, *rest = first.get_output_shape(0)
        shape = [len(nodes), len(nodes[0]) * out, *rest]
        if kind == "Constant":
            experts = [np.stack([node.data.reshape(out, -1) for node in pieces], axis=1) for pieces in nodes]
            return self.raw(np.stack(experts), first.get_output_element_type(0), shape)
        inputs = [
            self._stacked([[node.input_value(at).get_node() for node in pieces] for pieces in nodes])
            for at in range(1 if kind == "Reshape" else first.get_input_size())
        ]
        if kind == "Reshape":
            return op.reshape(*inputs, np.array(shape, dtype=np.int64), special_zero=False)
        return {"Convert": _widen, "Multiply": op.multiply, "Subtract": op.subtract}[kind](*inputs)

    def int8_rows(self, module: str) -> ov.Node:
        """Return a 16-bit weight rounded to INT8 with a scale per row, as float32 [O, I].

        Raises:
            UserError: the checkpoint has quantized it already.
        """
        name = f"{module}.weight"
        if (stored := self.checkpoint.dtype(name)) not in ("BF16", "F16", "F32"):
            raise UserError(
                f"engine.openvino.head_precision=int8: the checkpoint's '{name}' is quantized already, to {stored}.",
                allowed="It rounds a head in 16 bits.",
                todo="Leave it out.",
            )
        values = self.checkpoint.tensor(name)
        starts = range(0, len(values), PIECE_ROWS)
        pieces = [quantize_weight_only(values[start : start + PIECE_ROWS], 8) for start in starts]
        codes, scale = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        packed = self.raw(codes, ov.Type.i8, list(codes.shape))
        return op.multiply(_widen(packed), _const(scale.astype(np.float32)[:, None]))

    def _plain(self, module: str, rows: Rows) -> ov.Node:
        return _widen(self.stored(f"{module}.weight", rows))

    def _fp8(self, module: str, rows: Rows) -> ov.Node:
        scale = self.scalar(f"{module}.weights_scaling_factor")
        return op.multiply(_widen(self.stored(f"{module}.weight", rows)), _const(scale))

    def _int8(self, module: str, rows: Rows) -> ov.Node:
        scale = self.float32(f"{module}.weights_scaling_factor")[rows][:, None]
        return op.multiply(_widen(self.stored(f"{module}.weight", rows)), _const(scale))

    def _grouped_int4(self, module: str, rows: Rows, *, unsigned: bool = False) -> tuple[ov.Node, Array]:
        """Return codes (plus 8 if unsigned) as float32 [O, G, I/G] and the scales [O, G, 1]; I/G = group_size."""
        scale = self.float32(f"{module}.weights_scaling_factor")[rows]
        codes = unpack_int4(self.checkpoint.tensor(f"{module}.weight")[_byte_rows(rows)])
        packed = _pack_int4(codes + np.int8(8) if unsigned else codes)
        shape = [*scale.shape, codes.shape[1] // scale.shape[1]]
        return _widen(self.raw(packed, ov.Type.u4 if unsigned else ov.Type.i4, shape)), scale[:, :, None]

    def _int4(self, module: str, rows: Rows) -> ov.Node:
        zeros = zero_points(self.checkpoint, module)
        codes, scale = self._grouped_int4(module, rows, unsigned=zeros is not None)
        if zeros is not None:
            codes = op.subtract(codes, self._zero_points(8 - zeros[rows] / scale[:, :, 0]))
        return _flatten(op.multiply(codes, _const(scale)))

    def _zero_points(self, points: Array) -> ov.Node:
        """Return zero points [O, G] as float32 [O, G, 1], stored as integers where they are ones.

        The plugin multiplies about three times as fast with integers. The checkpoint has them times the scale, in 16
        bit, which moves them by less than 0.04.
        """
        whole = np.rint(points)
        if np.abs(points - whole).max() > 0.05 or whole.min() < 0:
            return _const(points[:, :, None])
        return _widen(self.raw(whole.astype(np.uint8), ov.Type.u8, [*points.shape, 1]))

    def _int4_as_fp8(self, module: str, rows: Rows) -> ov.Node:
        """Return INT4 widened to FP8 with scale / scale_2, as in the kernel, and then multiplied by scale_2."""
        second = self.scalar(f"{module}.weights_scaling_factor_2")
        codes, scale = self._grouped_int4(module, rows)
        widened = op.multiply(codes, _const(scale / second))
        return op.multiply(_flatten(round_e4m3(widened)), _const(second))

    def _fp4(self, module: str, rows: Rows) -> ov.Node:
        """Return FP4 codes times (E4M3 block scale times the tensor's scale)."""
        packed = self.checkpoint.tensor(f"{module}.weight")[rows]
        blocks = self.checkpoint.tensor(f"{module}.weights_scaling_factor")[rows]
        out, groups = blocks.shape
        codes = _widen(self.raw(packed, ov.Type.f4e2m1, [out, groups, 2 * packed.shape[1] // groups]))
        scale = blocks.astype(np.float32) * self.scalar(f"{module}.weights_scaling_factor_2")
        return _flatten(op.multiply(codes, _const(scale[:, :, None])))

    def _weight_only(self, module: str, rows: Rows, bits: int) -> ov.Node:
        codes, scale = quantize_weight_only(self.checkpoint.tensor(f"{module}.weight")[rows], bits)
        if bits == 4:
            packed = self.raw(_pack_int4(codes), ov.Type.i4, list(codes.shape))
        else:
            packed = self.raw(codes, ov.Type.i8, list(codes.shape))
        return op.multiply(_widen(packed), _const(scale.astype(np.float32)[:, None]))


_BUILDERS: dict[WeightKind, Callable[[WeightStore, str, Rows], ov.Node]] = {
    FLOAT_WEIGHTS: WeightStore._plain,
    FP8_WEIGHTS: WeightStore._fp8,
    INT8_WEIGHTS: WeightStore._int8,
    INT4_WEIGHTS: WeightStore._int4,
    INT4_AS_FP8_WEIGHTS: WeightStore._int4_as_fp8,
    FP4_WEIGHTS: WeightStore._fp4,
    INT8_AT_BUILD: lambda store, module, rows: store._weight_only(module, rows, 8),
    INT4_AT_BUILD: lambda store, module, rows: store._weight_only(module, rows, 4),
}


def _const(values: Array | np.float32) -> ov.Node:
    return op.constant(np.asarray(values, dtype=np.float32))


def _widen(node: ov.Node) -> ov.Node:
    return op.convert(node, "f32")


def _flatten(grouped: ov.Node) -> ov.Node:
    """Reshape [O, G, I/G] -> [O, I]."""
    out, groups, size = grouped.get_output_shape(0)
    return op.reshape(grouped, np.array([out, groups * size], dtype=np.int64), special_zero=False)


def _byte_rows(rows: Rows) -> Rows:
    """Convert output channels to rows of the packed tensor, which holds two channels per byte."""
    start, stop = rows.start or 0, rows.stop
    if start % 2 or (stop or 0) % 2:
        raise UserError(f"Output channels {start}:{stop} split an INT4 byte.", allowed="Both must be even.")
    return slice(start // 2, None if stop is None else stop // 2)


def _pack_int4(codes: Array) -> Array:
    """Pack int8 codes [O, I] for OpenVINO: adjacent *input* channels share a byte, the first in the low nibble."""
    nibbles = codes.view(np.uint8) & 0x0F
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
