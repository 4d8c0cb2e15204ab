"""Writes generated files into a folder of their own, all or none, and never over what a person changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pipelines.domain.errors import UserError

INDEX = ".generated.json"
"""SHA-256 of every file as it was written; tells a file that was changed since."""


def write_folder(folder: Path, files: Mapping[str, str], *, command: str, setting: str) -> bool:
    """Make the folder hold exactly these files.

    Args:
        folder: made when missing.
        files: text by relative name.
        command: what writes them, for messages.
        setting: what names another folder, for messages.

    Returns:
        whether anything changed.

    Raises:
        UserError: there are files in it that were not generated, or were changed by hand; or it cannot be written.
    """
    digests = {name: _digest(text.encode()) for name, text in files.items()}
    present = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    index = present.pop(INDEX, None)
    found = {name: _digest(path.read_bytes()) for name, path in present.items()}
    if found == digests and index is not None:
        return False
    known = json.loads(index.read_text(encoding="utf-8")) if index else {}
    if foreign := sorted(name for name, digest in found.items() if known.get(name) != digest):
        raise UserError(
            f"'{folder}' holds what was not written by `{command}`, or was changed since: {', '.join(foreign)}.",
            todo="Keep changes in another folder; to write it anew, remove these files, or give another folder: "
            f"{setting}=/some/folder",
        )
    try:
        _replace(folder, {**files, INDEX: json.dumps(digests, indent=1) + "\n"})
    except OSError as error:
        raise UserError(
            f"{setting}='{folder.parent}' cannot be written: {error.strerror}.",
            todo=f"Give another folder: {setting}=/some/folder",
        ) from None
    return True


def _replace(folder: Path, files: Mapping[str, str]) -> None:
    """Write aside, then swap; a reader sees the old folder or the new one."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        for name, text in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_text(text, encoding="utf-8")
        if folder.is_dir():
            folder.rename(old)
        aside.rename(folder)
    except OSError:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
