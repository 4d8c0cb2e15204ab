"""Pictures before a language model: prepared as CLIP takes them, and their places in a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST_PIXELS = 2**24
"""Of one picture."""
COLOURS = 3


class BadPictureError(Exception):
    """A picture cannot be used; the message names it."""


class Pictures:
    """How the encoder of a repository takes pictures."""

    def __init__(self, encoder: Path, engine: Path, most: int) -> None:
        """Read the config.json of both engines.

        Args:
            encoder: folder of the vision encoder's engine.
            engine: folder of the language model's.
            most: pictures of one request.
        """
        raw = json.loads((encoder / "config.json").read_text(encoding="utf-8"))
        self._size, self._tokens, self._token = raw["image_size"], raw["visual_tokens"], raw["image_token_id"]
        self._mean, self._std = (np.array(raw[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        model = json.loads((engine / "config.json").read_text(encoding="utf-8"))
        self._vocab_size, self._most = int(model["pretrained_config"]["vocab_size"]), most

    def prepare(self, images: Array) -> Array:
        """Return [pictures, 3, side, side], float16, of uint8 [pictures, height, width, 3]."""
        if images.ndim != COLOURS + 1 or images.shape[-1] != COLOURS or not all(images.shape):
            raise BadPictureError(
                f"IMAGE_BYTES (image_bytes_input) has the shape {list(images.shape)}; it must be"
                " [pictures, height, width, 3]."
            )
        if len(images) > self._most:
            raise BadPictureError(
                f"Pictures sent: {len(images)}; this repository takes {self._most} in one request"
                " (multimodal.images_per_request, max_num_images)."
            )
        if images.shape[1] * images.shape[2] > MOST_PIXELS:
            raise BadPictureError(
                f"A picture has {images.shape[1]} x {images.shape[2]} pixels; at most {MOST_PIXELS:,} are taken."
            )
        return np.stack([self._prepared(image) for image in images]).astype(np.float16)

    def places(self, ids: Sequence[int], pictures: int) -> list[int]:
        """Return a prompt with the rows of the pictures' features where it has their tokens."""
        marks = sum(token == self._token for token in ids)
        if marks != pictures:
            raise BadPictureError(
                f"Pictures sent: {pictures}; places for them (<image>) in the prompt: {marks}. Each picture needs one."
            )
        placed, row = list[int](), self._vocab_size
        for token in ids:
            if token == self._token:
                placed += range(row, row + self._tokens)
                row += self._tokens
            else:
                placed.append(token)
        return placed

    def _prepared(self, image: Array) -> Array:
        """Resize the shorter side bicubically, cut the middle, and normalize: CLIPImageProcessor of Transformers."""
        from PIL import Image  # only where there are pictures

        height, width = image.shape[:2]
        short = min(height, width)
        size = self._size * width // short, self._size * height // short
        resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        top, left = (resized.shape[0] - self._size) // 2, (resized.shape[1] - self._size) // 2
        cut = resized[top : top + self._size, left : left + self._size].astype(np.float32)
        return ((cut / 255 - self._mean) / self._std).transpose(2, 0, 1)
