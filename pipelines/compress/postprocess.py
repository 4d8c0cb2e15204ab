"""Correct config.json of a ModelOpt export so that trtllm-build accepts it; the tensors are not changed.

Source: TensorRT-LLM 1.2 `quantize_by_modelopt.py` makes the same corrections after its own export; corrections
that it does not make have a comment.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import LAYERS_FILE, MIXED, Quantization
from pipelines.checkpoint.tensors import read_header
from pipelines.compress.specs import QuantSpec
from pipelines.domain.families import FAMILIES, MULTIPLIERS, Architecture, settled
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.rotary import long_rope, rope_base, rope_scaling

_KNOWN_QUANTIZATION_KEYS = {field.name for field in fields(Quantization)}
_PREQUANT = ".prequant_scaling_factor"
QWEN_SEQ_LENGTH = 8192
"""TensorRT-LLM's Qwen layers read `seq_length` without a default; only the first Qwen's log(n) scaling uses it.

Source: TensorRT-LLM `models/qwen/config.py` (8192 where Hugging Face states none) and `models/qwen/model.py`.
"""


def correct_export(folder: Path, hf_config: Mapping[str, Any], spec: QuantSpec) -> dict[str, Any]:
    """Correct `folder`/config.json in place and drop the empty quant_cfg.json of a single format.

    Returns:
        The corrected configuration.
    """
    path = folder / "config.json"
    config = corrected(json.loads(path.read_text(encoding="utf-8")), hf_config, spec)
    # linears whose inputs are scaled first; layers are numbered from 0 in each pipeline stage, but a mix has only one
    names = (name for file in folder.glob("rank*.safetensors") for name in read_header(file))
    smoothed = {name.removesuffix(_PREQUANT) for name in names if name.endswith(_PREQUANT)}
    _correct_smoothing(config["quantization"], bool(smoothed))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    layers = folder / LAYERS_FILE
    if config["quantization"]["quant_algo"] != MIXED:
        layers.unlink(missing_ok=True)
        return config
    # TensorRT-LLM takes the whole quantization from this file, the format of the KV cache too
    raw = json.loads(layers.read_text(encoding="utf-8"))
    for name, block in raw["quantized_layers"].items():
        _correct_smoothing(block, name in smoothed)
    whole = {key: config["quantization"][key] for key in ("quant_algo", "kv_cache_quant_algo")}
    mixed = whole | {"quantized_layers": raw["quantized_layers"]}
    layers.write_text(json.dumps(mixed, indent=2) + "\n", encoding="utf-8")
    return config


def _correct_smoothing(block: dict[str, Any], smoothed: bool) -> None:
    """Say whether there are scales for inputs; the exporter says so of every INT4 weight in groups."""
    if "pre_quant_scale" in block:
        block["pre_quant_scale"] = smoothed


def corrected(exported: Mapping[str, Any], hf_config: Mapping[str, Any], spec: QuantSpec) -> dict[str, Any]:
    """Return ModelOpt's configuration with all corrections applied."""
    config, family, mapping = dict(exported), FAMILIES[hf_config["architectures"][0]], exported["mapping"]
    # TensorRT-LLM's dataclass rejects any other key
    block = {key: value for key, value in exported["quantization"].items() if key in _KNOWN_QUANTIZATION_KEYS}
    if FORMATS[spec.quant.qformat].weights.at_build:
        block["quant_algo"] = FORMATS[spec.quant.qformat].quant_algo
    if spec.kv_cache is KvFormat.AUTO:
        block["kv_cache_quant_algo"] = None
    if block.get("exclude_modules"):
        # the exporter writes a Python set, whose order changes from run to run
        block["exclude_modules"] = sorted(block["exclude_modules"])
    config |= {
        "architecture": hf_config["architectures"][0],
        "model_type": hf_config["model_type"],
        # The exporter's float16 would round the logits that engines are compared by; TensorRT-LLM defaults to float32.
        "logits_dtype": "float32",
        # The vocabulary is not padded here (see `modelopt_door.export`), so it is the model's own.
        "vocab_size": hf_config["vocab_size"],
        # The exporter counts the columns of a packed weight, in which some formats have two values each.
        "hidden_size": hf_config["hidden_size"],
        "attn_bias": family.qkv_bias
        or (family.attention_bias and bool(family.settled(hf_config).get("attention_bias"))),
        "mlp_bias": "mlp_bias" in family.defaults and bool(hf_config.get("mlp_bias", False)),
        "hidden_act": _activation(exported["hidden_act"]),
        "mapping": {
            **mapping,
            "world_size": mapping["tp_size"] * mapping["pp_size"],
            "cp_size": 1,
            "attn_tp_size": -1,
            "attn_cp_size": -1,
        },
        "quantization": block,
    }
    if family.qwen_type:
        config |= {"qwen_type": hf_config["model_type"], "seq_length": QWEN_SEQ_LENGTH}
    if family.states_window_late and (window := family.settled(hf_config)["sliding_window"]):
        config["sliding_window"] = window  # TensorRT-LLM's own reader ignores it; evaluation and the CPU engine do not
    if family.architecture == Architecture.GRANITE:
        config |= multipliers(family.settled(hf_config), config["head_size"])
    return config | _rotary(hf_config)


def multipliers(hf_config: Mapping[str, Any], head_size: int) -> dict[str, float]:
    """Return Granite's multipliers in TensorRT-LLM's terms, where that of attention is beside 1 / sqrt(head size).

    Source: `models/llama/config.py`, `models/llama/model.py` (q_scaling).
    """
    embedding, attention, residual, logits = (float(hf_config[key]) for key in MULTIPLIERS)
    own = {"embedding_multiplier": embedding, "attention_multiplier": attention * head_size**0.5}
    return own | {"residual_multiplier": residual, "output_multiplier_scale": 1 / logits}


def _activation(name: str) -> str:
    """Return the name under which TensorRT-LLM fuses gate and up; it skips the others with a warning for each layer.

    Its table has one function for `gelu` and `gelu_pytorch_tanh`, the tanh form. Source: `functional.py` (ACT2FN),
    `models/modeling_utils.py` (fuse_gate_mlp).
    """
    return "gelu" if name == "gelu_pytorch_tanh" else name


def _rotary(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what says how positions are encoded; ModelOpt misses it in a config written by Transformers 5."""
    config = settled(hf_config)
    return {"rotary_base": rope_base(config), "rotary_scaling": rope_scaling(config), **long_rope(config)}
