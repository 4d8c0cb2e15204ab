"""Pictures before a language model: decoded, prepared as CLIP takes them, and their places in a prompt.

A repository's `preprocessing` has a copy beside it, so this file imports nothing of the project.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MOST_PIXELS = 2**24
"""Of one picture."""
MOST_RATIO = 100
"""Longer side by shorter side: the shorter one is resized to the encoder's, and the longer one with it."""
COLOURS = 3
FORMATS = ("PNG", "JPEG", "WEBP")
"""As Pillow names them."""


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
        self._size, self._tokens, self.token = raw["image_size"], raw["visual_tokens"], raw["image_token_id"]
        self._mean, self._std = (np.array(raw[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        model = json.loads((engine / "config.json").read_text(encoding="utf-8"))
        self._vocab_size, self._most = int(model["pretrained_config"]["vocab_size"]), most

    def prepare(self, images: Array | Sequence[Array]) -> Array:
        """Return [pictures, 3, side, side], float16, of pictures uint8 [height, width, 3].

        Raises:
            BadPictureError: one is no picture or too large, or there are too many.
        """
        if isinstance(images, np.ndarray) and (
            images.ndim != COLOURS + 1 or images.shape[-1] != COLOURS or not all(images.shape)
        ):
            raise BadPictureError(
                f"IMAGE_BYTES (image_bytes_input) has the shape {list(images.shape)}; it must be"
                " [pictures, height, width, 3]."
            )
        self.check_count(len(images))
        for image in images:
            _check_size(*image.shape[:2])
        return np.stack([resized(image, self._size, self._mean, self._std) for image in images]).astype(np.float16)

    def check_count(self, pictures: int) -> None:
        """Refuse more pictures than a request may have.

        Raises:
            BadPictureError: there are too many.
        """
        if pictures > self._most:
            raise BadPictureError(
                f"Pictures sent: {pictures}; this repository takes {self._most} in one request"
                " (multimodal.images_per_request, max_num_images)."
            )

    def places(self, ids: Sequence[int], pictures: int) -> list[int]:
        """Return a prompt with the rows of the pictures' features where it has their tokens."""
        marks = sum(token == self.token for token in ids)
        if marks != pictures:
            raise BadPictureError(
                f"Pictures sent: {pictures}; places for them (<image>) in the prompt: {marks}. Each picture needs one."
            )
        placed, row = list[int](), self._vocab_size
        for token in ids:
            if token == self.token:
                placed += range(row, row + self._tokens)
                row += self._tokens
            else:
                placed.append(token)
        return placed


def resized(image: Array, side: int, mean: Array, std: Array) -> Array:
    """Return float32 [3, side, side] of a picture uint8 [height, width, 3], as CLIPImageProcessor of Transformers does.

    The shorter side is resized bicubically, the middle cut, and each colour normalized.
    """
    from PIL import Image  # only where there are pictures

    height, width = image.shape[:2]
    short = min(height, width)
    size = side * width // short, side * height // short
    whole = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    top, left = (whole.shape[0] - side) // 2, (whole.shape[1] - side) // 2
    cut = whole[top : top + side, left : left + side].astype(np.float32)
    normalized: Array = ((cut / 255 - mean) / std).transpose(2, 0, 1)
    return normalized


def decode(content: bytes) -> Array:
    """Return the uint8 [height, width, 3] of a file, turned as its camera says; size and format are read first.

    Raises:
        BadPictureError: what is wrong with it, as what follows the picture's name.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # only where there are pictures

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(image.height, image.width)
            if getattr(image, "is_animated", False) and image.format in ("PNG", "WEBP"):
                raise BadPictureError("is animated; send one frame of it.")
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except UnidentifiedImageError:
        raise BadPictureError(f"is none: its {len(content):,} bytes are no {', '.join(FORMATS)}.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPictureError(f"is damaged: {error}.") from None


def _check_size(height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise BadPictureError(f"has {height} x {width} pixels; at most {MOST_PIXELS:,} are taken.")
    if max(height, width) > MOST_RATIO * min(height, width):
        raise BadPictureError(
            f"has {height} x {width} pixels; its longer side may be {MOST_RATIO} times the shorter one."
        )
