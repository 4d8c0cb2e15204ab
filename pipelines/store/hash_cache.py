"""Hashes of files, kept between runs, so that a file is not read by every run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from pipelines.domain.progress import Advance
from pipelines.host.files import write_json
from pipelines.host.hashing import THREADS, one_at_a_time, sha256_file, sha256_on_disk
from pipelines.host.screen import ScreenProgress
from pipelines.store.manifest import seal_is_right, sealed

HASHES = ".hashes.json"
"""File of the store."""
TRUSTED_S = 30 * 24 * 3600
TICK_NS = 20_000_000
"""Times of files advance in steps of the kernel's clock, which are 10 ms at most."""
MUCH_BYTES = 1 << 30
"""Reading this much takes long enough to be shown, and to be shared by threads."""
_Hash = Callable[[Path], str]


class HashCache:
    """Cache of the SHA-256 of files, valid for a month while a file's size, modification and change time stay the same.

    No program can set the change time back, so bytes written in place are noticed even if the modification time was
    restored. Silent disk corruption changes no time: hence the month, and `from_disk`. Files are known by
    device and inode, so that hard links, and a store that is mounted elsewhere, share an entry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes = _load(path)
        self._dirty = False

    def sha256(self, path: Path) -> str:
        """Return the SHA-256 of a file, 64 hex digits; reads the file only if its stat is new."""
        return self._remembered(path) or self._read(path, sha256_file)

    def from_disk(self, path: Path, advance: Advance | None = None) -> str:
        """Return the SHA-256 of the file on disk, 64 hex digits.

        Args:
            path: the file.
            advance: called with the number of bytes just read.
        """
        return self._read(path, lambda path: sha256_on_disk(path, advance))

    def prime(self, paths: Iterable[Path]) -> None:
        """Read those of many files whose hash is not known, several at a time, and show it if it takes long."""
        unknown = [path for path in paths if path.is_file() and self._remembered(path) is None]
        total = sum(path.stat().st_size for path in unknown)
        if total < MUCH_BYTES:
            return  # they are read when they are asked for
        stop = Event()
        with ScreenProgress().task("checking files", total, "bytes") as show, ThreadPoolExecutor(THREADS) as pool:

            def advance(amount: float) -> None:
                if stop.is_set():
                    raise InterruptedError
                locked(amount)

            def read(path: Path) -> None:
                try:
                    self._read(path, lambda path: sha256_file(path, advance))
                except OSError:
                    return  # hashing it later reports that it is unreadable

            locked = one_at_a_time(show)
            try:
                list(pool.map(read, unknown))
            except BaseException:
                stop.set()
                raise

    def save(self) -> None:
        """Write new hashes to disk; a store that does not exist, or that is full or read-only, is not an error here."""
        if self._dirty and self._path.parent.is_dir():
            hashes = {**_load(self._path), **self._hashes}  # another run may have saved hashes in between
            with suppress(OSError):
                write_json(self._path, sealed({"files": hashes}))
                self._dirty = False

    def _remembered(self, path: Path) -> str | None:
        """Return the known hash of a file that has not changed since it was read."""
        name, stamp = _identity(path)
        size, mtime, ctime, read_at, sha256 = self._hashes.get(name, [None] * 5)
        if [size, mtime, ctime] != stamp or not _is_recent(read_at):
            return None
        return str(sha256)

    def _read(self, path: Path, sha256: _Hash) -> str:
        name, stamp = _identity(path)
        age = time.time_ns() - stamp[2]
        if 0 <= age < TICK_NS:  # a later change could get the same time
            time.sleep((TICK_NS - age) / 1e9)
        digest = sha256(path)
        if _identity(path) == (name, stamp):
            self._hashes[name] = [*stamp, int(time.time()), digest]
            self._dirty = True
        return digest


def _identity(path: Path) -> tuple[str, list[int]]:
    """Return the identity of a file, and the fields that every change of it changes."""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}", [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _is_recent(read_at: int) -> bool:
    return 0 <= time.time() - read_at < TRUSTED_S


def _load(path: Path) -> dict[str, list[Any]]:
    """Read the hashes that are still valid; none if the file is unreadable, which only costs time."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not seal_is_right(saved):
        return {}
    return {name: entry for name, entry in saved["files"].items() if _is_recent(entry[3])}
