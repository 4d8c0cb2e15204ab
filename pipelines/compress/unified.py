"""Correct config.json of a unified Hugging Face export so that every reader computes what was quantized.

ModelOpt saves through Transformers, and Transformers 5 writes RoPE as `rope_parameters` only. Transformers 4.57, which
TensorRT-LLM 1.2 pins, does not read that and would silently fall back to theta 10,000. Both styles are therefore
written, and everything else comes from the source model's own config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.domain.families import settled
from pipelines.domain.rotary import both_spellings


def correct_unified(folder: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """Correct `folder`/config.json in place.

    Args:
        folder: what `modelopt_door.export_unified` wrote.
        hf_config: config.json of the source model.
        dtype: type of the unquantized tensors, "bfloat16" or "float16".
    """
    path = folder / "config.json"
    exported = json.loads(path.read_text(encoding="utf-8"))
    config = unified_config(hf_config, dtype, exported.get("quantization_config"))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def unified_config(hf_config: Mapping[str, Any], dtype: str, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the source model's configuration with the quantization, the dtype, and RoPE in both styles."""
    config = {**hf_config, "torch_dtype": dtype, "dtype": dtype, **both_spellings(settled(hf_config))}
    return config | ({"quantization_config": dict(quantization)} if quantization else {})
