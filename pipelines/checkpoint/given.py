"""Hugging Face folders that are already quantized: which kind, whether it can be taken over, and what its tensors mean.

Shape legend: O output channels, I input channels, G groups of input channels.

Sources: `quantization_config` as AutoGPTQ 0.7.1 and GPTQModel 7.7 write it; the tensors of a linear are those of their
`nn_modules/qlinear`: qweight int32 [I/8, O], eight neighbouring inputs in a value, the first in the lowest bits; qzeros
int32 [G, O/8] likewise; scales [G, O]; g_idx int32 [I], the group of each input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.errors import Fault, UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.hf_config import shown

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

IMPORTED = QFormat.INT4_GPTQ
"""What `quant` must say: the format that the checkpoint of such a folder has."""
_ZEROS_LESS_ONE = {"gptq": True, "gptq_v2": False}
"""`checkpoint_format` -> whether zero points are stored less one; AutoGPTQ, which names no format, does."""


@dataclass(frozen=True, slots=True)
class GivenLinear:
    """A linear as a TensorRT-LLM checkpoint has it.

    Attributes:
        codes: int8 [O, I], -8 to 7.
        scales: float32 [O, G].
        points: zero points, [O, G]; 8 is symmetric.
    """

    codes: Array
    scales: Array
    points: Array


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
    group = block.get("group_size")
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


def _kind_faults(what: str, block: Mapping[str, Any]) -> Iterator[Fault]:
    todo = "Give the original model."
    if block.get("quant_method") != "gptq":
        yield Fault(f"{what}.", "Folders of AutoGPTQ and GPTQModel (gptq) can be taken over.", todo)
        return
    wanted = {"bits": (4,), "group_size": (16, 32, 64, 128, 256), "checkpoint_format": (*_ZEROS_LESS_ONE, None)}
    for name, allowed in wanted.items():
        if (value := block.get(name)) not in allowed:
            known = ", ".join(str(each) for each in allowed if each is not None)
            yield Fault(f"{what} with {name}={shown(value)}.", f"It can be {known}.", todo)
    if block.get("lm_head"):
        yield Fault(f"{what} with its output head.", "The head must be in 16 bit.", todo)


def _order_faults(folder: Path, group_size: int) -> Iterator[Fault]:
    """Yield a linear whose groups are not runs of neighbouring inputs, as act-order (desc_act) leaves them."""
    for path in sorted(folder.glob("*.safetensors")):
        file = TensorFile(path)
        for name in file:
            if name.endswith(".g_idx") and not _in_order(file[name], group_size):
                yield Fault(
                    f"'{name}' of {folder} assigns inputs to groups out of order (desc_act=true).",
                    f"TensorRT-LLM knows groups of {group_size} neighbouring inputs only.",
                    "Quantize the model with desc_act=false, or give the original model.",
                )
                return


def _in_order(groups: Array, group_size: int) -> bool:
    import numpy as np

    return bool((groups == np.arange(len(groups)) // group_size).all())


def decode(tensors: Mapping[str, Array], name: str, block: Mapping[str, Any]) -> GivenLinear:
    """Return a linear of a GPTQ folder.

    Args:
        tensors: of the folder.
        name: of the linear, e.g. "model.layers.0.mlp.up_proj".
        block: `quantization_config`.

    Raises:
        UserError: a tensor is missing.
    """
    import numpy as np

    for leaf in ("qweight", "qzeros", "scales"):
        if f"{name}.{leaf}" not in tensors:
            raise UserError(f"The folder lacks the tensor '{name}.{leaf}'.", todo="Download the model again.")
    codes = _nibbles(tensors[f"{name}.qweight"].T)  # [O, I]
    points = _nibbles(tensors[f"{name}.qzeros"])  # [G, O]
    if _ZEROS_LESS_ONE[block.get("checkpoint_format") or "gptq"]:
        points = (points + 1) & 15  # AutoGPTQ's kernels wrap 16 to 0 as well
    scales = np.ascontiguousarray(tensors[f"{name}.scales"].T.astype(np.float32))
    return GivenLinear((codes.astype(np.int8) - np.int8(8)), scales, points.T)


def _nibbles(packed: Array) -> Array:
    """Unpack int32 [R, C] to eight values each, the first from the lowest bits: uint8 [R, 8 C]."""
    import numpy as np

    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    found: Array = ((words >> np.arange(0, 32, 4, dtype=np.uint32)) & 15).astype(np.uint8)
    return found.reshape(packed.shape[0], -1)
