"""Map each of our formats to a ModelOpt configuration; the only module that knows ModelOpt's two config styles.

ModelOpt 0.37 keeps `quant_cfg` as a dict {pattern: attributes}, in which "enable" is one of the attributes;
from 0.4x on it is a list of {quantizer_name, cfg, enable} where later entries win. Both are plain data, so this
module does not need ModelOpt: the presets are passed in.

Sources: TensorRT-LLM 1.2 `quantize_by_modelopt.py` (preset per qformat, Gemma exceptions); exports measured with
ModelOpt 0.37.0 and 0.47.0 (INT8 KV cache needs the bmm quantizers, see `_KV_CACHE`).
"""

import copy
from collections.abc import Callable
from typing import Any

from pipelines.compress.config import QuantSettings
from pipelines.compress.specs import QuantSpec
from pipelines.domain.families import Family
from pipelines.domain.formats import FORMATS, KvFormat, QFormat

Config = dict[str, Any]

_ANY_PRESET = "FP8_DEFAULT_CFG"
"""Any preset will do: only the style of its configuration is used."""

# Exports read the KV scales from the bmm quantizers. The older "*output_quantizer" patterns calibrate
# something else, and the checkpoint then silently has no KV format at all.
KV_PATTERN = "*[kv]_bmm_quantizer"
_KV_CACHE: dict[KvFormat, Config] = {
    KvFormat.FP8: {"num_bits": (4, 3), "axis": None},
    KvFormat.INT8: {"num_bits": 8, "axis": None},
}

_WEIGHTS = "*weight_quantizer"


def modelopt_config(spec: QuantSpec, family: Family, preset: Callable[[str], Config]) -> Config | None:
    """Return the configuration for `mtq.quantize`, or None when nothing is simulated.

    That is so where all is 16 bit; and a search has configurations of its own, see `candidate_configs`.

    Args:
        spec: the requested quantization.
        family: the model's family; some families have their own defaults.
        preset: returns ModelOpt's configuration for a name from `pipelines.domain.formats.FORMATS`.
    """
    form = FORMATS[spec.quant.qformat]
    if spec.searches or spec.sixteen_bit:
        return None
    config = copy.deepcopy(preset(form.preset or _ANY_PRESET))
    entries = config["quant_cfg"]
    in_dict = isinstance(entries, dict)
    if form.preset is None:  # all quantizers disabled, for the KV cache alone
        config["quant_cfg"] = {"default": {"enable": False}} if in_dict else [{"quantizer_name": "*", "enable": False}]
    elif group := form.weights.group_size(spec.quant.group_size):
        weights = entries[_WEIGHTS] if in_dict else next(e["cfg"] for e in entries if e["quantizer_name"] == _WEIGHTS)
        first = weights[0] if isinstance(weights, list) else weights
        first["block_sizes"] = {**first["block_sizes"], -1: group}
    if spec.kv_cache is not KvFormat.AUTO:
        _set(config, KV_PATTERN, _KV_CACHE[spec.kv_cache])
    config["algorithm"] = _algorithm(spec.quant, family, config["algorithm"])
    return config


def candidate_configs(spec: QuantSpec, family: Family, preset: Callable[[str], Config]) -> dict[QFormat, Config]:
    """Return the configuration of every format that a search chooses from."""
    configs = {each: modelopt_config(QuantSpec(spec.quant.of(each)), family, preset) for each in spec.quant.mixed}
    return {qformat: config for qformat, config in configs.items() if config is not None}


def kv_cache_config(kv_cache: KvFormat, preset: Callable[[str], Config]) -> Config:
    """Return the quantizers of a KV cache alone, for a model whose linears are quantized."""
    config: Config = {"quant_cfg": type(preset(_ANY_PRESET)["quant_cfg"])()}
    _set(config, KV_PATTERN, _KV_CACHE[kv_cache])
    return config


def _set(config: Config, pattern: str, attributes: Config) -> None:
    """Enable the quantizers that match a name pattern with these attributes; later entries win in both styles."""
    entries = config["quant_cfg"]
    if isinstance(entries, dict):
        entries[pattern] = {**attributes, "enable": True}
    else:
        entries.append({"quantizer_name": pattern, "cfg": dict(attributes), "enable": True})


def _algorithm(quant: QuantSettings, family: Family, default: Any) -> Any:
    """Return ModelOpt's calibration algorithm, with the given parameters or those that the family needs."""
    form = FORMATS[quant.qformat]
    value = quant.smoothquant_alpha if form.tuning == "smoothquant" else quant.awq_alpha_step
    value = family.tuning_default(form) if value is None else value
    if form.tuning == "smoothquant" and value is not None:
        return {"method": "smoothquant", "alpha": value}
    if form.tuning == "awq" and value is not None:
        default = {"method": "awq_lite", "alpha_step": value}
    if quant.fp4_inputs == "headroom":
        return {"method": "nvfp4_act_headroom"}
    return {"method": "mse"} if quant.int4_scales == "mse" else default
