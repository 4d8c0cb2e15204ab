"""Folders that are written to: whether they are writable, and how much room they have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pipelines.doctor.record import ProbeResult
from pipelines.domain.units import GIB, show_bytes
from pipelines.host.paths import why_no_folder

LEAST_BYTES = GIB
"""With less than this, not even the bundled models and their logs fit."""
ROOM_BYTES = 10 * GIB
"""With less than this, a model of a few billion parameters does not fit with its copies."""


def look(store: Path, runs: Path, environment: Mapping[str, str]) -> list[ProbeResult]:
    """Describe store, runs and the Hub's cache."""
    cache = environment.get("HF_HUB_CACHE") or Path(hub_home(environment)) / "hub"
    return [
        _place("store", store, f"paths.store={store}"),
        _place("runs", runs, f"paths.runs={runs}"),
        _place("HF cache", Path(cache).expanduser(), "HF_HOME"),
    ]


def hub_home(environment: Mapping[str, str]) -> str:
    """Return the folder of huggingface_hub's cache."""
    shared = environment.get("XDG_CACHE_HOME", "~/.cache")
    return str(Path(environment.get("HF_HOME") or f"{shared}/huggingface").expanduser())


def _place(name: str, folder: Path, setting: str) -> ProbeResult:
    folder = folder.expanduser().absolute()
    if why := why_no_folder(folder):
        return ProbeResult(name, f"{folder} cannot be created: {why}", "bad", f"Set another folder: {setting}")
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return ProbeResult(name, f"{folder} is not writable", "bad", f"Give another folder than {setting}.")
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        return ProbeResult(name, f"{folder}: free space unknown, {error.strerror}", "note")
    text = f"{folder}, {show_bytes(free)} free"
    if free < LEAST_BYTES:
        return ProbeResult(name, text, "bad", f"Free at least {show_bytes(LEAST_BYTES)}, or move it: {setting}")
    if free < ROOM_BYTES:
        return ProbeResult(name, text, "note", "Enough for the bundled models; large models need tens of GiB.")
    return ProbeResult(name, text)
