"""A Hugging Face folder before it is loaded: its configuration, its files, and the types of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.tensors import read_header
from pipelines.compress.specs import Dtype
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.host.files import parse_json, small_text

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXPORTED = ("bfloat16", "float16")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type named "bfloat16", "float16" or "float32"."""
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk, inspected but not loaded.

    Attributes:
        folder: plain Hugging Face folder.
        config: its parsed config.json.
        shape: the model's sizes, from config.json.
        weight_files: its safetensors files, sorted.
    """

    folder: Path
    config: dict[str, Any]
    shape: ModelShape
    weight_files: tuple[Path, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files on disk."""
        return sum(path.stat().st_size for path in self.weight_files)


def look_at(folder: Path) -> ModelFolder:
    """Read config.json and check every safetensors header against its file's size.

    Raises:
        UserError: no such folder, no config.json, an unknown architecture, no safetensors, a damaged file.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(
            f"{folder} has no config.json; it is not a Hugging Face model folder.",
            allowed="A model folder contains config.json, tokenizer files and *.safetensors.",
        )
    try:
        config: dict[str, Any] = parse_json(small_text(config_path))
    except ValueError as error:
        raise UserError(f"{config_path} is not valid JSON: {error}.", todo="Download the model again.") from None
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise UserError(
            f"{folder} contains no *.safetensors file.",
            allowed="Weights are read from safetensors only; pickled .bin and .pt files are not opened.",
            todo="Convert the model with save_pretrained(..., safe_serialization=True).",
        )
    for path in files:
        read_header(path)
    return ModelFolder(folder, config, ModelShape.from_hf_config(config, str(config_path)), files)


def pick_dtype(source: ModelFolder, wanted: Dtype) -> str:
    """Return "bfloat16" or "float16": the requested one, or the model's own.

    A float32 model becomes bfloat16: its range is that of float32, while float16 overflows in Gemma.
    """
    if wanted != "auto":
        return wanted
    own = own_dtype(source)
    return own if own in _EXPORTED else "bfloat16"


def own_dtype(source: ModelFolder) -> str:
    """Return the type of the model's weights; float32 if its configuration does not specify one."""
    own = source.config.get("dtype") or source.config.get("torch_dtype")
    return own if own in _TORCH_DTYPES else "float32"


def pick_device(wanted: str) -> str:
    """Return "cuda" or "cpu"; "auto" selects CUDA if it is available.

    Raises:
        UserError: CUDA was requested but is not available, or the name is unknown.
    """
    has_cuda = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"device='{wanted}' is not known.", allowed="Choose one of auto, cpu, cuda.")
    if wanted == "cuda" and not has_cuda:
        raise UserError(
            f"PyTorch {torch.__version__} cannot use a GPU here (built for CUDA {torch.version.cuda or 'not at all'}).",
            todo="`make doctor` shows the driver and its CUDA version; install a PyTorch for that. With an empty "
            "CUDA_VISIBLE_DEVICES everything is computed on the CPU.",
        )
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"
