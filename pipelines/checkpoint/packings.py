"""Tensor layouts of other quantization libraries, and their conversion to ModelOpt's.

Shape legend: O output channels, I input channels, G groups of input channels. Eight values of 4 bits share an int32.

- AutoGPTQ 0.7.1 and GPTQModel 7.7 (`nn_modules/qlinear`): qweight [I/8, O], neighbouring inputs in a value, the first
  in the lowest bits; qzeros [G, O/8] likewise; scales [G, O]; g_idx int32 [I], the group of each input. Version 1 packs
  zero points and then takes 0x11111111 from the word, so that a zero point of 0 borrows from its neighbour.
- AutoRound 0.16: the same without g_idx, or as AutoAWQ. Scales are negative where a group's largest value is positive.
- AutoAWQ 0.2.9 (`modules/linear/gemm.py`): qweight [I, O/8], qzeros [G, O/8] and scales [G, O]; neighbouring outputs in
  a value, in the order 0, 2, 4, 6, 1, 3, 5, 7.
- compressed-tensors 0.20 (`compressors/pack_quantized`): weight_packed [O, I/8] of codes from -8 to 7, stored plus 8,
  the first in the lowest bits; weight_scale [O, G]; weight_zero_point [O/8, G], stored plus 8, if not symmetric.

A weight is (code - zero point) * scale.

In FP8, a linear has `weight` [O, I], `weight_scale` and `input_scale`, one number each; Transformers 5 names them
`weight_scale_inv` and `activation_scale`, and means the same. Scales of the KV cache:

- ModelOpt 0.47 (`export_hf_checkpoint`): self_attn.k_proj.k_scale and self_attn.v_proj.v_scale.
- compressed-tensors 0.20: self_attn.k_scale and self_attn.v_scale.
- AutoFP8 0.1: not read.

ModelOpt's other formats (`export/unified_export_hf.py`) are packed as in its checkpoint for TensorRT-LLM, under other
names: see `decode_modelopt`. AWQ's scales of activations are folded into the norm before q, k and v, and into that
before gate and up; those linears then have no `pre_quant_scale`. compressed-tensors in INT8 and in NVFP4 has the same
values under other names, and the inverse of what ModelOpt calls scale_2: see `as_modelopt`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipelines.checkpoint.unified import LEAVES
from pipelines.domain.errors import UserError

Array = np.ndarray[Any, Any]

_FLOATS = {"float32", "float16", "bfloat16"}
_OF_OUTPUTS = ("weight", "weights_scaling_factor")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC = 8


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A linear in INT4 with a scale for each group of inputs.

    Attributes:
        codes: int8 [O, I], -8 to 7.
        scales: float32 [O, G].
        points: zero points, [O, G]; 8 is symmetric.
    """

    codes: Array
    scales: Array
    points: Array


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A linear in FP8 with one scale.

    Attributes:
        weight: float8_e4m3fn [O, I].
    """

    weight: Array
    scale: float
    input_scale: float


def decode_fp8(tensors: Mapping[str, Array], name: str) -> Fp8Linear:
    """Return a linear of a folder in FP8.

    Args:
        tensors: of the folder.
        name: of the linear, e.g. "model.layers.0.mlp.up_proj".

    Raises:
        UserError: a tensor is missing, is not FP8, or a scale is not one number.
    """
    find = _Leaves(tensors, name)
    weight = find["weight"]
    if str(weight.dtype) != "float8_e4m3fn":
        raise UserError(
            f"'{name}.weight' is {weight.dtype}; config.json says that every linear of the layers is in FP8.",
            todo="Give the original model.",
        )
    scale, inputs = (
        other if other in find else usual
        for usual, other in (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale"))
    )
    return Fp8Linear(weight, _one(find[scale], f"{name}.{scale}"), _one(find[inputs], f"{name}.{inputs}"))


def fused_fp8(parts: Sequence[Fp8Linear]) -> Fp8Linear:
    """Put q, k and v into one linear with the largest scale, as TensorRT-LLM does when it loads such a folder.

    A part with another scale is rounded anew, as its values have to be multiples of the common scale.
    Source: `tensorrt_llm/_torch/modules/linear.py`, `rescale_fused_weights`.
    """
    scale = max(part.scale for part in parts)
    weights = [
        part.weight
        if part.scale == scale
        else (part.weight.astype(np.float32) * np.float32(part.scale / scale)).astype(part.weight.dtype)
        for part in parts
    ]
    return Fp8Linear(np.concatenate(weights), scale, max(part.input_scale for part in parts))


def decode_modelopt(
    tensors: Mapping[str, Array], names: Sequence[str], expected: Mapping[str, tuple[Any, tuple[int, ...]]]
) -> dict[str, Array]:
    """Return the tensors of one linear of a checkpoint, from a folder of ModelOpt that is not in FP8.

    ModelOpt gives linears that are computed together the same scales for activations, and a common one over those of
    the groups. TensorRT-LLM asserts that (`_torch/modules/linear.py`), and so does this.

    Args:
        tensors: of the folder.
        names: linears that are one in a checkpoint: q, k and v.
        expected: tensor of the linear -> its type and shape in the checkpoint.

    Raises:
        UserError: a tensor is missing or has another shape, or linears differ in a scale that they must share.
    """
    linear = {}
    for leaf, (dtype, shape) in expected.items():
        of = LEAVES[leaf]
        if leaf == "prequant_scaling_factor" and not any(f"{name}.{of}" in tensors for name in names):
            linear[leaf] = np.ones(shape, dtype)  # nothing is multiplied
            continue
        parts = [_Leaves(tensors, name)[of] for name in names]
        if leaf in _OF_OUTPUTS:
            fits = all(part.shape[1:] == shape[1:] for part in parts) and sum(map(len, parts)) == shape[0]
        else:
            fits = all(part.size == np.prod(shape, dtype=int) for part in parts)
        if not fits:
            raise UserError(
                f"'{names[0]}.{of}' is {list(parts[0].shape)}, which does not match {list(shape)} in a checkpoint.",
                todo="Download the model again.",
            )
        if leaf not in _OF_OUTPUTS:
            for name, part in zip(names, parts, strict=True):
                if not np.array_equal(part, parts[0]):
                    raise UserError(
                        f"'{name}.{of}' differs from '{names[0]}.{of}'; TensorRT-LLM computes them with one.",
                        todo="Give the original model.",
                    )
        value = np.concatenate(parts) if leaf in _OF_OUTPUTS else parts[0]
        linear[leaf] = _as(value, np.dtype(dtype), f"{names[0]}.{of}").reshape(shape)
    return linear


def as_modelopt(tensors: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Return a linear that compressed-tensors stored in INT8 or NVFP4, under the names and in the units of ModelOpt.

    Raises:
        UserError: a tensor is missing.
    """
    find = _Leaves(tensors, name)
    if "weight_packed" not in find:
        leaves = {"weight": find["weight"], "weight_scale": find["weight_scale"].reshape(-1)}
        return {f"{name}.{leaf}": each for leaf, each in (leaves | {"input_scale": find["input_scale"]}).items()}
    leaves = {"weight": find["weight_packed"], "weight_scale": find["weight_scale"]}
    for leaf, inverse in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
        leaves[leaf] = (1 / find[inverse].astype("float32")).astype("float32")
    return {f"{name}.{leaf}": each for leaf, each in leaves.items()}


def _as(value: Array, dtype: Any, name: str) -> Array:
    """Convert scales between float types; keep the bits of packed values, U8 in one place and I8 in another."""
    if (value.dtype.name, dtype.name) in (("uint8", "int8"), ("int8", "uint8")):
        return value.view(dtype)
    if value.dtype != dtype and not {value.dtype.name, dtype.name} <= _FLOATS:
        raise UserError(f"'{name}' is {value.dtype}; it must be {dtype}.", todo="Give the original model.")
    converted: Array = value.astype(dtype)
    return converted


def kv_scales(tensors: Mapping[str, Array], attention: str) -> tuple[float, float]:
    """Return the scales of K and V of a folder whose KV cache is FP8, at least 1 as ModelOpt recommends and exports.

    Args:
        tensors: of the folder.
        attention: the module, e.g. "model.layers.0.self_attn".

    Raises:
        UserError: there is none, or it is not one number.
    """
    scales = []
    for one in ("k", "v"):
        names = (f"{attention}.{one}_proj.{one}_scale", f"{attention}.{one}_scale")
        name = next((name for name in names if name in tensors), None)
        if name is None:
            raise UserError(f"The folder lacks the tensor '{names[0]}'.", todo="Set kv_cache=auto.")
        scales.append(max(1.0, _one(tensors[name], name)))
    return scales[0], scales[1]


def _one(scale: Array, name: str) -> float:
    if scale.size != 1:
        raise UserError(
            f"'{name}' holds {scale.size} scales; TensorRT-LLM's FP8 has one for a linear.",
            todo="Give the original model.",
        )
    return float(scale.reshape(()).astype("float32"))


def decode_int4(tensors: Mapping[str, Array], name: str, packing: str, group_size: int | None = None) -> Int4Linear:
    """Return a linear of a folder in INT4.

    Args:
        tensors: of the folder.
        name: of the linear, e.g. "model.layers.0.mlp.up_proj".
        packing: "gptq", "gptq_v2", "awq" or "pack-quantized".
        group_size: of the checkpoint; a longer group becomes several with the same scale. None leaves it.

    Raises:
        UserError: a tensor is missing, or its shape conflicts with the others'.
    """
    find = _Leaves(tensors, name)
    linear = _UNPACKED[packing](find)
    (out, inputs), groups = linear.codes.shape, linear.scales.shape
    if linear.points.shape != groups or groups[0] != out or inputs % groups[1]:
        raise UserError(
            f"The tensors of '{name}' do not match: {out} x {inputs} weights, scales {list(groups)}, zero points"
            f" {list(linear.points.shape)}.",
            todo="Download the model again.",
        )
    if group_size is None:
        return linear
    parts = max(1, inputs // groups[1] // group_size)
    return Int4Linear(linear.codes, np.repeat(linear.scales, parts, 1), np.repeat(linear.points, parts, 1))


class _Leaves:
    def __init__(self, tensors: Mapping[str, Array], name: str) -> None:
        self._tensors, self._name = tensors, name

    def __contains__(self, leaf: str) -> bool:
        return f"{self._name}.{leaf}" in self._tensors

    def __getitem__(self, leaf: str) -> Array:
        if leaf not in self:
            raise UserError(f"The folder lacks the tensor '{self._name}.{leaf}'.", todo="Download the model again.")
        return self._tensors[f"{self._name}.{leaf}"]


def _gptq(find: _Leaves, taken: int = 0) -> Int4Linear:
    """`taken` from each word of zero points before it was stored: see the note on version 1 at the top."""
    zeros = find["qzeros"].view(np.uint32) + np.uint32(taken)
    return _linear(_nibbles(find["qweight"].T), find["scales"].T, _nibbles(zeros).T)


def _awq(find: _Leaves) -> Int4Linear:
    codes, points = (_in_order(_nibbles(find[leaf])) for leaf in ("qweight", "qzeros"))
    return _linear(codes.T, find["scales"].T, points.T)


def _compressed(find: _Leaves) -> Int4Linear:
    codes, scales = _nibbles(find["weight_packed"]), find["weight_scale"]
    if "weight_zero_point" in find:
        points = _nibbles(find["weight_zero_point"].T).T
    else:
        points = np.full(scales.shape, SYMMETRIC, np.uint8)
    return _linear(codes, scales, points)


_UNPACKED: dict[str, Callable[[_Leaves], Int4Linear]] = {
    "gptq": partial(_gptq, taken=0x11111111),
    "gptq_v2": _gptq,
    "awq": _awq,
    "pack-quantized": _compressed,
}


def _linear(codes: Array, scales: Array, points: Array) -> Int4Linear:
    signed = np.ascontiguousarray(codes).astype(np.int8) - np.int8(SYMMETRIC)
    return Int4Linear(signed, np.ascontiguousarray(scales.astype(np.float32)), points)


def _nibbles(packed: Array) -> Array:
    """Unpack int32 [R, C] to eight values each, the first from the lowest bits: uint8 [R, 8 C]."""
    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    nibbles: Array = ((words >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).astype(np.uint8)
    return nibbles.reshape(packed.shape[0], -1)


def _in_order(values: Array) -> Array:
    """Put values as AutoAWQ packs them, eight by eight, in the order of outputs."""
    eights = values.reshape(len(values), -1, 8)
    ordered: Array = eights[..., np.argsort(_AWQ_ORDER)].reshape(values.shape)
    return ordered
