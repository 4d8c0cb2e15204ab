"""SHA-256 of single files, and of a folder against its record. Standard library only, so that planning can use it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

from pipelines.domain.progress import Advance

CHUNK_BYTES = 1 << 20
THREADS = 2  # hashlib releases the interpreter lock; more threads than this only make the disk seek


class FileRecord(TypedDict):
    """Record of one file: `size` in bytes and `sha256`, 64 hex digits."""

    size: int
    sha256: str


def sha256_file(path: Path, advance: Advance | None = None) -> str:
    """Return the SHA-256 of a file's content as 64 hex digits.

    Args:
        path: the file.
        advance: called with the number of bytes just read.
    """
    return _digest(hashlib.sha256(), path, advance)


def sha256_on_disk(path: Path, advance: Advance | None = None) -> str:
    """Return the SHA-256 of the file on disk, 64 hex digits, bypassing the page cache.

    Pages that a running process maps stay in memory, and are read from there.

    Args:
        path: the file.
        advance: called with the number of bytes just read.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return sha256_file(path, advance)


def git_blob_sha1(path: Path) -> str:
    """Return git's blob hash of a file, 40 hex digits; the Hub's name for files outside large file storage."""
    header = f"blob {path.stat().st_size}\0".encode()
    return _digest(hashlib.sha1(header, usedforsecurity=False), path, None)


def one_at_a_time(advance: Advance) -> Advance:
    """Wrap a progress callback, which is not thread-safe, so that several threads can call it."""
    lock = Lock()

    def locked(amount: float) -> None:
        with lock:
            advance(amount)

    return locked


def _digest(algorithm: Any, path: Path, advance: Advance | None) -> str:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            algorithm.update(buffer[:count])
            if advance is not None:
                advance(count)
    return str(algorithm.hexdigest())
