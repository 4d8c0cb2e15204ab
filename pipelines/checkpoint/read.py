"""Read a TensorRT-LLM checkpoint folder as full-model tensors, whatever tp_size and pp_size it was split for.

Rank files: rank = pp_rank * tp_size + tp_rank. Tensor parallelism splits qkv, fc, gate, lm_head and the embedding
along the output dimension, dense and proj along the input dimension; scales are split like their weights, and
scalars are repeated. A mixture's experts are split alike, up | gate in one tensor: rank r holds part r // moe_ep_size
of each expert of group r % moe_ep_size, which without expert parallelism is every expert. Each rank's qkv is q | k | v
of its own heads; with fewer KV heads than ranks, a KV head is repeated on neighbouring ranks. Pipeline parallelism
gives each stage its own layers, numbered from 0.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.tensors import TensorFile, numpy_dtype
from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import FLOAT_WEIGHTS, FP8_WEIGHTS, INT4_AS_FP8_WEIGHTS, INT4_WEIGHTS, INT8_WEIGHTS

Array = np.ndarray[Any, Any]

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")

OUTPUT_SPLIT = ("mlp.fc", "mlp.gate", "lm_head", "transformer.vocab_embedding")
"""Modules whose output dimension is split across tensor-parallel ranks (qkv too, by heads)."""
INPUT_SPLIT = ("attention.dense", "mlp.proj")
"""Modules whose input dimension is split across tensor-parallel ranks."""


class Checkpoint:
    """An open checkpoint: headers are read at once, tensors are mapped and merged on request.

    Attributes:
        ranks: the rank files, in order, without merging.
    """

    def __init__(self, folder: Path) -> None:
        """Read config.json and the header of every rank file.

        Raises:
            UserError: a file is missing or damaged, or ranks contain different tensors.
        """
        self.folder, self.config = folder, CheckpointConfig.load(folder)
        self.ranks = [TensorFile(folder / f"rank{rank}.safetensors") for rank in range(self.config.world_size)]
        self._places = self._find_tensors()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor in safetensors spelling; reads no data.

        Raises:
            UserError: the checkpoint has no such tensor.
        """
        files, stored = self._place(name)
        return files[0].header[stored].dtype

    def tensor(self, name: str) -> Array:
        """Return a full-model tensor: a view of the file if it was not split, otherwise a merged copy.

        Raises:
            UserError: the checkpoint has no such tensor, or ranks disagree about a shared scale.
        """
        files, stored = self._place(name)
        parts = [file[stored] for file in files]
        if self._of_experts(name, parts[0].ndim) and (size := self.config.moe_ep_size) > 1:
            # whole experts of neighbouring ranks
            parts = [np.concatenate(parts[start : start + size]) for start in range(0, len(parts), size)]
        if len(parts) == 1:
            return parts[0]
        shape = parts[0].shape
        axis = None if len(shape) == 2 and self._of_experts(name, 2) else split_axis(name, shape)
        if axis is None:
            self._check_same(name, parts)
            return parts[0]
        if ".attention.qkv." in name:
            return self._merge_qkv(parts) if axis == 0 else self._merge_qkv([part.T for part in parts]).T
        if ".mlp.fc.weight" in name and (axis == 1 or FAMILIES[self.config.architecture].fused_linears):
            # of each rank's expert or MLP, up comes before gate
            parts = [np.split(part, 2, axis=axis)[half] for half in range(2) for part in parts]
        merged: Array = np.concatenate(parts, axis=axis)
        return merged[: len(merged) - self._padded_rows(name, len(merged))]

    def _of_experts(self, name: str, dimensions: int) -> bool:
        """Return whether the first dimension is the experts': of weights, and of FP8's scales [E, 1]."""
        scale = dimensions == 2 and name.endswith(".weights_scaling_factor") and ".mlp." in name
        return self.config.experts is not None and (dimensions == 3 or scale)

    def _place(self, name: str) -> tuple[list[TensorFile], str]:
        if name not in self._places:
            raise UserError(
                f"{self.folder} has no tensor '{name}'.", todo="Export the checkpoint again; part of it is missing."
            )
        return self._places[name]

    def _find_tensors(self) -> dict[str, tuple[list[TensorFile], str]]:
        """Map full-model name -> (rank files that contain parts of the tensor, its name in them)."""
        tp_size, places, layers_before = self.config.tp_size, {}, 0
        for stage in range(self.config.pp_size):
            files = self.ranks[stage * tp_size : (stage + 1) * tp_size]
            self._check_same_names(files)
            layers = 0
            for stored in files[0]:
                match = _LAYER.fullmatch(stored)
                layers = max(layers, int(match[1]) + 1) if match else layers
                name = f"transformer.layers.{layers_before + int(match[1])}.{match[2]}" if match else stored
                places[name] = (files, stored)
            layers_before += layers
        if layers_before != self.config.num_hidden_layers:
            raise UserError(
                f"{self.folder} has {layers_before} layers; its config.json says {self.config.num_hidden_layers}.",
                todo="Export the checkpoint again.",
            )
        return places

    def _check_same_names(self, files: list[TensorFile]) -> None:
        for file in files[1:]:
            different = sorted(set(files[0]) ^ set(file))
            if different:
                raise UserError(
                    f"{file.path} and {files[0].path.name} contain different tensors: '{different[0]}' is only in one"
                    f" of them ({len(different)} differ).",
                    todo="Export the checkpoint again; rank files of different exports are mixed.",
                )

    def _check_same(self, name: str, parts: list[Array]) -> None:
        for rank, part in enumerate(parts[1:], start=1):
            if not np.array_equal(parts[0], part):
                raise UserError(
                    f"{self.folder}: '{name}' differs between tensor-parallel ranks 0 and {rank}.",
                    allowed="It is not split, so every rank must hold the same values.",
                )

    def _padded_rows(self, name: str, rows: int) -> int:
        """Number of zero rows that the exporter appended to make the vocabulary divisible by tp_size."""
        is_vocab = name.startswith(("transformer.vocab_embedding.", "lm_head."))
        return max(rows - self.config.vocab_size, 0) if is_vocab else 0

    def _qkv_rows(self, rank_rows: int) -> tuple[int, int]:
        """Number of rows of q and of k (= v) in one rank; packed INT4 has two output channels per row."""
        q_heads = self.config.num_attention_heads // self.config.tp_size
        kv_heads = max(self.config.num_key_value_heads // self.config.tp_size, 1)
        head_rows, rest = divmod(rank_rows, q_heads + 2 * kv_heads)
        if rest:
            raise UserError(
                f"{self.folder}: a qkv tensor has {rank_rows} rows per rank, which cannot be divided evenly among"
                f" {q_heads} query and 2 x {kv_heads} KV heads."
            )
        return q_heads * head_rows, kv_heads * head_rows

    def _merge_qkv(self, parts: list[Array]) -> Array:
        q, kv = self._qkv_rows(len(parts[0]))
        owners = parts[:: max(self.config.tp_size // self.config.num_key_value_heads, 1)]  # the others repeat a head
        blocks = [part[:q] for part in parts] + [part[q : q + kv] for part in owners]
        return np.concatenate(blocks + [part[q + kv :] for part in owners], axis=0)


def split_axis(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which tensor parallelism splits a tensor, or None if every rank holds all of it.

    Args:
        name: tensor name; the layer number does not matter.
        shape: shape of the tensor or of a rank's part; distinguishes per-tensor from per-channel scales.
    """
    module, _, leaf = name.rpartition(".")
    if shape in ((), (1,)):
        return None
    if len(shape) == 3:  # experts
        return 1 if module.endswith("mlp.fc") else 2
    if leaf == "zero":  # [G, O], the other way round than scales
        return 0 if module.endswith(INPUT_SPLIT) else 1
    if module.endswith(OUTPUT_SPLIT) or module.endswith("attention.qkv"):
        return 0 if leaf in ("weight", "bias", "weights_scaling_factor", "per_channel_scale") else None
    if module.endswith(INPUT_SPLIT):
        if leaf == "weight":
            return 1
        if leaf == "weights_scaling_factor":
            return 1 if len(shape) == 2 else None  # grouped scales follow the input, per-channel ones do not
        return 0 if leaf == "prequant_scaling_factor" else None
    return None


# Integer codes of quantized weights: unpack and check those of a checkpoint, compute those of weight-only formats.
#
# Shape legend: O output channels, I input channels. What each format stores: `reference/trtllm_facts.md` 3.5.


def unpack_int4(packed: Array) -> Array:
    """Unpack AWQ weights [O/2, I] to signed codes [O, I] int8.

    A byte holds two neighbouring *output* channels: row 2o in the low nibble, row 2o + 1 in the high one.
    """
    raw = packed.view(np.uint8)
    codes = np.stack([raw & 0x0F, raw >> 4], axis=1).reshape(2 * raw.shape[0], raw.shape[1])
    signed: Array = (codes ^ 8).astype(np.int8) - np.int8(8)  # (c ^ 8) - 8 sign-extends 4 bits
    return signed


def zero_points(checkpoint: Checkpoint, module: str) -> Array | None:
    """Return what is added to each group of an INT4 weight after its scale, float32 [O, G]; None without zero points.

    With the code q = 0..15 of a weight and the zero point z, code = q - 8 is stored, and zero = (8 - z) * scale.
    Source: TensorRT-LLM `quantization/layers.py` (WeightOnlyGroupwiseQuantLinear).
    """
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
    stored, expected = checkpoint.dtype(name), form.weights.stored
    if stored != expected:
        raise UserError(
            f"{checkpoint.folder}: '{name}' is {stored}, but {form.quant_algo} stores {expected}.",
            allowed="A module left in 16 bit must be named in quantization.exclude_modules.",
        )


# Dequantize to float32: the reference for the arithmetic of engines, in tests and diagnoses.
#
# scale = amax / maxbound, so weight = code * scale. The result is the weight as the kernel multiplies it with the
# *prequantized* activation: a linear computes dequantized_OI @ (prequant_scaling_factor_I * x_I). G groups of input
# channels share a scale.

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
