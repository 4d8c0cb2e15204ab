"""Compare the last good night with the first bad one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.nightly.history import History
from pipelines.nightly.record import Record


def changes(history: History, before: Record, after: Record) -> list[str]:
    """List all recorded differences: commit, libraries, machine, settings."""
    found = []
    if before.commit != after.commit:
        found.append(f"commit {before.commit[:12]} -> {after.commit[:12]}")
    found += _differences(before.versions, after.versions)
    found += [f"machine: {text}" for text in _differences(before.machine, after.machine)]
    if before.settings_digest != after.settings_digest:
        old, new = history.settings(before.settings_digest), history.settings(after.settings_digest)
        if old is None or new is None:
            found.append(f"settings {before.settings_digest} -> {after.settings_digest}")
        else:
            found += _differences(old, new)
    return found


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {_shown(before, key)} -> {_shown(after, key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "(not there)"
