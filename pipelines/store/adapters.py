"""Inspect LoRA adapters while planning: configuration and tensor sizes, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tensors import TensorInfo, read_header
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import UserError
from pipelines.host.files import parse_json, small_text
from pipelines.store.hash_cache import HashCache
from pipelines.store.links import check_links
from pipelines.store.sources import InputSource, files_source

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of peft's tensor names: `...q_proj.lora_A.weight` is [rank, inputs], `...lora_B.weight` [outputs, rank]."""


def adapter_source(folder: Path, hashes: HashCache, key: str) -> tuple[InputSource, Adapter]:
    """Inspect a folder written by peft.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        hashes: cache, so that each file is hashed only once.
        key: setting that names the folder, for messages.

    Raises:
        UserError: the folder was not written by peft, or its weights are pickled; the message says what is missing.
    """
    check_links(folder.expanduser(), key)
    source = files_source(folder, hashes, key)
    config = _config(source.path, key)
    if not (source.path / WEIGHTS).is_file():
        pickled = (source.path / "adapter_model.bin").is_file()
        raise UserError(
            f"{key}='{folder}' has no {WEIGHTS}" + (", only pickled weights." if pickled else "."),
            allowed="Only safetensors are read, because pickles can run code when loaded.",
            todo="Save the adapter with peft's save_pretrained().",
        )
    tensors = read_header(source.path / WEIGHTS)
    widths, ranks = _sizes(tensors)
    if not widths:
        raise UserError(f"{key}='{folder}' has no LoRA matrices in {WEIGHTS}.", allowed=f"Their names end in {A}, {B}.")
    return source, Adapter(
        place=str(folder),
        kind=str(config.get("peft_type", "")).upper(),
        rank=max(ranks),
        modules=tuple(sorted(widths)),
        widths=widths,
        is_dora=bool(config.get("use_dora", False)),
    )


def _config(folder: Path, key: str) -> Mapping[str, Any]:
    try:
        config = parse_json(small_text(folder / CONFIG))
    except FileNotFoundError:
        raise UserError(
            f"{key}='{folder}' is not an adapter: it has no {CONFIG}.",
            todo="Give a folder that peft's save_pretrained() wrote.",
        ) from None
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} is not a JSON object.")
    return config


def _sizes(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, tuple[int, int]], set[int]]:
    """Return (inputs, outputs) of each linear that the adapter changes, and the ranks."""
    widths, ranks = {}, set()
    for name, first in tensors.items():
        second = tensors.get(name.removesuffix(A) + B)
        if name.endswith(A) and second is not None and len(first.shape) == len(second.shape) == 2:
            widths[name.removesuffix(A).split(".")[-1]] = (first.shape[1], second.shape[0])
            ranks.add(first.shape[0])
    return widths, ranks
