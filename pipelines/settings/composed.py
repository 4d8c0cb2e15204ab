"""Remembers composed configurations: the same overrides over the same files give the same answer.

Hydra takes 0.3 s to import and compose, more than all the rest of a run that finds everything cached. What is kept is
only ever what Hydra said; a changed, added or removed file under conf/ makes it ask again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.host.files import write_text
from pipelines.settings.compose import CONF, compose_config, to_raw
from pipelines.settings.paths import PROJECT_ROOT

FOLDER = PROJECT_ROOT / ".composed"


def raw_config(overrides: Sequence[str]) -> dict[str, Any]:
    """Plain resolved configuration for a user's overrides, from memory where possible.

    Raises:
        UserError: as `compose_config` and `to_raw`.
    """
    try:
        remembered: dict[str, Any] = json.loads(_place(overrides).read_text())
    except (OSError, ValueError):  # never asked, or half a file: Hydra knows
        return to_raw(compose_config(overrides))
    return remembered


def remember(overrides: Sequence[str], raw: dict[str, Any]) -> None:
    """Keep an answer; not for values that Hydra looks up elsewhere, and not where nothing can be written."""
    if any("${" in text or "hydra" in text for text in overrides):
        return
    place = _place(overrides)
    if place.is_file():
        return
    try:
        write_text(place, json.dumps(raw))
    except OSError:
        return  # a read-only checkout works, only slower


def _place(overrides: Sequence[str]) -> Path:
    stamps = [
        (str(path.relative_to(CONF)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(CONF.rglob("*.yaml"))
    ]
    digest = hashlib.sha256(json.dumps([str(CONF), list(overrides), stamps]).encode()).hexdigest()
    return FOLDER / f"{digest[:32]}.json"
