"""Write a quantized Hugging Face folder as a TensorRT-LLM checkpoint, without changing a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.checkpoint.config import CheckpointConfig
from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.given import import_faults, quantization_of
from pipelines.checkpoint.packings import GivenLinear, decode
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.verify import expected_tensors
from pipelines.compress.loading import ModelFolder, torch_dtype
from pipelines.compress.one_layer import EMBEDDING, HEAD, NORM
from pipelines.compress.postprocess import corrected
from pipelines.compress.specs import QuantSpec
from pipelines.compress.weight_files import ModelWeights, TensorWriter
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress

_FILE = "rank0.safetensors"
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

    def __init__(self, source: ModelFolder, dtype: str) -> None:
        self._source, self._dtype = source, torch_dtype(dtype)
        self._weights, self._block = ModelWeights(source), quantization_of(source.config) or {}
        self._files = {name: file for path in source.weight_files for file in [TensorFile(path)] for name in file}
        self._family = source.shape.family

    def linear(self, layer: int, module: str) -> GivenLinear:
        """Decode a linear; q, k and v are one."""
        names = [f"model.layers.{layer}.{name}" for name in _LINEARS[module]]
        parts = [decode(_Tensors(self._files), name, self._block) for name in names]
        merged = [np.concatenate([getattr(part, each) for part in parts]) for each in ("codes", "scales", "points")]
        return GivenLinear(*merged)

    def plain(self, name: str) -> torch.Tensor:
        """Return a tensor that is not quantized, by its name in the checkpoint."""
        if name == "transformer.vocab_embedding.weight":
            return self._weights.tensor(EMBEDDING, self._dtype)
        if name == "lm_head.weight":
            return self._weights.tensor(HEAD if HEAD in self._weights else EMBEDDING, self._dtype)
        if name == "transformer.ln_f.weight":
            return self._norm(NORM)
        _, _, layer, rest = name.split(".", 3)
        module, _, leaf = rest.rpartition(".")
        if leaf == "bias":
            names = [f"model.layers.{layer}.{part}.bias" for part in _LINEARS[module]]
            return torch.cat([self._weights.tensor(each, self._dtype) for each in names])
        if module.startswith("attention."):
            head_norm = self._family.head_norms[module.removeprefix("attention.")]
            return self._weights.tensor(f"model.layers.{layer}.self_attn.{head_norm}.weight", self._dtype)
        return self._norm(f"model.layers.{layer}.{_NORMS[module]}.weight")

    def _norm(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, self._dtype) + self._family.norm_offset


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
    folder, layers = _Folder(source, dtype), range(source.shape.num_hidden_layers)
    points = any((folder.linear(layer, module).points != 8).any() for layer in layers for module in _LINEARS)
    out_dir.mkdir(parents=True, exist_ok=True)
    raw = corrected(_config(source, spec, dtype, points), source.config, spec)
    (out_dir / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    expected = expected_tensors(CheckpointConfig.parse(raw), 0)
    writer = TensorWriter.create(out_dir, {_FILE: {name: (each.dtype, each.shape) for name, each in expected.items()}})
    done = set()
    with progress.task("importing", len(layers), "layers") as advance:
        for layer in layers:
            for module in _LINEARS:
                for leaf, tensor in _stored(folder.linear(layer, module), points, dtype):
                    name = f"transformer.layers.{layer}.{module}.{leaf}"
                    writer.write(_FILE, name, iter([tensor]))
                    done.add(name)
            advance(1)
    for name in expected.keys() - done:
        writer.write(_FILE, name, iter([folder.plain(name)]))
    writer.sync()
    return describe(out_dir)


def _stored(linear: GivenLinear, points: bool, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a linear; two neighbouring outputs share a byte."""
    nibbles = linear.codes.view(np.uint8) & 15
    yield "weight", torch.from_numpy((nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8))
    yield "weights_scaling_factor", torch.from_numpy(linear.scales)
    if points:
        zero = (8 - linear.points.astype(np.float32)) * linear.scales
        yield "zero", torch.from_numpy(np.ascontiguousarray(zero.T)).to(torch_dtype(dtype))


def _config(source: ModelFolder, spec: QuantSpec, dtype: str, points: bool) -> dict[str, Any]:
    """Return what ModelOpt would write into config.json, before it is corrected."""
    shape, config = source.shape, source.config
    return {
        "producer": {"name": "imported", "version": str((quantization_of(config) or {}).get("quant_method"))},
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
            "quant_algo": "W4A16_AWQ",
            "kv_cache_quant_algo": None,
            "group_size": spec.group_size,
            "has_zero_point": points,
            "pre_quant_scale": False,
            "exclude_modules": ["lm_head"],
        },
    }
