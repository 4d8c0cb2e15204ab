"""Load a Hugging Face folder as torch model and tokenizer: local files and safetensors only, no remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelines.checkpoint.tensors import read_header
from pipelines.compress.postprocess import local_rope, rope_scaling
from pipelines.compress.specs import Dtype
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.host.files import parse_json

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
        config: dict[str, Any] = parse_json(config_path.read_text(encoding="utf-8"))
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


def load_model(source: ModelFolder, dtype: str, device: str) -> torch.nn.Module:
    """Load the weights in `dtype` straight from the safetensors files, ready for inference.

    Raises:
        UserError: a weight is missing or not finite.
    """
    with plain_torch():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(source.folder),
            config=hf_config(source),
            dtype=torch_dtype(dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{source.folder} lacks the tensor '{missing[0]}' ({len(missing)} missing).",
            todo="Download the model again.",
        )
    check_finite(model, source.folder)
    model.config.use_cache = False
    ready: torch.nn.Module = model.to(device).eval().requires_grad_(False)
    return ready


def load_tokenizer(source: ModelFolder) -> Any:
    """Load the folder's tokenizer.

    tokenizer.json is self-contained: read directly, it gives the same ids under every version of
    Transformers, whereas `AutoTokenizer` of 4.x rejects the class names that 5.x writes.

    Raises:
        UserError: the folder has no tokenizer, or it cannot be read.
    """
    complete = source.folder / "tokenizer.json"
    try:
        if complete.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(complete))  # type: ignore[no-untyped-call]
        return AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        raise UserError(
            f"{source.folder} has no usable tokenizer: {str(error).splitlines()[0]}",
            todo="Put tokenizer.json and tokenizer_config.json next to config.json.",
        ) from error


def check_finite(model: torch.nn.Module, folder: Path) -> None:
    """Reject a model with NaN or infinity in a weight.

    Raises:
        UserError: such a weight was found; the message names it.
    """
    for name, weight in model.named_parameters():
        # NaN and infinity both show up in the minimum or maximum, which need no copy of the tensor
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(weight.detach())):
            raise UserError(
                f"The weight '{name}' of {folder} contains NaN or infinity.",
                todo="Download or train the model again; such a model cannot be calibrated.",
            )


def hf_config(source: ModelFolder) -> Any:
    """Return Transformers' configuration, with RoPE read correctly whichever version wrote the file.

    Transformers 5 writes `rope_parameters`; 4.x only reads `rope_theta` and `rope_scaling` and would silently
    fall back to theta 10,000.
    """
    config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    new_style = source.config.get("rope_parameters")
    if new_style and int(transformers.__version__.split(".")[0]) < 5:
        if local := local_rope(source.config):
            for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
                setattr(config, key, local[key])
            return config
        config.rope_theta = new_style.get("rope_theta", 10000.0)
        config.rope_scaling = rope_scaling(source.config)
    return config


@contextmanager
def plain_torch() -> Iterator[None]:
    """Set torch's default dtype to float32, so that the caller's setting does not affect loading."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
