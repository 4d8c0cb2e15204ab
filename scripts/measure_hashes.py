"""What it costs to hash a large file: `python scripts/measure_hashes.py FOLDER [GIB]`.

Processor seconds for one file, of reading alone and of each hash, in three alternating rounds; the file is removed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, CHUNK_BYTES, GIB = 3, 1 << 20, 1 << 30


class _Nothing:
    """Reads without hashing."""

    def update(self, data: Any) -> None:
        """Take a chunk."""


def main(folder: Path, gib: float) -> None:
    """Write the file, print the table, and remove the file."""
    hashes: dict[str, Callable[[], Any]] = {"read": _Nothing, "sha256": hashlib.sha256, "blake2b": hashlib.blake2b}
    for package, name in (("blake3", "blake3"), ("xxhash", "xxh3_128")):  # xxhash comes with `datasets`
        try:
            hashes[name] = getattr(importlib.import_module(package), name)
        except ImportError:
            sys.stdout.write(f"{package} is not installed\n")
    path = folder / "measure_hashes.bin"
    try:
        with path.open("wb") as file:
            for _ in range(int(gib * GIB) // CHUNK_BYTES):
                file.write(os.urandom(CHUNK_BYTES))
        taken: dict[str, list[float]] = {name: [] for name in hashes}
        for _ in range(ROUNDS):
            for name, make in hashes.items():
                taken[name].append(_seconds(path, make()))
    finally:
        path.unlink(missing_ok=True)
    base = statistics.median(taken["sha256"])
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        sys.stdout.write(f"{name:<10} {middle:6.2f} s of processor time  {middle / base:5.2f} of sha256\n")


def _seconds(path: Path, algorithm: Any) -> float:
    buffer, start = memoryview(bytearray(CHUNK_BYTES)), time.process_time()
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            algorithm.update(buffer[:count])
    return time.process_time() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
