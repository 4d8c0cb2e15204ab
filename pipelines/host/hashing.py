"""SHA-256 of single files, and of a folder against its record. Standard library only, so that planning can use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TypedDict

from pipelines.domain.progress import Advance, Progress, SilentProgress

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


def git_blob_sha1(path: Path) -> str:
    """Return git's blob hash of a file, 40 hex digits; the Hub's name for files outside large file storage."""
    header = f"blob {path.stat().st_size}\0".encode()
    return _digest(hashlib.sha1(header, usedforsecurity=False), path, None)


def verify_files(folder: Path, files: Mapping[str, FileRecord], progress: Progress | None = None) -> list[str]:
    """Compare the files of a folder with their record.

    Args:
        folder: where the files should be.
        files: relative name -> expected size and hash. Other files in the folder are ignored.
        progress: shows the bytes checked.

    Returns:
        one sentence per file that differs, in the order of `files`; empty when all match.
    """
    total = sum(record["size"] for record in files.values())
    with (progress or SilentProgress()).task(f"checking {folder.name}", total, "bytes") as show:
        advance = one_at_a_time(show)

        def check(item: tuple[str, FileRecord]) -> str:
            name, record = item
            return _difference(name, folder / name, record, advance)

        with ThreadPoolExecutor(THREADS) as pool:
            return [found for found in pool.map(check, files.items()) if found]


def one_at_a_time(advance: Advance) -> Advance:
    """Wrap a progress callback, which is not thread-safe, so that several threads can call it."""
    lock = Lock()

    def locked(amount: float) -> None:
        with lock:
            advance(amount)

    return locked


def _difference(name: str, path: Path, record: FileRecord, advance: Advance) -> str:
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != record["size"]:
        return f"{name} has {size} bytes, its record says {record['size']}"
    if (found := sha256_file(path, advance)) != record["sha256"]:
        return f"{name} has SHA-256 {found}, its record says {record['sha256']}"
    return ""


def _digest(algorithm: Any, path: Path, advance: Advance | None) -> str:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            algorithm.update(buffer[:count])
            if advance is not None:
                advance(count)
    return str(algorithm.hexdigest())
