"""Files that are replaced as a whole: a reader, and a run that is killed, finds the old content or the new one.

Everything that is written outside a draft of the store goes through here. Inside a draft, plain writes are enough: the
store renames the whole folder.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = os.uname().nodename
"""Part of names that must differ between machines that share a file system."""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a free path beside `target`; the file or folder made there takes its place when the block ends well.

    Missing parent folders are made. An exception in the block, such as Ctrl-C or a full disk, leaves `target` as it
    was and nothing beside it.
    A file changes in one step. A folder needs two renames; if the second fails, the old folder is put back.
    """
    fresh = target.with_name(f".{target.name}.{HOST}.{os.getpid()}.{threading.get_native_id()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove(fresh)  # left by a killed process that had the same number
    try:
        yield fresh
        for path in fresh.rglob("*") if fresh.is_dir() else (fresh,):
            if path.is_file():
                sync(path)
        if fresh.is_dir() and target.is_dir():
            _swap_folders(fresh, target)
        else:
            fresh.replace(target)
    finally:
        _remove(fresh)


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace a file by these bytes; returns its path."""
    with replacing(path) as fresh:
        fresh.write_bytes(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Replace a file by this text, in UTF-8 and with the line ends it has; returns its path."""
    return write_bytes(path, text.encode())


def write_json(path: Path, value: object, *, sort_keys: bool = True) -> Path:
    """Replace a file by a value as JSON, indented by one space per level; returns its path."""
    return write_text(path, json.dumps(value, indent=1, sort_keys=sort_keys) + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap_folders(fresh: Path, target: Path) -> None:
    old = fresh.with_name(f"{fresh.name}.old")
    _remove(old)
    target.rename(old)
    try:
        fresh.rename(target)
    finally:
        if not target.exists():
            old.rename(target)
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
