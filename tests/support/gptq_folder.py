"""Turn a Hugging Face folder in 16 bit into a GPTQ folder; packing is checked against AutoGPTQ's own."""

from __future__ import annotations

import json
import shutil
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
    """Round every linear of the layers; `config` replaces keys of quantization_config."""
    import torch
    from safetensors.torch import load_file, save_file

    found: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        codes, points, scales = rounded(tensor.float().numpy(), group, symmetric)
        stored = points - 1 if version == 1 else points
        stem = name.removesuffix(".weight")
        found |= {
            f"{stem}.qweight": torch.from_numpy(np.ascontiguousarray(pack(codes).T)),
            f"{stem}.qzeros": torch.from_numpy(np.ascontiguousarray(pack(stored.T))),
            f"{stem}.scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            f"{stem}.g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // group,
        }
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    form = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    block = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": symmetric, **form}
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": block | config}))
    return out
