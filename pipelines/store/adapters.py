"""Inspect LoRA adapters while planning: configuration and tensor sizes, without reading a weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipelines.checkpoint.adapter_files import CONFIG, WEIGHTS, AdapterFiles
from pipelines.domain.adapter import Adapter
from pipelines.domain.errors import UserError
from pipelines.store.hash_cache import HashCache
from pipelines.store.links import check_links
from pipelines.store.sources import InputSource, files_source


def adapter_source(folder: Path, hashes: HashCache, key: str) -> tuple[InputSource, Adapter]:
    """Inspect a folder written by peft.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors; nothing else in it counts.
        hashes: cache, so that each file is hashed only once.
        key: setting that names the folder, for messages.

    Raises:
        UserError: the folder was not written by peft, its weights are pickled, or it is more than LoRA matrices.
    """
    path = folder.absolute()
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{key}='{folder}' {state}.", todo="Give a folder that peft's save_pretrained() wrote.")
    check_links(path, key)
    found = AdapterFiles.read(path, f"{key}='{folder}'").described  # before hashing, which takes long for large files
    return files_source(path, hashes, key, only=(CONFIG, WEIGHTS)), replace(found, place=str(folder))
