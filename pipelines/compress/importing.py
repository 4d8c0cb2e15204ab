"""Write a quantized Hugging Face folder as a TensorRT-LLM checkpoint, with the weights that it has."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.checkpoint.config_json import KV_SCALE, LAYERS_FILE, CheckpointConfig
from pipelines.checkpoint.declarations import packing_of, quantization_of
from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.given import given_format, import_faults
from pipelines.checkpoint.packings import (
    Int4Linear,
    as_modelopt,
    decode_fp8,
    decode_int4,
    decode_modelopt,
    fused_fp8,
    kv_scales,
)
from pipelines.checkpoint.tensors import numpy_dtype, stored_tensors
from pipelines.checkpoint.verify import IMPORTED, Tensors, expected_tensors, layer_tensors
from pipelines.compress.by_tensor import (
    LINEARS,
    NORMS,
    CheckpointTensors,
    QuantizeTask,
    names_of,
    quantization_block,
    write_config,
)
from pipelines.compress.calibration import calibration_facts
from pipelines.compress.checkpoint_layout import RankFiles
from pipelines.compress.contexts import BATCHES, gpu_memory_named
from pipelines.compress.model_folder import ModelFolder, torch_dtype
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.progress import Progress


class _Folder:
    """The tensors of a quantized folder under the names of a TensorRT-LLM checkpoint."""

    def __init__(self, source: ModelFolder, spec: QuantSpec, dtype: str) -> None:
        self._spec, self._dtype = spec, torch_dtype(dtype)
        self.block = quantization_of(source.folder, source.config) or {}
        self.rest = CheckpointTensors(source, self._dtype)
        self._tensors = _Tensors({name: file for name, (file, _) in stored_tensors(source.folder).items()})
        self._layers = range(source.shape.num_hidden_layers)
        self._has_experts = source.shape.family.experts is not None
        self.routers = ["*router"] if self._has_experts else []  # TensorRT-LLM makes FP8 of what is not named
        self.declared = given_format(self.block)
        self._packing = packing_of(self.block)
        self.points = (
            self._packing != "modelopt"
            and self.declared.group_size is not None
            and any((self._int4(layer, module).points != 8).any() for layer in self._layers for module in LINEARS)
        )

    def format_of(self, layer: int, module: str) -> QFormat:
        return self.declared.of(names_of(layer, module)[0])

    def layer(self, layer: int, expected: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is quantized of a layer, by name within it."""
        for module in LINEARS:
            of_experts = self._has_experts and module.startswith("mlp.")
            stored = self._experts(layer, module) if of_experts else self._stored(layer, module, expected)
            for leaf, tensor in stored if module != "mlp.gate" or not of_experts else ():  # it is part of mlp.fc
                yield f"{module}.{leaf}", tensor
        if self._spec.kv_cache is not KvFormat.AUTO and self._spec.kv_cache is self.declared.kv_cache:
            scales = kv_scales(self._tensors, f"model.layers.{layer}.self_attn")
            for name, scale in zip(("kv", "k", "v"), (max(scales), *scales), strict=True):
                yield f"attention.{name}{KV_SCALE}", torch.tensor([scale])

    def _experts(self, layer: int, module: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the FP8 tensors of all experts; all share the scale of activations (TensorRT-LLM `layers/moe.py`)."""
        linears = self.rest.linears_of_experts(layer, module)
        experts = [fused_fp8([decode_fp8(self._tensors, name) for name in names]) for names in linears]
        yield "weight", _from_numpy(np.stack([expert.weight for expert in experts]))
        yield "weights_scaling_factor", torch.tensor([[expert.scale] for expert in experts])
        yield "activation_scaling_factor", torch.tensor([max(expert.input_scale for expert in experts)])

    def _stored(self, layer: int, module: str, expected: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        names, qformat = names_of(layer, module), self.format_of(layer, module)
        if qformat is QFormat.FP8:
            fp8 = fused_fp8([decode_fp8(self._tensors, name) for name in names])
            yield "weight", _from_numpy(fp8.weight)
            yield "weights_scaling_factor", torch.tensor([fp8.scale])
            yield "activation_scaling_factor", torch.tensor([fp8.input_scale])
        elif self._packing != "modelopt" and qformat is QFormat.INT4_GPTQ:
            int4 = self._int4(layer, module)
            nibbles = int4.codes.view(np.uint8) & 15  # two neighbouring outputs share a byte
            yield "weight", torch.from_numpy((nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8))
            yield "weights_scaling_factor", torch.from_numpy(int4.scales)
            if self.points:
                zero = (8 - int4.points.astype(np.float32)) * int4.scales
                yield "zero", torch.from_numpy(np.ascontiguousarray(zero.T)).to(self._dtype)
        elif qformat is not QFormat.NONE:
            prefix = f"transformer.layers.{layer}.{module}."
            types = {
                name.removeprefix(prefix): (numpy_dtype(each.dtype), each.shape)
                for name, each in expected.items()
                if name.startswith(prefix) and not name.endswith(".bias")
            }
            tensors: Mapping[str, Any] = self._tensors
            if self._packing != "modelopt":
                tensors = {leaf: each for name in names for leaf, each in as_modelopt(tensors, name).items()}
            for leaf, values in decode_modelopt(tensors, names, types).items():
                yield leaf, _from_numpy(values)

    def _int4(self, layer: int, module: str) -> Int4Linear:
        packing, size = self._packing, self.declared.group_size
        parts = [decode_int4(self._tensors, name, packing, size) for name in names_of(layer, module)]
        merged = [np.concatenate([getattr(part, each) for part in parts]) for each in ("codes", "scales", "points")]
        return Int4Linear(*merged)


_TORCH = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
"""Types that torch does not take from numpy."""


def _from_numpy(values: np.ndarray[Any, Any]) -> torch.Tensor:
    own = _TORCH.get(values.dtype.name)
    if own is None:
        return torch.from_numpy(np.ascontiguousarray(values))
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    return torch.from_numpy(bits).view(own)


class _Tensors(dict[str, Any]):
    """Tensors by name, each from its file when asked for."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)[name]


def import_folder(task: QuantizeTask, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint; texts calibrate a KV cache that the folder has no scales for, on one rank.

    Returns:
        the facts of `pipelines.checkpoint.describe`, and the keys `calibration` and `tool`.

    Raises:
        UserError: the folder cannot be taken over like that, or lacks a tensor.
    """
    began, source = time.monotonic(), task.source
    _refuse_faults(task)
    folder = _Folder(source, task.spec, task.dtype)
    layers, spec = source.shape.num_hidden_layers, task.spec
    block = {
        **quantization_block(spec.quant.qformat, spec.quant.group_size, folder.points),
        "kv_cache_quant_algo": None if spec.kv_cache is KvFormat.AUTO else spec.kv_cache.upper(),
        **({} if folder.declared.layers else {"exclude_modules": ["lm_head", *folder.routers]}),
    }
    raw = write_config(task, out_dir, block, {"name": IMPORTED, "version": str(folder.block.get("quant_method"))})
    if folder.declared.layers:
        mixed = {key: raw["quantization"][key] for key in ("quant_algo", "kv_cache_quant_algo")}
        mixed["quantized_layers"] = _layer_blocks(folder, layers)
        (out_dir / LAYERS_FILE).write_text(json.dumps(mixed, indent=2) + "\n", encoding="utf-8")
    config = CheckpointConfig.load(out_dir)
    expected, files = expected_tensors(config, 0), RankFiles(config, out_dir)
    scales = []
    with progress.task("importing", layers, "layers") as advance:
        for layer in range(layers):
            rest = [*layer_tensors(config, prefix := f"transformer.layers.{layer}")]
            for name, tensor in folder.layer(layer, expected):
                files.write(f"{prefix}.{name}", tensor)
                rest.remove(name)
            for name in [f"{prefix}.{name}" for name in rest]:
                if name.endswith(KV_SCALE):
                    scales.append(name)
                else:
                    files.write(name, folder.rest.tensor(name))
            advance(1)
    folder.rest.write_ends(files, progress)
    data, tool = None, {}
    if scales:
        from pipelines.compress import imported_cache, modelopt_door

        with gpu_memory_named("calibrating the KV cache", BATCHES):
            calibrated, data = imported_cache.calibrated_scales(task, out_dir, progress)
        tool = {"nvidia-modelopt": modelopt_door.VERSION}
        for name in scales:
            files.write(name, calibrated[name])
    files.writer.sync()
    seconds = time.monotonic() - began if data else 0.0
    return {**describe(out_dir), "calibration": calibration_facts(data, seconds), "tool": tool}


def _refuse_faults(task: QuantizeTask) -> None:
    source, spec, split = task.source, task.spec, task.split
    refuse(
        import_faults(
            source.folder,
            source.config,
            qformat=spec.quant.qformat,
            group_size=spec.quant.group_size,
            kv_cache=spec.kv_cache,
            world_size=split.tp_size * split.pp_size,
            effective_bits=spec.quant.effective_bits,
            candidates=spec.quant.mixed,
        )
    )
    family = source.shape.family
    other = family.experts is not None and spec.quant.qformat is not QFormat.FP8
    if set(family.layer_norms) != set(NORMS) or family.fused_linears or other:
        raise UserError(f"A quantized folder of {family.architecture} cannot be taken over.", todo="Give the original.")


def _layer_blocks(folder: _Folder, layers: int) -> dict[str, Any]:
    formats = {
        f"transformer.layers.{layer}.{module}": folder.format_of(layer, module)
        for layer in range(layers)
        for module in LINEARS
    }
    size = folder.declared.group_size or 0
    return {name: quantization_block(qformat, size) for name, qformat in formats.items() if qformat is not QFormat.NONE}
