"""Read the folder of a LoRA adapter that peft wrote: the one reader of planning, conversion and the CPU engine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.adapter import MODULES, Adapter, check_config, scalings
from pipelines.domain.errors import UserError, shown
from pipelines.host.files import json_object

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of peft's tensor names: `...q_proj.lora_A.weight` is [rank, inputs], `...lora_B.weight` [outputs, rank]."""
MOST_CONFIG_BYTES = 4 * 2**20
FLOATS = ("F16", "BF16", "F32", "F64")
PREFIX = "base_model.model."
_MODULE = re.compile(
    r"(?:(?:model|language_model)\.){1,3}layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?P<linear>self_attn\.(?:q|k|v|o)_proj|mlp\.(?:gate|up|down)_proj)"
)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The checked files of one adapter; the matrices are read when they are wanted.

    Attributes:
        scalings: module as peft names it, e.g. "model.layers.0.self_attn.q_proj" -> factor of B (A x).
    """

    folder: Path
    tensors: TensorFile
    scalings: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path, name: str = "") -> "AdapterFiles":
        """Read the configuration and the header of the weights.

        Raises:
            UserError: a file is missing or damaged, or the adapter is more than LoRA matrices of linears.
        """
        name = name or f"'{folder}'"
        config = _config(folder, name)
        check_config(config, str(folder / CONFIG))
        tensors = TensorFile(_weights(folder, name))
        modules = _modules(tensors, name)
        ranks = {module: _rank(tensors, module) for module in modules}
        return cls(folder, tensors, scalings(config, str(folder / CONFIG), ranks))

    def matrices(self, module: str) -> "tuple[Array, Array]":
        """Return A [rank, inputs] and scaling * B [outputs, rank] of a module, float32.

        Raises:
            UserError: there is a value that is no number.
        """
        import numpy as np

        a, b = (self.tensors[f"{PREFIX}{module}{half}"].astype(np.float32) for half in (A, B))
        b *= np.float32(self.scalings[module])
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise UserError(
                f"{self.tensors.path} holds values of {module} that are not finite.", todo="Train the adapter again."
            )
        return a, b

    @property
    def described(self) -> Adapter:
        """Facts of an adapter that planning compares with the model."""
        header = self.tensors.header
        widths = {
            module: (header[f"{PREFIX}{module}{A}"].shape[1], header[f"{PREFIX}{module}{B}"].shape[0])
            for module in self.scalings
        }
        return Adapter(
            place=str(self.folder),
            rank=max(header[f"{PREFIX}{module}{A}"].shape[0] for module in widths),
            modules=tuple(sorted({module.rpartition(".")[2] for module in widths})),
            widths=widths,
            layers=1 + max(place(module)[0] for module in widths),
        )


def place(module: str) -> tuple[int, str]:
    """Return the layer of a module, and its name in it: (0, "self_attn.q_proj")."""
    match = _MODULE.fullmatch(module)
    assert match is not None, module
    return int(match["layer"]), match["linear"]


def _config(folder: Path, name: str) -> Mapping[str, Any]:
    try:
        return json_object(folder / CONFIG, MOST_CONFIG_BYTES, todo="Save the adapter again.")
    except FileNotFoundError:
        raise UserError(
            f"{name} is not an adapter: it has no {CONFIG}.", todo="Give a folder that peft's save_pretrained() wrote."
        ) from None


def _weights(folder: Path, name: str) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        if path.exists():
            raise UserError(f"{path} is not an ordinary file.", todo="Put the file itself there.")
        pickled = (folder / "adapter_model.bin").is_file()
        raise UserError(
            f"{name} has no {WEIGHTS}" + (", only pickled weights." if pickled else "."),
            allowed="Only safetensors are read, because pickles can run code when loaded.",
            todo="Save the adapter with peft's save_pretrained().",
        )
    return path


def _modules(tensors: TensorFile, name: str) -> list[str]:
    """Return the modules that have matrices, after checking that there is nothing else."""
    modules: dict[tuple[int, str], str] = {}
    for tensor in tensors:
        module = tensor.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
        if tensor not in (PREFIX + module + A, PREFIX + module + B) or not _MODULE.fullmatch(module):
            raise UserError(
                f"{tensors.path} holds {shown(tensor)}, which is no LoRA matrix of a known linear.",
                allowed=f"Known: {PREFIX}model.layers.<number>.<linear>{A} and {B} of {', '.join(MODULES)}.",
                todo="Use an adapter of only these linears, or merge it into its model (peft's merge_and_unload()) and"
                " give that as model.path.",
            )
        if modules.setdefault(place(module), module) != module:
            raise UserError(
                f"{tensors.path} adapts {module} and {modules[place(module)]}.", todo="Use an adapter of one model."
            )
    if not modules:
        raise UserError(f"{name} has no LoRA matrices in {WEIGHTS}.", allowed=f"Their names end in {A}, {B}.")
    return [modules[where] for where in sorted(modules)]


def _rank(tensors: TensorFile, module: str) -> int:
    """Return the rows of a module's A, after checking that A and B are there and match."""
    pair = {half: tensors.header.get(f"{PREFIX}{module}{half}") for half in (A, B)}
    a, b = pair[A], pair[B]
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        shapes = (
            f"{half.split('.')[1]} {'missing' if each is None else list(each.shape)}" for half, each in pair.items()
        )
        raise UserError(
            f"{tensors.path}: {module} has {', '.join(shapes)}.",
            allowed="A is [rank, inputs], B is [outputs, rank].",
            todo="Save the adapter again.",
        )
    if others := {a.dtype, b.dtype} - set(FLOATS):
        raise UserError(
            f"{tensors.path}: {module} is of type {min(others)}.",
            allowed=f"It must be one of {', '.join(FLOATS)}.",
            todo="Save the adapter in float32.",
        )
    return a.shape[0]
