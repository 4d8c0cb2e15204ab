"""Pictures of requests, made from seeds."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

_CELLS = 24
"""Squares of a picture in a row and in a column, so that every patch of an encoder differs between pictures."""


def picture(seed: int, side: int) -> np.ndarray[Any, Any]:
    """Return a picture of coloured squares, uint8 [side, side, 3]; another seed gives other colours everywhere."""
    cells = np.random.default_rng(seed).integers(0, 256, (_CELLS, _CELLS, 3), dtype=np.uint8)
    places = np.arange(side) * _CELLS // side
    return np.ascontiguousarray(cells[places][:, places])


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return the PNG file of a picture, uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter, 0 for none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
