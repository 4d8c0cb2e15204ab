"""quant_cfg.json of a MIXED_PRECISION checkpoint: how each linear is quantized, by the name of its module.

Source: TensorRT-LLM 1.2 `modeling_utils.py` (`PretrainedConfig.to_layer_quant_config`, `LayerQuantConfig`): it reads
`quantized_layers` from the file beside config.json, takes the first pattern that matches a module's name, and leaves a
module without one in 16 bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.hf_config import shown
from pipelines.host.files import parse_json

KV_SCALE = "_cache_scaling_factor"
"""How the names of the scales of a KV cache end."""
LAYERS_FILE = "quant_cfg.json"
MIXED = "MIXED_PRECISION"
"""`quant_algo` of a checkpoint whose linears have formats of their own."""

LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
"""Linears of a decoder layer, by their names within it."""

_AGAIN = "Export the checkpoint again."


def read_layers(folder: Path, kv_cache_quant_algo: str | None) -> Mapping[str, Mapping[str, Any]]:
    """Return module pattern -> `quantization` block, in the order of the file.

    Args:
        folder: the checkpoint.
        kv_cache_quant_algo: of config.json; TensorRT-LLM takes that of this file.

    Raises:
        UserError: the file is missing, not JSON, has no `quantized_layers`, or another KV cache than config.json.
    """
    path = folder / LAYERS_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has quant_algo={MIXED}, but no {LAYERS_FILE}, which says how each linear is quantized.",
            todo=_AGAIN,
        )
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.", todo=_AGAIN) from None
    layers = raw.get("quantized_layers") if isinstance(raw, Mapping) else None
    if not isinstance(layers, Mapping) or not layers:
        raise UserError(f"{path} has quantized_layers={shown(layers)}.", allowed="It must name at least one module.")
    if raw.get("kv_cache_quant_algo") != kv_cache_quant_algo:
        raise UserError(
            f"{path} has kv_cache_quant_algo={shown(raw.get('kv_cache_quant_algo'))}, config.json has"
            f" {shown(kv_cache_quant_algo)}.",
            todo=_AGAIN,
        )
    for name, block in layers.items():
        if not isinstance(block, Mapping):
            raise UserError(f"{path} has '{name}': {shown(block)}.", allowed="It must be an object.")
    return layers
