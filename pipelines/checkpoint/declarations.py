"""How a Hugging Face folder says that it is quantized, and which of these declarations can be taken over.

Sources: `quantization_config` as AutoGPTQ 0.7.1 and GPTQModel 7.7, AutoAWQ 0.2.9 (`models/_config.py`), AutoRound 0.16
(`export/export_to_autoround`), compressed-tensors 0.20 (`quantization/quant_config.py`, `quant_args.py`), AutoFP8 (its
README), Transformers 5 (`FineGrainedFP8Config`) and ModelOpt 0.37 and 0.47 (`export/quant_utils.py`,
process_layer_quant_config) write it, the last one in hf_quant_config.json as well; for the tensors see `packings`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import MIXED
from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.unified import FUSED, PRE_QUANT_SCALE, quantization_block, quantization_producer
from pipelines.domain.errors import Fault, UserError, shown
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, UNIFORM, QFormat
from pipelines.domain.model_shape import holds_mxfp4
from pipelines.host.files import parse_json

GROUPS = (16, 32, 64, 128, 256)
WHOLE_ROW = -1
"""`group_size` of GPTQ, AWQ and AutoRound for one scale per output channel."""
_KNOWN = (
    "Folders of AutoGPTQ and GPTQModel (gptq), AutoAWQ (awq), AutoRound (auto-round), compressed-tensors, AutoFP8 and"
    " Transformers (fp8) and ModelOpt can be taken over."
)
_IN_16_BIT = {"lm_head", "re:.*lm_head", "re:.*lm_head.*", "lm_head*", "model.embed_tokens"}
"""What a folder may leave out, as it names it."""
_NO = (None, False)
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ before 0.5 and AutoAWQ before 0.1.7 declare it; config.json says nothing then."""
_OLD_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a Hugging Face folder says that it is quantized; None if it says nothing, or is gpt-oss in MXFP4.

    Args:
        folder: the folder; ModelOpt's hf_quant_config.json in it has the last word, unless compressed-tensors converted
            the folder (its converter, 0.20.1, leaves that file there).
        config: its config.json.

    Raises:
        UserError: a file that says so is no JSON, or a file with weights is damaged.
    """
    block = None if holds_mxfp4(config) else _declared(folder, config)
    converted = block is not None and block.get("quant_method") == "compressed-tensors"
    if not converted and (own := quantization_block(folder)).get("quant_algo"):
        return _mended({"quant_method": "modelopt", **own, "producer": quantization_producer(folder)}, folder)
    if block is None or block.get("quant_method") != "modelopt":
        return block
    cache = block.get("kv_cache_scheme")
    if isinstance(cache, Mapping) and all(value in allowed for _, value, allowed in _fp8_of("", cache)):
        cache = "FP8"
    return _mended({**block, "kv_cache_quant_algo": cache, "exclude_modules": block.get("ignore")}, folder)


def _declared(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the declaration of config.json, or of the file of an older or another library beside it."""
    text = config.get("text_config")
    for where in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if where.get(key) is not None:
                return _checked(where[key], key, folder / "config.json", "quantization" in config)
    if "quantization" in config:  # mlx-lm, without quant_method
        return {"quant_method": "mlx"}
    if (folder / "quanto_qmap.json").exists():
        return {"quant_method": "quanto"}
    for name, method in _OLDER_FILES.items():
        if (path := folder / name).is_file():
            block = _checked(parse_json(path.read_text(encoding="utf-8")), "content", path, False) or {}
            return {"quant_method": method, **{_OLD_AWQ.get(key, key): value for key, value in block.items()}}
    return None


def _checked(block: Any, key: str, file: Path, is_mlx: bool) -> dict[str, Any] | None:
    if not isinstance(block, Mapping):
        raise UserError(f"{file} has {key}={shown(block)}.", allowed="It must be an object.")
    method = {"quant_method": "compressed-tensors"} if key == "compression_config" else {}
    usual = {}
    if is_mlx:
        usual = {"quant_method": "mlx"}
    elif "quant_method" not in block and any(str(key).startswith("load_in_") for key in block):
        usual = {"quant_method": "bitsandbytes"}  # before Transformers 4.32, where it named no method
    declared = {**usual, **method, **block}
    if declared.get("quant_method") in ("intel/auto-round", "auto_round"):  # names of older versions
        declared["quant_method"] = "auto-round"
    return declared or None


def _mended(block: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Correct `pre_quant_scale`, which ModelOpt declares for every grouped INT4, even without such scales."""
    if block.get("quant_algo") == FORMATS[QFormat.INT4_AWQ].quant_algo:
        names = {name for path in folder.glob("*.safetensors") for name in read_header(path)}
        if names:  # none before the download of a model
            block["pre_quant_scale"] = any(name.endswith(f".{PRE_QUANT_SCALE}") for name in names)
    return block


def packing_of(block: Mapping[str, Any]) -> str:
    """Return how linears are packed: "gptq", "gptq_v2", "awq", a `format` of compressed-tensors, "fp8", "modelopt"."""
    method = str(block.get("quant_method"))
    if method == "compressed-tensors":
        return str(block.get("format"))
    if method == "auto-round":
        return _AUTO_ROUND[block.get("packing_format") or "auto_round:auto_gptq"]
    return str(block.get("checkpoint_format") or "gptq") if method == "gptq" else method


def stored_group(block: Mapping[str, Any]) -> Any:
    """Return how many inputs share a scale in the folder; `WHOLE_ROW` for all."""
    if block.get("quant_method") != "compressed-tensors":
        return block.get("group_size")
    weights = _weights(block)
    return WHOLE_ROW if weights.get("strategy") == "channel" else weights.get("group_size")


def group_of(block: Mapping[str, Any]) -> int:
    """Return `quant.group_size` of the checkpoint: a longer group is several with the same scale."""
    size = stored_group(block)
    return size if size in GROUPS else 128


def _weights(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how compressed-tensors rounds the weights of its first group of linears."""
    return next(iter(mapping_of(block.get("config_groups")).values()), {}).get("weights") or {}


def mapping_of(value: Any) -> dict[str, dict[str, Any]]:
    """Return the entries that are objects; none if it is none itself."""
    return {str(k): dict(v) for k, v in value.items() if isinstance(v, Mapping)} if isinstance(value, Mapping) else {}


def kind_faults(what: str, block: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the first thing of a declaration that keeps a folder from being taken over."""
    todo = "Give the original model."
    judged = _DEMANDS.get(str(block.get("quant_method")))
    if judged is None:
        yield Fault(f"{what}.", _KNOWN, todo)
        return
    for name, value, allowed in judged(block):
        if value not in allowed:
            listed = ", ".join(shown(each) for each in allowed if each is not None)
            can = f"It can be {listed}." if listed else "It must be absent." if allowed else "It must be an object."
            yield Fault(f"{what} with {name}={shown(value)}.", can, todo)
            return


_Demands = Iterator[tuple[str, Any, tuple[Any, ...]]]
"""Name of an entry, what it is, what it may be."""


_SIZES = (*GROUPS, 384, 512, 1024, WHOLE_ROW)


def _of_gptq(block: Mapping[str, Any]) -> _Demands:
    yield "bits", block.get("bits"), (4,)
    yield "group_size", block.get("group_size"), _SIZES
    yield "checkpoint_format", block.get("checkpoint_format"), ("gptq", "gptq_v2", None)
    yield "is_marlin_format", block.get("is_marlin_format"), _NO
    yield "pack_dtype", block.get("pack_dtype"), ("int32", None)
    yield "lm_head", block.get("lm_head") or None, (None,)
    yield "dynamic", _overrides(block.get("dynamic")), (None,)
    for key in ("rotation", "activation"):  # GPTQModel 7 transforms or rounds the inputs of its linears
        yield key, block.get(key) or None, (None,)


def _overrides(dynamic: Any) -> Any:
    """Return the overrides in GPTQModel's `dynamic`, without excluded linears ("-:"), which their tensors show."""
    if not isinstance(dynamic, Mapping):
        return dynamic or None
    return [key for key in dynamic if not str(key).startswith("-:")] or None


def _of_awq(block: Mapping[str, Any]) -> _Demands:
    yield "bits", block.get("bits"), (4,)
    yield "group_size", block.get("group_size"), _SIZES
    yield "version", str(block.get("version") or "gemm").lower(), ("gemm",)
    yield "checkpoint_format", block.get("checkpoint_format"), ("gemm", None)
    yield "modules_to_not_convert", _unknown(block.get("modules_to_not_convert")), (None,)


_AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
}
"""`packing_format` of AutoRound -> whose layout it is. Source: `dynamic_import_quant_linear_for_packing`."""


def _of_auto_round(block: Mapping[str, Any]) -> _Demands:
    yield "data_type", block.get("data_type"), ("int", None)
    yield "bits", block.get("bits"), (4,)
    yield "group_size", block.get("group_size"), _SIZES
    yield "packing_format", block.get("packing_format"), (*_AUTO_ROUND, None)
    yield "act_bits", block.get("act_bits") or 16, (16, 32)
    yield "quant_lm_head", block.get("quant_lm_head") or block.get("lm_head"), _NO
    for key in ("static_kv_dtype", "static_attention_dtype", "super_bits", "transform_config", "rotation_config"):
        yield key, block.get(key) or None, (None,)
    for name, own in mapping_of(block.get("extra_config")).items():
        if own.get("bits") in (16, 32):
            continue  # is seen in its tensors
        yield f"extra_config.{name}.act_bits", own.get("act_bits") or 16, (16, 32)
        for key, usual in (("bits", None), ("group_size", None), ("data_type", "int")):
            whole = block.get(key) or usual
            yield f"extra_config.{name}.{key}", own.get(key) or whole, (whole,)


_COMPRESSED = ("pack-quantized", "float-quantized", "int-quantized", "nvfp4-pack-quantized")


def _of_compressed(block: Mapping[str, Any]) -> _Demands:
    groups, form = mapping_of(block.get("config_groups")), block.get("format")
    only = next(iter(groups.values()), {})
    parts = {key: only.get(key) for key in ("weights", "input_activations")}
    parts["kv_cache_scheme"] = block.get("kv_cache_scheme")
    if wrong := {key: value for key, value in parts.items() if value and not isinstance(value, Mapping)}:
        for key, value in wrong.items():
            yield key, value, ()
        return
    weights = _weights(block)
    yield "format", form, _COMPRESSED
    kinds = {json.dumps(group | {"targets": None}, sort_keys=True) for group in groups.values()}
    yield "number of different config_groups", len(kinds), (1,)
    sparse = block.get("sparsity_config") or {}
    yield "sparsity_config.format", sparse.get("format") if isinstance(sparse, Mapping) else sparse, ("dense", None)
    yield "transform_config", block.get("transform_config") or None, (None,)
    yield "output_activations", only.get("output_activations"), (None,)
    inputs = only.get("input_activations") or {}
    if form != "pack-quantized" and not inputs:
        yield "input_activations", None, ()
    if form == "float-quantized":
        yield from _fp8_of("weights", weights)
        yield from _fp8_of("input_activations", inputs)
    elif form == "int-quantized":
        yield from _args_of("weights", weights, num_bits=8, type="int", strategy="channel", dynamic=False)
        yield from _args_of("input_activations", inputs, num_bits=8, type="int", strategy="tensor", dynamic=False)
    elif form == "nvfp4-pack-quantized":
        fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        yield from _args_of("weights", weights, **fp4, dynamic=False)
        yield from _args_of("input_activations", inputs, **fp4, dynamic="local")
    else:
        yield "input_activations", only.get("input_activations"), (None,)
        yield from _int4_of(weights)
    if form in ("float-quantized", "nvfp4-pack-quantized") and (cache := block.get("kv_cache_scheme")):
        yield from _fp8_of("kv_cache_scheme", cache)
    else:
        yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)
    yield "ignore", _unknown(block.get("ignore")), (None,)  # tensors show which linears its targets left out


def _int4_of(weights: Mapping[str, Any]) -> _Demands:
    yield "num_bits", weights.get("num_bits"), (4,)
    yield "type", weights.get("type", "int"), ("int",)
    yield "strategy", weights.get("strategy"), ("group", "channel")
    yield "actorder", weights.get("actorder"), (None, False, "weight", "static")
    if weights.get("strategy") == "group":
        yield "group_size", weights.get("group_size"), _SIZES


def _args_of(part: str, args: Mapping[str, Any], **required: Any) -> _Demands:
    """Require symmetric values, and `required`."""
    for key, value in required.items():
        yield f"{part}.{key}", args.get(key) or (False if key == "dynamic" else None), (value,)
    yield f"{part}.symmetric", args.get("symmetric", True), (True,)


def _fp8_of(part: str, args: Mapping[str, Any]) -> _Demands:
    """One static scale: TensorRT-LLM's FP8 has neither per-channel nor dynamic scales."""
    yield f"{part}.num_bits", args.get("num_bits"), (8,)
    yield f"{part}.type", args.get("type"), ("float",)
    yield f"{part}.strategy", args.get("strategy", "tensor"), ("tensor",)
    yield f"{part}.dynamic", args.get("dynamic") or False, (False,)


def _of_auto_fp8(block: Mapping[str, Any]) -> _Demands:
    yield "weight_block_size", block.get("weight_block_size"), (None,)
    yield "activation_scheme", block.get("activation_scheme"), ("static",)
    yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)
    yield "ignored_layers", _unknown(block.get("ignored_layers")), (None,)
    yield "modules_to_not_convert", _unknown(block.get("modules_to_not_convert")), (None,)


_ALGORITHMS = tuple(dict.fromkeys(FORMATS[each].quant_algo for each in UNIFORM if FORMATS[each].calibrated))
_MIXED_ALGORITHMS = tuple(FORMATS[each].quant_algo for each in UNIFORM if FORMATS[each].mixable)
_ROUTER = re.compile(r"(model\.layers\.\d+\.|re:\.\*)(block_sparse_moe|mlp)\.gate\$?")
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


def _of_modelopt(block: Mapping[str, Any]) -> _Demands:
    yield "quant_algo", block.get("quant_algo"), (*_ALGORITHMS, MIXED)
    yield "kv_cache_quant_algo", block.get("kv_cache_quant_algo"), ("FP8", None)
    yield "exclude_modules", _unknown(block.get("exclude_modules")), (None,)
    if block.get("quant_algo") == MIXED:
        yield from _of_mix(mapping_of(block.get("quantized_layers")))
    else:
        yield from _of_modelopts_groups("", block)


def _of_modelopts_groups(name: str, block: Mapping[str, Any]) -> _Demands:
    """Sizes of groups; ModelOpt packs symmetric weights alone."""
    algorithm = block.get("quant_algo")
    weights = FORMATS[BY_QUANT_ALGO[algorithm]].weights if algorithm in _ALGORITHMS else None
    if weights is not None and weights.group:
        sizes = (weights.group,) if weights.group_is_fixed else GROUPS
        yield f"{name}group_size", block.get("group_size"), sizes
    yield f"{name}has_zero_point", block.get("has_zero_point") or None, (None,)


def _of_mix(layers: Mapping[str, Mapping[str, Any]]) -> _Demands:
    yield "number of quantized_layers", len(layers) or 0, (len(layers) or 1,)
    unknown = next((name for name in layers if not _LINEAR.fullmatch(name)), None)
    yield "quantized_layers", unknown, (None,)
    keys = ("quant_algo", "group_size", "has_zero_point")
    kinds: dict[str, str] = {}
    for name, block in layers.items():
        kinds.setdefault(repr([block.get(key) for key in keys]), name)
    for name in kinds.values():  # the first linear of each kind
        yield f"quantized_layers.{name}.quant_algo", layers[name].get("quant_algo"), _MIXED_ALGORITHMS
        yield from _of_modelopts_groups(f"quantized_layers.{name}.", layers[name])
    sizes = [each["group_size"] for each in layers.values() if each.get("group_size")]
    yield "quantized_layers.group_size", next((size for size in sizes if size != sizes[0]), None), (None, *sizes[:1])
    for name, other in _apart(layers):
        yield f"quantized_layers.{name}.quant_algo", layers.get(name, {}).get("quant_algo"), (other,)
        return


def _apart(layers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield linears whose format differs from that of the linear they are fused with, and that format."""
    for layer in dict.fromkeys(".".join(name.split(".")[:3]) for name in layers):
        for first, *others in FUSED:
            algorithm = layers.get(f"{layer}.{first}", {}).get("quant_algo")
            for name in others:
                if layers.get(f"{layer}.{name}", {}).get("quant_algo") != algorithm:
                    yield f"{layer}.{name}", algorithm


def _unknown(left_out: Any) -> Any:
    """Return the 16-bit modules besides head, embedding and routers, which a TensorRT-LLM checkpoint keeps so."""
    if not isinstance(left_out, list):
        return left_out or None
    return [name for name in left_out if name not in _IN_16_BIT and not _ROUTER.fullmatch(str(name))] or None


_DEMANDS: dict[str, Callable[[Mapping[str, Any]], _Demands]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "auto-round": _of_auto_round,
    "compressed-tensors": _of_compressed,
    "fp8": _of_auto_fp8,
    "modelopt": _of_modelopt,
}
