"""Hugging Face folders that are already quantized: which kind, and whether it can be taken over.

Sources: `quantization_config` as AutoGPTQ 0.7.1 and GPTQModel 7.7, AutoAWQ 0.2.9 (`models/_config.py`) and
compressed-tensors 0.20 (`quantization/quant_config.py`, `quant_args.py`) write it; for its tensors see `packings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.packings import ZEROS_LESS_ONE
from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.errors import Fault
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.hf_config import shown

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

IMPORTED = QFormat.INT4_GPTQ
"""What `quant` must say: the format that the checkpoint of such a folder has."""
_GROUPS = (16, 32, 64, 128, 256)
_KNOWN = "Folders of AutoGPTQ and GPTQModel (gptq), AutoAWQ (awq) and compressed-tensors can be taken over."


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a Hugging Face folder says that it is quantized, from its config.json; None if it is not."""
    block = config.get("quantization_config")
    return dict(block) if isinstance(block, Mapping) else None


def import_faults(
    folder: Path,
    config: Mapping[str, Any],
    *,
    qformat: QFormat,
    group_size: int,
    kv_cache: KvFormat,
    world_size: int,
    key: str = "model.path",
) -> list[Fault]:
    """Return why a quantized folder cannot be taken over like that; reads `g_idx`, but no weights."""
    block = quantization_of(config)
    if block is None:
        return []
    what = f"{key}='{folder}' is already quantized (quant_method={shown(block.get('quant_method'))})"
    faults = [*_kind_faults(what, block)]
    if faults:
        return faults
    group = group_size_of(block)
    if qformat is not IMPORTED:
        size = "" if group == 128 else f" quant.group_size={group}"
        faults.append(
            Fault(
                f"{what}, and quant={qformat} would quantize it again.",
                f"Its weights are taken over as they are: INT4 in groups of {group}.",
                f"Set quant={IMPORTED}{size}, or give the original model.",
            )
        )
    elif group != group_size:
        faults.append(Fault(f"{what} in groups of {group}.", todo=f"Set quant.group_size={group}."))
    if kv_cache is not KvFormat.AUTO:
        faults.append(Fault(f"{what} without scales for kv_cache={kv_cache}.", todo="Set kv_cache=auto."))
    if world_size > 1:
        faults.append(
            Fault(
                f"{what}; it is taken over for one rank, not {world_size}.",
                todo="Set build.tp_size=1 build.pp_size=1, or give the original model.",
            )
        )
    return faults or [*_order_faults(folder, group_size)]


def group_size_of(block: Mapping[str, Any]) -> Any:
    """Return how many inputs share a scale, as the folder says it; None if it does not."""
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
    yield "format", block.get("format"), ("pack-quantized",)
    yield "number of config_groups", len(groups), (1,)
    yield "targets", only.get("targets"), (["Linear"],)
    yield "input_activations", only.get("input_activations"), (None,)
    yield "num_bits", weights.get("num_bits"), (4,)
    yield "type", weights.get("type", "int"), ("int",)
    yield "strategy", weights.get("strategy"), ("group",)
    yield "group_size", weights.get("group_size"), _GROUPS
    yield "ignore", block.get("ignore") or None, (["lm_head"],)
    yield "kv_cache_scheme", block.get("kv_cache_scheme"), (None,)


_DEMANDS: dict[str, Callable[[Mapping[str, Any]], _Demands]] = {
    "gptq": _of_gptq,
    "awq": _of_awq,
    "compressed-tensors": _of_compressed,
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
