"""Hugging Face folders that are already quantized: which kind, and whether it can be taken over.

Sources: `quantization_config` as AutoGPTQ 0.7.1 and GPTQModel 7.7, AutoAWQ 0.2.9 (`models/_config.py`),
compressed-tensors 0.20 (`quantization/quant_config.py`, `quant_args.py`), AutoFP8 (its README) and ModelOpt 0.37 and
0.47 (`export/quant_utils.py`, process_layer_quant_config) write it, the last one in hf_quant_config.json as well; for
the tensors see `packings`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.layers import MIXED
from pipelines.checkpoint.packings import PRE_QUANT_SCALE, ZEROS_LESS_ONE
from pipelines.checkpoint.tensors import TensorFile, read_header
from pipelines.checkpoint.unified import FUSED, linear_shapes, quantization_block, quantization_producer
from pipelines.domain.errors import Fault
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, UNIFORM, KvFormat, QFormat, stored_as
from pipelines.domain.hf_config import shown
from pipelines.domain.model_shape import ModelShape

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_GROUPS = (16, 32, 64, 128, 256)
_KNOWN = (
    "Folders of AutoGPTQ and GPTQModel (gptq), AutoAWQ (awq), compressed-tensors, AutoFP8 (fp8) and ModelOpt can be"
    " taken over."
)
_IN_16_BIT = {"lm_head", "re:.*lm_head", "lm_head*", "model.embed_tokens"}
"""What a folder in FP8 may leave out, as it names it."""


@dataclass(frozen=True, slots=True)
class GivenFormat:
    """What the checkpoint of a quantized folder holds.

    Attributes:
        qformat: what `quant` must say.
        group_size: what `quant.group_size` must say; None where it has no effect.
        kv_cache: what it has scales for; AUTO if for none.
        layers: of a mix: linear of the folder -> its format; those that it does not name are in 16 bit.
    """

    qformat: QFormat
    group_size: int | None = None
    kv_cache: KvFormat = KvFormat.AUTO
    layers: Mapping[str, QFormat] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.qformat is QFormat.FP8:
            return "FP8 with one scale per linear"
        if self.qformat is QFormat.INT4_GPTQ:
            return f"INT4 in groups of {self.group_size}"
        if self.layers:
            return "a mix of " + ", ".join(self.formats)
        return FORMATS[self.qformat].summary

    @property
    def formats(self) -> tuple[QFormat, ...]:
        """Its format, or those of a mix, without 16 bit."""
        found = set(self.layers.values()) or {self.qformat}
        return tuple(each for each in QFormat if each in found)

    @property
    def plain_activations(self) -> bool:
        """Whether no linear rounds its activations."""
        return all(FORMATS[each].activation == "16bit" for each in self.formats)

    def of(self, linear: str) -> QFormat:
        """Return the format of one linear, e.g. "model.layers.0.mlp.up_proj"."""
        return self.layers.get(linear, QFormat.NONE) if self.layers else self.qformat

    def effective_bits(self, shape: ModelShape) -> float:
        """Return the bits per weight of a mix over the linears of the layers, without scales of groups."""
        sizes = linear_shapes(shape)
        weights = sum(out * width for out, width in sizes.values()) * shape.num_hidden_layers
        bits = sum(
            out * width * FORMATS[self.of(f"model.layers.{layer}.{name}")].weights.bits
            for layer in range(shape.num_hidden_layers)
            for name, (out, width) in sizes.items()
        )
        return bits / weights


def quantization_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a Hugging Face folder says that it is quantized; None if it is not.

    Args:
        folder: the folder; ModelOpt's hf_quant_config.json in it has the last word.
        config: its config.json.

    Raises:
        UserError: hf_quant_config.json is no JSON, or a file with weights is damaged.
    """
    if (own := quantization_block(folder)).get("quant_algo"):
        return _mended({"quant_method": "modelopt", **own, "producer": quantization_producer(folder)}, folder)
    block = config.get("quantization_config")
    if not isinstance(block, Mapping):
        return None
    if block.get("quant_method") != "modelopt":
        return dict(block)
    cache = "FP8" if _is_fp8(block.get("kv_cache_scheme")) else block.get("kv_cache_scheme")
    return _mended({**block, "kv_cache_quant_algo": cache, "exclude_modules": block.get("ignore")}, folder)


def _mended(block: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Say whether activations are scaled first, which ModelOpt says of all INT4 in groups, also where nothing is."""
    if block.get("quant_algo") == FORMATS[QFormat.INT4_AWQ].quant_algo:
        names = (name for path in folder.glob("*.safetensors") for name in read_header(path))
        block["pre_quant_scale"] = any(name.endswith(f".{PRE_QUANT_SCALE}") for name in names)
    return block


def given_format(block: Mapping[str, Any]) -> GivenFormat:
    """Return what the checkpoint of a folder without faults holds."""
    method = block.get("quant_method")
    if method == "modelopt":
        return _modelopts(block)
    if method == "fp8" or block.get("format") == "float-quantized":
        return GivenFormat(QFormat.FP8, kv_cache=KvFormat.FP8 if block.get("kv_cache_scheme") else KvFormat.AUTO)
    return GivenFormat(QFormat.INT4_GPTQ, _group_size(block))


def _modelopts(block: Mapping[str, Any]) -> GivenFormat:
    cache = KvFormat.FP8 if block.get("kv_cache_quant_algo") else KvFormat.AUTO
    if block["quant_algo"] != MIXED:
        qformat = stored_as(block["quant_algo"], bool(block.get("pre_quant_scale")))
        return GivenFormat(qformat, block.get("group_size") if _is_grouped(qformat) else None, cache)
    blocks = _mapping(block["quantized_layers"])
    layers = {name: BY_QUANT_ALGO[each["quant_algo"]] for name, each in blocks.items()}
    sizes = [blocks[name].get("group_size") for name, qformat in layers.items() if _is_grouped(qformat)]
    return GivenFormat(QFormat.AUTO, sizes[0] if sizes else None, cache, layers)


def _is_grouped(qformat: QFormat) -> bool:
    """Return whether `quant.group_size` has an effect."""
    weights = FORMATS[qformat].weights
    return bool(weights.group) and not weights.group_is_fixed


def import_faults(
    folder: Path,
    config: Mapping[str, Any],
    *,
    qformat: QFormat,
    group_size: int,
    kv_cache: KvFormat,
    world_size: int,
    effective_bits: float | None = None,
    candidates: Sequence[QFormat] = (),
    key: str = "model.path",
) -> list[Fault]:
    """Return why a quantized folder cannot be taken over like that; reads `g_idx`, but no weights.

    Args:
        folder: the folder.
        config: its config.json.
        qformat: what `quant` says.
        group_size: what `quant.group_size` says.
        kv_cache: element type of the KV cache.
        world_size: ranks.
        effective_bits: of quant=auto.
        candidates: of quant=auto.
        key: setting that names the folder.
    """
    block = quantization_of(folder, config)
    if block is None:
        return []
    what = f"{key}='{folder}' is already quantized (quant_method={shown(block.get('quant_method'))})"
    faults = [*_kind_faults(what, block)]
    if faults:
        return faults
    given = given_format(block)
    faults += _lost_scales(what, block, given, config)
    if qformat is not given.qformat:
        size = "" if given.group_size in (None, 128) else f" quant.group_size={given.group_size}"
        faults.append(
            Fault(
                f"{what}, and quant={qformat} would quantize it again.",
                f"Its weights are taken over as they are: {given}.",
                f"Set quant={given.qformat}{size}, or give the original model.",
            )
        )
    elif given.layers and (mix := _mix_words(given, config)) != _words(effective_bits, candidates):
        faults.append(Fault(f"{what} as {given}.", "Size and memory are planned from these settings.", f"Set {mix}."))
    elif given.group_size not in (None, group_size):
        faults.append(
            Fault(f"{what} in groups of {given.group_size}.", todo=f"Set quant.group_size={given.group_size}.")
        )
    if kv_cache not in (KvFormat.AUTO, given.kv_cache) and not given.plain_activations:
        can = "Set kv_cache=auto." if given.kv_cache is KvFormat.AUTO else f"Set kv_cache={given.kv_cache} or auto."
        faults.append(
            Fault(
                f"{what} without scales for kv_cache={kv_cache}.",
                "They can be calibrated where activations are not rounded.",
                can,
            )
        )
    if world_size > 1:
        faults.append(
            Fault(
                f"{what}; it is taken over for one rank, not {world_size}.",
                todo="Set build.tp_size=1 build.pp_size=1, or give the original model.",
            )
        )
    return faults or ([] if given.group_size is None else [*_order_faults(folder, given.group_size)])


SCALED_NORMS_SINCE = (0, 47)
"""First of the two ModelOpt versions that were tried that folds scales into norms that are stored less one."""


def _lost_scales(what: str, block: Mapping[str, Any], given: GivenFormat, config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a folder whose norms lack the scales that ModelOpt divided the weights by.

    0.37 multiplies the norm as it is stored (`export/quant_utils.py`, fuse_prequant_layernorm), which for Gemma is less
    one.
    """
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    smoothed = any(FORMATS[each].tuning == "awq" for each in given.formats)
    if family is None or not family.norm_offset or not smoothed:
        return
    version = str((block.get("producer") or {}).get("version"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < SCALED_NORMS_SINCE:
        yield Fault(
            f"{what} by ModelOpt {version}, whose AWQ folders of {family.title} lack scales in the norms.",
            "0.47.0 writes them right; they cannot be found again.",
            "Give the original model, or quantize it with a newer ModelOpt.",
        )


def _mix_words(given: GivenFormat, config: Mapping[str, Any]) -> str:
    """Return the settings of quant=auto that say what a mix holds."""
    bits = given.effective_bits(ModelShape.from_hf_config(config, "config.json"))
    return _words(math.ceil(round(bits * 100, 6)) / 100, given.formats)


def _words(effective_bits: float | None, candidates: Sequence[QFormat]) -> str:
    names = ",".join(each for each in QFormat if each in candidates)
    return f"quant.effective_bits={effective_bits or 0:g} quant.candidates=[{names}]"


def _group_size(block: Mapping[str, Any]) -> Any:
    if block.get("quant_method") != "compressed-tensors":
        return block.get("group_size")
    return _weights(block).get("group_size")


def _weights(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how compressed-tensors rounds the weights of its first group of linears."""
    return next(iter(_mapping(block.get("config_groups")).values()), {}).get("weights") or {}


def _mapping(given: Any) -> dict[str, dict[str, Any]]:
    return {str(k): dict(v) for k, v in given.items() if isinstance(v, Mapping)} if isinstance(given, Mapping) else {}


def _kind_faults(what: str, block: Mapping[str, Any]) -> Iterator[Fault]:
    todo = "Give the original model."
    judged = _DEMANDS.get(str(block.get("quant_method")))
    if judged is None:
        yield Fault(f"{what}.", _KNOWN, todo)
        return
    for name, value, allowed in judged(block):
        if value not in allowed:
            known = ", ".join(shown(each) for each in allowed if each is not None)
            can = f"It can be {known}." if known else "It must be absent."
            yield Fault(f"{what} with {name}={shown(value)}.", can, todo)


_Demands = Iterator[tuple[str, Any, tuple[Any, ...]]]
"""Name of an entry, what it is, what it may be."""


def _of_gptq(block: Mapping[str, Any]) -> _Demands:
    yield "bits", block.get("bits"), (4,)
    yield "group_size", block.get("group_size"), _GROUPS
    yield "checkpoint_format", block.get("checkpoint_format"), (*ZEROS_LESS_ONE, None)
    yield "lm_head", block.get("lm_head") or None, (None,)


def _of_awq(block: Mapping[str, Any]) -> _Demands:
    yield "bits", block.get("bits"), (4,)
    yield "group_size", block.get("group_size"), _GROUPS
    yield "version", str(block.get("version", "gemm")).lower(), ("gemm",)
    yield "modules_to_not_convert", block.get("modules_to_not_convert") or None, (None, ["lm_head"])


def _of_compressed(block: Mapping[str, Any]) -> _Demands:
    groups, weights = _mapping(block.get("config_groups")), _weights(block)
    only = next(iter(groups.values()), {})
    yield "format", block.get("format"), ("pack-quantized", "float-quantized")
    yield "number of config_groups", len(groups), (1,)
    yield "targets", only.get("targets"), (["Linear"],)
    if block.get("format") == "float-quantized":
        yield from _fp8_of("weights", weights)
        yield from _fp8_of("input_activations", only.get("input_activations") or {})
        if cache := block.get("kv_cache_scheme"):
            yield from _fp8_of("kv_cache_scheme", cache)
        yield "ignore", _unknown(block.get("ignore")), (None,)
        return
    yield "input_activations", only.get("input_activations"), (None,)
    yield "num_bits", weights.get("num_bits"), (4,)
    yield "type", weights.get("type", "int"), ("int",)
    yield "strategy", weights.get("strategy"), ("group",)
    yield "group_size", weights.get("group_size"), _GROUPS
    yield "ignore", block.get("ignore") or None, (["lm_head"],)
    yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)


def _fp8_of(part: str, given: Mapping[str, Any]) -> _Demands:
    """One fixed scale: TensorRT-LLM's FP8 has neither scales for channels nor such as are made while the model runs."""
    yield f"{part}.num_bits", given.get("num_bits"), (8,)
    yield f"{part}.type", given.get("type"), ("float",)
    yield f"{part}.strategy", given.get("strategy", "tensor"), ("tensor",)
    yield f"{part}.dynamic", given.get("dynamic") or False, (False,)


def _is_fp8(scheme: Any) -> bool:
    return isinstance(scheme, Mapping) and all(value in allowed for _, value, allowed in _fp8_of("", scheme))


def _of_auto_fp8(block: Mapping[str, Any]) -> _Demands:
    yield "activation_scheme", block.get("activation_scheme"), ("static",)
    yield "weight_block_size", block.get("weight_block_size"), (None,)
    yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)
    yield "ignored_layers", _unknown(block.get("ignored_layers")), (None,)
    yield "modules_to_not_convert", _unknown(block.get("modules_to_not_convert")), (None,)


_ALGORITHMS = tuple(dict.fromkeys(FORMATS[each].quant_algo for each in UNIFORM if FORMATS[each].calibrated))
_MIXED_ALGORITHMS = tuple(FORMATS[each].quant_algo for each in UNIFORM if FORMATS[each].mixable)
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


def _of_modelopt(block: Mapping[str, Any]) -> _Demands:
    yield "quant_algo", block.get("quant_algo"), (*_ALGORITHMS, MIXED)
    yield "kv_cache_quant_algo", block.get("kv_cache_quant_algo"), ("FP8", None)
    yield "exclude_modules", _unknown(block.get("exclude_modules")), (None,)
    if block.get("quant_algo") == MIXED:
        yield from _of_mix(_mapping(block.get("quantized_layers")))
    else:
        yield from _of_modelopts_groups("", block)


def _of_modelopts_groups(name: str, block: Mapping[str, Any]) -> _Demands:
    """Sizes of groups; ModelOpt packs symmetric weights alone."""
    algorithm = block.get("quant_algo")
    weights = FORMATS[BY_QUANT_ALGO[algorithm]].weights if algorithm in _ALGORITHMS else None
    if weights is not None and weights.group:
        sizes = (weights.group,) if weights.group_is_fixed else _GROUPS
        yield f"{name}group_size", block.get("group_size"), sizes
    yield f"{name}has_zero_point", block.get("has_zero_point") or None, (None,)


def _of_mix(layers: Mapping[str, Mapping[str, Any]]) -> _Demands:
    yield "number of quantized_layers", len(layers) or 0, (len(layers) or 1,)
    unknown = next((name for name in layers if not _LINEAR.fullmatch(name)), None)
    yield "quantized_layers", unknown, (None,)
    said = ("quant_algo", "group_size", "has_zero_point")
    kinds: dict[str, str] = {}
    for name, block in layers.items():
        kinds.setdefault(repr([block.get(key) for key in said]), name)
    for name in kinds.values():  # the first linear of each kind
        yield f"quantized_layers.{name}.quant_algo", layers[name].get("quant_algo"), _MIXED_ALGORITHMS
        yield from _of_modelopts_groups(f"quantized_layers.{name}.", layers[name])
    sizes = [each["group_size"] for each in layers.values() if each.get("group_size")]
    yield "quantized_layers.group_size", next((size for size in sizes if size != sizes[0]), None), (None, *sizes[:1])
    for name, other in _apart(layers):
        yield f"quantized_layers.{name}.quant_algo", layers.get(name, {}).get("quant_algo"), (other,)
        return


def _apart(layers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield linears whose format is not that of the first one that TensorRT-LLM computes them with, and that format."""
    for layer in dict.fromkeys(".".join(name.split(".")[:3]) for name in layers):
        for first, *others in FUSED:
            algorithm = layers.get(f"{layer}.{first}", {}).get("quant_algo")
            for name in others:
                if layers.get(f"{layer}.{name}", {}).get("quant_algo") != algorithm:
                    yield f"{layer}.{name}", algorithm


def _unknown(left_out: Any) -> Any:
    """Return what stays in 16 bit beyond head and embedding, which TensorRT-LLM's checkpoint always keeps so."""
    if not isinstance(left_out, list):
        return left_out or None
    return [name for name in left_out if name not in _IN_16_BIT] or None


_DEMANDS: dict[str, Callable[[Mapping[str, Any]], _Demands]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "compressed-tensors": _of_compressed,
    "fp8": _of_auto_fp8,
    "modelopt": _of_modelopt,
}


def _order_faults(folder: Path, group_size: int) -> Iterator[Fault]:
    """Yield a linear whose groups are not runs of neighbouring inputs, as act-order (desc_act) leaves them."""
    for path in sorted(folder.glob("*.safetensors")):
        file = TensorFile(path)
        for name in file:
            if name.endswith("g_idx") and not _in_order(file[name], group_size):
                yield Fault(
                    f"'{name}' of {folder} assigns inputs to groups out of order (act-order).",
                    f"TensorRT-LLM knows groups of {group_size} neighbouring inputs only.",
                    "Quantize the model without act-order (desc_act=false), or give the original model.",
                )
                return


def _in_order(groups: Array, group_size: int) -> bool:
    import numpy as np

    return bool((groups == np.arange(len(groups)) // group_size).all())
