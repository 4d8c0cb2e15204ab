"""Import of quantized Hugging Face folders: read the format and check that the settings fit it.

`declarations` reads config.json, `stored_linears` checks the tensors, and `packings` decodes them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.config_json import MIXED
from pipelines.checkpoint.declarations import (
    WHOLE_ROW,
    group_of,
    kind_faults,
    mapping_of,
    packing_of,
    quantization_of,
    stored_group,
)
from pipelines.checkpoint.stored_linears import sixteen_bit_faults, stored_faults
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.unified import linear_shapes
from pipelines.domain.errors import Fault, shown
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, KvFormat, QFormat, stored_as
from pipelines.domain.model_shape import ModelShape

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class GivenFormat:
    """Contents of a quantized folder's checkpoint.

    Attributes:
        qformat: required value of `quant`.
        group_size: required value of `quant.group_size`; None where it has no effect.
        kv_cache: format of its KV-cache scales; AUTO without scales.
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
        qformats = set(self.layers.values()) or {self.qformat}
        return tuple(each for each in QFormat if each in qformats)

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


def given_format(block: Mapping[str, Any]) -> GivenFormat:
    """Return the contents of a valid folder's checkpoint."""
    packing = packing_of(block)
    if packing == "modelopt":
        return _modelopts(block)
    if qformat := WITH_ACTIVATIONS.get(packing):
        return GivenFormat(qformat, kv_cache=KvFormat.FP8 if block.get("kv_cache_scheme") else KvFormat.AUTO)
    return GivenFormat(QFormat.INT4_GPTQ, group_of(block))


WITH_ACTIVATIONS = {
    "fp8": QFormat.FP8,
    "float-quantized": QFormat.FP8,
    "int-quantized": QFormat.INT8_SQ,
    "nvfp4-pack-quantized": QFormat.NVFP4,
}
"""Packings whose activations are rounded as well -> our format."""


def _modelopts(block: Mapping[str, Any]) -> GivenFormat:
    cache = KvFormat.FP8 if block.get("kv_cache_quant_algo") else KvFormat.AUTO
    if block["quant_algo"] != MIXED:
        qformat = stored_as(block["quant_algo"], bool(block.get("pre_quant_scale")))
        return GivenFormat(qformat, block.get("group_size") if _is_grouped(qformat) else None, cache)
    blocks = mapping_of(block["quantized_layers"])
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
    name: str | None = None,
) -> list[Fault]:
    """Return why a quantized folder cannot be imported with these settings; reads `g_idx`, but no weights.

    Weights that are not there, before a model's download, are not judged. `name` is for messages.
    """
    name = name or f"model.path='{folder}'"
    block = quantization_of(folder, config)
    if block is None:
        return [*sixteen_bit_faults(name, folder, config)]
    what = f"{name} is already quantized (quant_method={shown(block.get('quant_method'))})"
    faults = [*kind_faults(what, block)]
    if faults:
        return faults
    stored = given_format(block)
    if faults := [*stored_faults(what, folder, config, block, stored.group_size)]:
        return faults
    faults += _lost_scales(what, block, stored, config)
    faults += _other_format(what, config, stored, qformat, group_size, (effective_bits, candidates))
    faults += _use_faults(what, stored, kv_cache, world_size)
    return faults or ([] if stored.group_size is None else [*_order_faults(folder, block)])


def _use_faults(what: str, stored: GivenFormat, kv_cache: KvFormat, world_size: int) -> Iterator[Fault]:
    if kv_cache not in (KvFormat.AUTO, stored.kv_cache) and not stored.plain_activations:
        yield Fault(
            f"{what} without scales for kv_cache={kv_cache}.",
            "They can be calibrated where activations are not rounded.",
            "Set kv_cache=auto." if stored.kv_cache is KvFormat.AUTO else f"Set kv_cache={stored.kv_cache} or auto.",
        )
    if world_size > 1 and stored.qformat is not QFormat.FP8:
        yield Fault(
            f"{what}; it is taken over for one rank, not {world_size}.",
            todo="Set build.tp_size=1 build.pp_size=1, or give the original model.",
        )


def _other_format(
    what: str,
    config: Mapping[str, Any],
    stored: GivenFormat,
    qformat: QFormat,
    group_size: int,
    mix: tuple[float | None, Sequence[QFormat]],
) -> Iterator[Fault]:
    if qformat is not stored.qformat:
        size = "" if stored.group_size in (None, 128) else f" quant.group_size={stored.group_size}"
        yield Fault(
            f"{what}, and quant={qformat} would quantize it again.",
            f"Its weights are used unchanged: {stored}.",
            f"Set quant={stored.qformat}{size}, or give the original model.",
        )
        return
    if stored.layers and (overrides := _mix_words(stored, config)) != _words(*mix):
        yield Fault(f"{what} as {stored}.", "Size and memory are planned from these settings.", f"Set {overrides}.")
        return
    if stored.group_size not in (None, group_size):
        yield Fault(f"{what} in groups of {stored.group_size}.", todo=f"Set quant.group_size={stored.group_size}.")
        return


SCALED_NORMS_SINCE = (0, 47)
"""First of the two ModelOpt versions that were tried that folds scales into norms that are stored less one."""


def _lost_scales(
    what: str, block: Mapping[str, Any], stored: GivenFormat, config: Mapping[str, Any]
) -> Iterator[Fault]:
    """Yield a folder whose norms lack the scales that ModelOpt divided the weights by.

    0.37 multiplies the norm as it is stored (`export/quant_utils.py`, fuse_prequant_layernorm), which for Gemma is less
    one.
    """
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    smoothed = any(FORMATS[each].tuning == "awq" for each in stored.formats)
    if family is None or not family.norm_offset or not smoothed:
        return
    version = str((block.get("producer") or {}).get("version"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < SCALED_NORMS_SINCE:
        yield Fault(
            f"{what} by ModelOpt {version}, whose AWQ folders of {family.title} lack scales in the norms.",
            "0.47.0 writes them right; they cannot be found again.",
            "Give the original model, or quantize it with a newer ModelOpt.",
        )


def _mix_words(stored: GivenFormat, config: Mapping[str, Any]) -> str:
    """Return the settings of quant=auto that say what a mix holds."""
    bits = stored.effective_bits(ModelShape.from_hf_config(config, "config.json"))
    return _words(math.ceil(round(bits * 100, 6)) / 100, stored.formats)


def _words(effective_bits: float | None, candidates: Sequence[QFormat]) -> str:
    names = ",".join(each for each in QFormat if each in candidates)
    return f"quant.effective_bits={effective_bits or 0:g} quant.candidates=[{names}]"


def _order_faults(folder: Path, block: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a linear whose groups are not runs of neighbouring inputs, as act-order (desc_act) leaves them."""
    for path in sorted(folder.glob("*.safetensors")):
        file = TensorFile(path)
        for name in file:
            if name.endswith("g_idx") and not _in_order(file[name], stored_group(block)):
                yield Fault(
                    f"'{name}' of {folder} assigns inputs to groups out of order (act-order).",
                    f"TensorRT-LLM knows groups of {stored_group(block)} neighbouring inputs only.",
                    "Quantize the model without act-order (desc_act=false), or give the original model.",
                )
                return


def _in_order(groups: "Array", group_size: int) -> bool:
    import numpy as np

    size = len(groups) if group_size == WHOLE_ROW else group_size
    return bool((groups == np.arange(len(groups)) // size).all())
