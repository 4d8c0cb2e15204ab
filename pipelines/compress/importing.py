"""Write a quantized Hugging Face folder as a TensorRT-LLM checkpoint, with the weights that it has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.given import given_format, import_faults, quantization_of
from pipelines.checkpoint.packings import Fp8Linear, Int4Linear, decode_fp8, decode_int4, fused_fp8, kv_scales
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.verify import expected_tensors
from pipelines.compress.loading import ModelFolder, torch_dtype
from pipelines.compress.one_layer import EMBEDDING, HEAD, NORM
from pipelines.compress.postprocess import corrected
from pipelines.compress.specs import QuantSpec
from pipelines.compress.weight_files import ModelWeights, TensorWriter
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.progress import Progress

_FILE = "rank0.safetensors"
_FLOATS = ("BF16", "F16", "F32")
_LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
_NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}


class _Folder:
    """The tensors of a quantized folder under the names of a TensorRT-LLM checkpoint."""

    def __init__(self, source: ModelFolder, spec: QuantSpec, dtype: str) -> None:
        self._source, self._spec, self._dtype = source, spec, torch_dtype(dtype)
        self.block = quantization_of(source.folder, source.config) or {}
        self._weights = ModelWeights(source)
        self._files = {name: file for path in source.weight_files for file in [TensorFile(path)] for name in file}
        self._tensors = _Tensors(self._files)
        self._family = source.shape.family
        self._layers = range(source.shape.num_hidden_layers)
        self.int4 = given_format(self.block).group_size is not None
        self.points = self.int4 and any(
            (self._int4(layer, module).points != 8).any() for layer in self._layers for module in _LINEARS
        )

    def layer(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is quantized of a layer, by name within it."""
        for module in _LINEARS:
            stored = self._stored_int4(layer, module) if self.int4 else self._stored_fp8(layer, module)
            for leaf, tensor in stored:
                yield f"{module}.{leaf}", tensor
        if self._spec.kv_cache is not KvFormat.AUTO:
            scales = kv_scales(self._tensors, f"model.layers.{layer}.self_attn")
            for name, scale in zip(("kv", "k", "v"), (max(scales), *scales), strict=True):
                yield f"attention.{name}_cache_scaling_factor", torch.tensor([scale])

    def _stored_int4(self, layer: int, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a linear; two neighbouring outputs share a byte."""
        linear = self._int4(layer, module)
        nibbles = linear.codes.view(np.uint8) & 15
        yield "weight", torch.from_numpy((nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8))
        yield "weights_scaling_factor", torch.from_numpy(linear.scales)
        if self.points:
            zero = (8 - linear.points.astype(np.float32)) * linear.scales
            yield "zero", torch.from_numpy(np.ascontiguousarray(zero.T)).to(self._dtype)

    def _stored_fp8(self, layer: int, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        linear = self._fp8(layer, module)
        codes = np.ascontiguousarray(linear.weight).view(np.uint8)
        yield "weight", torch.from_numpy(codes).view(torch.float8_e4m3fn)
        yield "weights_scaling_factor", torch.tensor([linear.scale])
        yield "activation_scaling_factor", torch.tensor([linear.input_scale])

    def _int4(self, layer: int, module: str) -> Int4Linear:
        parts = [decode_int4(self._tensors, name, self.block) for name in self._names(layer, module)]
        merged = [np.concatenate([getattr(part, each) for part in parts]) for each in ("codes", "scales", "points")]
        return Int4Linear(*merged)

    def _fp8(self, layer: int, module: str) -> Fp8Linear:
        return fused_fp8([decode_fp8(self._tensors, name) for name in self._names(layer, module)])

    @staticmethod
    def _names(layer: int, module: str) -> list[str]:
        """Return the linears of the folder that are one in a checkpoint: q, k and v."""
        return [f"model.layers.{layer}.{name}" for name in _LINEARS[module]]

    def plain(self, name: str) -> torch.Tensor:
        """Return a tensor that is not quantized, by its name in the checkpoint."""
        if name == "transformer.vocab_embedding.weight":
            return self._float(EMBEDDING)
        if name == "lm_head.weight":
            return self._float(HEAD if HEAD in self._weights else EMBEDDING)
        if name == "transformer.ln_f.weight":
            return self._norm(NORM)
        _, _, layer, rest = name.split(".", 3)
        module, _, leaf = rest.rpartition(".")
        if leaf == "bias":
            return torch.cat([self._float(f"{each}.bias") for each in self._names(int(layer), module)])
        if module.startswith("attention."):
            head_norm = self._family.head_norms[module.removeprefix("attention.")]
            return self._float(f"model.layers.{layer}.self_attn.{head_norm}.weight")
        return self._norm(f"model.layers.{layer}.{_NORMS[module]}.weight")

    def _norm(self, name: str) -> torch.Tensor:
        return self._float(name) + self._family.norm_offset

    def _float(self, name: str) -> torch.Tensor:
        stored = self._files[name].header[name].dtype if name in self._files else _FLOATS[0]
        if stored not in _FLOATS:
            raise UserError(
                f"'{name}' of {self._source.folder} is {stored}; a checkpoint has it in 16 bit.",
                todo="Give the original model.",
            )
        return self._weights.tensor(name, self._dtype)


class _Tensors(dict[str, Any]):
    """Tensors by name, each from its file when asked for."""

    def __init__(self, files: dict[str, TensorFile]) -> None:
        super().__init__(files)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)[name]


def import_folder(
    source: ModelFolder, out_dir: Path, spec: QuantSpec, world_size: int, dtype: str, progress: Progress
) -> dict[str, Any]:
    """Write the checkpoint of one rank.

    Returns:
        the facts of `pipelines.checkpoint.describe`.

    Raises:
        UserError: the folder cannot be taken over like that, or lacks a tensor.
    """
    if faults := import_faults(
        source.folder,
        source.config,
        qformat=spec.qformat,
        group_size=spec.group_size,
        kv_cache=spec.kv_cache,
        world_size=world_size,
    ):
        raise UserError.of(faults)
    family = source.shape.family
    if set(family.layer_norms) != set(_NORMS) or family.fused_linears or family.experts:
        raise UserError(f"A quantized folder of {family.architecture} cannot be taken over.", todo="Give the original.")
    folder = _Folder(source, spec, dtype)
    out_dir.mkdir(parents=True, exist_ok=True)
    raw = corrected(_config(source, spec, dtype, folder), source.config, spec)
    (out_dir / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    expected = expected_tensors(CheckpointConfig.parse(raw), 0)
    writer = TensorWriter.create(out_dir, {_FILE: {name: (each.dtype, each.shape) for name, each in expected.items()}})
    done = set()
    layers = source.shape.num_hidden_layers
    with progress.task("importing", layers, "layers") as advance:
        for layer in range(layers):
            for leaf, tensor in folder.layer(layer):
                name = f"transformer.layers.{layer}.{leaf}"
                writer.write(_FILE, name, iter([tensor]))
                done.add(name)
            advance(1)
    for name in expected.keys() - done:
        writer.write(_FILE, name, iter([folder.plain(name)]))
    writer.sync()
    return describe(out_dir)


def _config(source: ModelFolder, spec: QuantSpec, dtype: str, folder: _Folder) -> dict[str, Any]:
    """Return what ModelOpt would write into config.json, before it is corrected."""
    shape, config = source.shape, source.config
    return {
        "producer": {"name": "imported", "version": str(folder.block.get("quant_method"))},
        "dtype": dtype,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "hidden_size": shape.hidden_size,
        "norm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": config.get("hidden_activation") or config["hidden_act"],
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": shape.family.head_is_embedding,
        "residual_mlp": False,
        "bias": False,
        "rotary_pct": 1.0,
        "rank": 0,
        "decoder": shape.family.modelopt_type,
        "rmsnorm": True,
        "lm_head_bias": False,
        "mapping": {"tp_size": 1, "pp_size": 1},
        "quantization": {
            "quant_algo": FORMATS[spec.qformat].quant_algo,
            "kv_cache_quant_algo": None if spec.kv_cache is KvFormat.AUTO else "FP8",
            **(
                {"group_size": spec.group_size, "has_zero_point": folder.points, "pre_quant_scale": False}
                if folder.int4
                else {}
            ),
            "exclude_modules": ["lm_head"],
        },
    }
