"""Turn a Hugging Face folder in 16 bit into a quantized one; packing is checked against the libraries' own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def pack(values: Array) -> Array:
    """Pack [R, C] values of 4 bits to int32 [R, C/8], the first of eight in the lowest bits."""
    words = values.reshape(values.shape[0], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return words.sum(-1, dtype=np.uint32).view(np.int32)


def rounded(weight: Array, group: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Return codes [O, I], zero points [O, G] and scales [O, G] of a weight: (code - point) * scale."""
    grouped = weight.reshape(len(weight), -1, group)
    scales = (np.abs(grouped).max(2) / 7).astype(np.float16)
    points = np.full(scales.shape, 8) if symmetric else 7 + np.arange(scales.size).reshape(scales.shape) % 3
    codes = np.clip(np.rint(grouped / scales[..., None] + points[..., None]), 0, 15)
    return codes.reshape(weight.shape).astype(np.int64), points, scales


def write_gptq(source: Path, out: Path, *, group: int, version: int = 1, symmetric: bool = True, **config: Any) -> Path:
    """Round every linear of the layers as AutoGPTQ packs them; `config` replaces keys of quantization_config."""

    def packed(codes: Array, points: Array, scales: Array) -> dict[str, Array]:
        stored = points - 1 if version == 1 else points
        order = np.arange(codes.shape[1], dtype=np.int32) // group
        return {"qweight": pack(codes).T, "qzeros": pack(stored.T), "scales": scales.T, "g_idx": order}

    form = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    block = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": symmetric, **form}
    return _write(source, out, packed, group, symmetric, block | config)


def write_awq(source: Path, out: Path, *, group: int, **config: Any) -> Path:
    """Round every linear of the layers as AutoAWQ packs them; `config` replaces keys of quantization_config."""

    def packed(codes: Array, points: Array, scales: Array) -> dict[str, Array]:
        return {"qweight": pack(awq_order(codes.T)), "qzeros": pack(awq_order(points.T)), "scales": scales.T}

    block = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return _write(source, out, packed, group, False, block | config)


def write_compressed(source: Path, out: Path, *, group: int, symmetric: bool = True, **config: Any) -> Path:
    """Round every linear of the layers as compressed-tensors packs them; `config` replaces keys of `weights`."""

    def packed(codes: Array, points: Array, scales: Array) -> dict[str, Array]:
        made = {"weight_packed": pack(codes), "weight_scale": scales, "weight_shape": np.array(codes.shape)}
        return made if symmetric else made | {"weight_zero_point": pack(points.T).T}

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric} | config
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return _write(source, out, packed, group, symmetric, block | {"ignore": ["lm_head"], "kv_cache_scheme": None})


def awq_order(values: Array) -> Array:
    """Put values [R, C] in the order in which AutoAWQ packs them, eight by eight."""
    return values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)


def _write(
    source: Path,
    out: Path,
    packed: Callable[[Array, Array, Array], dict[str, Array]],
    group: int,
    symmetric: bool,
    block: dict[str, Any],
) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    found: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        made = packed(*rounded(tensor.float().numpy(), group, symmetric))
        stem = name.removesuffix(".weight")
        found |= {f"{stem}.{leaf}": torch.from_numpy(np.ascontiguousarray(each)) for leaf, each in made.items()}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": block}))
    return out
