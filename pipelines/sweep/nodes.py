"""Remember which kind of machine a launcher's jobs ran on, learned from their results.

Whether a cell is finished depends on the machine it runs on (the GPU is part of an engine's key), which is not the
login node. So the facts of the last node are kept per launcher configuration. While they are unknown, every cell is
submitted and finds out by itself what is finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipelines.host.files import write_json
from pipelines.host.machine import Machine
from pipelines.store.store import fingerprint
from pipelines.sweep.cells import SweepCell

FILE = ".nodes.json"


def recall(store: Path, launcher: Any) -> Machine | None:
    """Return the machine that this launcher's jobs last ran on, or None."""
    try:
        return TypeAdapter(Machine).validate_python(_known(store)[_key(launcher)])
    except (KeyError, ValidationError):  # never used, or written by another version
        return None


def remember(store: Path, launcher: Any, cells: Sequence[SweepCell]) -> None:
    """Record the machine of a cell that ran."""
    machines = [cell.machine for cell in cells if cell.machine]
    if machines and store.is_dir():
        write_json(store / FILE, {**_known(store), _key(launcher): machines[-1]})


def _known(store: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads((store / FILE).read_text())
    except (OSError, ValueError):  # only a cache: losing it costs some jobs that find everything finished
        return {}
    return known


def _key(launcher: Any) -> str:
    from omegaconf import OmegaConf

    return fingerprint(OmegaConf.to_container(launcher, resolve=False))[:16]
