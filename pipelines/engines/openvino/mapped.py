"""Pages of an engine's weights file that stay resident although the plugin has its own copies of the weights.

The plugin maps the file and packs each weight when it is first multiplied. The pages that it read for that stay in the
process, as much again as the model, until the kernel needs memory; later only the embedding's rows are read from the
file. The mapping cannot be written to, so its pages are those of the file, and a dropped one is read again on use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from pipelines.host.repeating import repeated

INTERVAL_S = 0.02
"""Time between two drops while weights are packed, at about 1 GB/s: what is resident in between is 20 MB."""
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def weights_dropped(file: Path) -> AbstractContextManager[None]:
    """Keep the pages of a mapped file out of memory while weights are packed, and drop them at the end."""
    return repeated(partial(drop_pages, file), INTERVAL_S, "weights dropped")


def drop_pages(file: Path) -> int:
    """Drop the resident pages of a file's read-only mappings, and return their bytes; locked pages stay."""
    return sum(
        stop - start
        for start, stop in _mappings(file.resolve())
        if _libc.madvise(start, stop - start, mmap.MADV_DONTNEED) == 0
    )


def _mappings(file: Path) -> Iterator[tuple[int, int]]:
    """Yield the addresses of the mappings of a file that cannot have changed pages."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, permissions, _, _, _, *path = line.split(maxsplit=5)
        if path == [str(file)] and "w" not in permissions:
            start, _, stop = place.partition("-")
            yield int(start, 16), int(stop, 16)
