"""Load a Hugging Face folder as torch model and tokenizer: local files and safetensors only, no remote code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.tokenizer import opened
from pipelines.compress.model_folder import ModelFolder, torch_dtype
from pipelines.compress.transformers_door import (
    MAJOR,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from pipelines.domain.errors import UserError
from pipelines.domain.families import settled
from pipelines.domain.rotary import both_spellings


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
    """Load the folder's tokenizer: tokenizer.json, whatever class is named, which gives the same ids everywhere.

    Raises:
        UserError: the folder has no tokenizer, or it cannot be read.
    """
    return PreTrainedTokenizerFast(**opened(source.folder).for_transformers())  # type: ignore[no-untyped-call]


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

    Transformers 5 writes `rope_parameters`; 4.x only reads `rope_theta` and `rope_scaling` beside it, and would
    silently fall back to theta 10,000.
    """
    config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    if MAJOR < 5:
        rope = both_spellings(settled(source.config))
        for key in rope.keys() - {"rope_parameters"}:
            setattr(config, key, rope[key])
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
