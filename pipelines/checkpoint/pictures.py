"""Pictures before a language model: decoded, prepared as CLIP takes them, and their places in a prompt.

A repository's `preprocessing` has a copy beside it, so this file imports nothing of the project.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a picture becomes tiles, and their features its visual tokens.

    LLaVA 1.5 has one tile, the middle of the picture. LLaVA 1.6 has the whole picture as its first tile, and then the
    picture on the best of some grids, with black borders. Visual tokens are the features of the first tile and, row by
    row of the grid without its borders, those of the others, each row ended by the model's `image_newline`. Source:
    Transformers 5.14 `select_best_resolution`, `unpad_image`, `LlavaNextModel.pack_image_features`.

    Attributes:
        side: height and width of a tile, pixels.
        features: of a tile; a square number where there are grids.
        grids: (height, width), pixels, multiples of `side`; none in LLaVA 1.5.
    """

    side: int
    features: int
    grids: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Tiling:
        """Read it from the config.json of an encoder's engine."""
        grids = tuple((height, width) for height, width in described.get("image_grid_pinpoints", ()))
        return cls(described["image_size"], described.get("tile_features", described["visual_tokens"]), grids)

    @property
    def most_tiles(self) -> int:
        """Tiles of one picture, at most."""
        return max((self.tiles(*grid) for grid in self.grids), default=1)

    @property
    def most_tokens(self) -> int:
        """Visual tokens of one picture, at most: it fills its grid."""
        each = (math.prod(self._places(*grid)) + self._places(*grid)[0] for grid in self.grids)  # a newline per row
        return self.features + max(each, default=0)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid that shows most of a picture's pixels; of several, the smallest; of these, the first."""

        def key(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[1] / width, grid[0] / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            return seen, -grid[0] * grid[1]

        return max(self.grids, key=key)

    def tiles(self, height: int, width: int) -> int:
        """Return the number of tiles of a picture of this size in pixels."""
        return 1 + math.prod(self.grid(height, width)) // self.side**2 if self.grids else 1

    def _places(self, height: int, width: int) -> tuple[int, int]:
        """Return how many features a grid has below and beside each other."""
        side = math.isqrt(self.features)
        return side * (height // self.side), side * (width // self.side)

    def rows(self, height: int, width: int, newline: int = -1) -> Array:
        """Return a picture's visual tokens as places among the features of its tiles, i64.

        Args:
            height: of the picture, pixels.
            width: likewise.
            newline: place of `image_newline`.
        """
        first = np.arange(self.features)
        if not self.grids:
            return first
        side, (high, wide) = math.isqrt(self.features), self._places(*self.grid(height, width))
        tiled = np.arange(high * wide).reshape(high // side, wide // side, side, side)
        places = self.features + tiled.swapaxes(1, 2).reshape(high, wide)
        top = left = 0
        if width / height > wide / high:
            top = (high - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (high / height), 7))) // 2
        kept = places[top : high - top, left : wide - left]
        return np.concatenate([first, np.pad(kept, ((0, 0), (0, 1)), constant_values=newline).ravel()])


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
        self._tiling, self.token = Tiling.of(raw), raw["image_token_id"]
        self._mean, self._std = (np.array(raw[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        model = json.loads((engine / "config.json").read_text(encoding="utf-8"))
        self._vocab_size, self._most = int(model["pretrained_config"]["vocab_size"]), most

    def prepare(self, images: Array | Sequence[Array]) -> Array:
        """Return the tiles of all pictures [tiles, 3, side, side], float16, of pictures uint8 [height, width, 3].

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
        tiles = [tiles_of(image, self._tiling, self._mean, self._std) for image in images]
        return np.concatenate(tiles).astype(np.float16)

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

    def check_places(self, ids: Sequence[int], pictures: int) -> None:
        """Refuse a prompt that has more or fewer places than pictures.

        Raises:
            BadPictureError: it has.
        """
        marks = sum(token == self.token for token in ids)
        if marks != pictures:
            raise BadPictureError(
                f"Pictures sent: {pictures}; places for them (<image>) in the prompt: {marks}. Each picture needs one."
            )

    def places(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Return a prompt with the rows of the pictures' features where it has their tokens.

        Args:
            ids: of the prompt.
            sizes: height and width of each picture.

        Raises:
            BadPictureError: the prompt has more or fewer places than pictures.
        """
        self.check_places(ids, len(sizes))
        features = self._tiling.features
        each, last = iter(sizes), features * sum(self._tiling.tiles(*size) for size in sizes)  # `image_newline`
        placed, start = list[int](), 0
        for token in ids:
            if token == self.token:
                size = next(each)
                placed += (self._vocab_size + start + self._tiling.rows(*size, last - start)).tolist()
                start += features * self._tiling.tiles(*size)
            else:
                placed.append(token)
        return placed


def tiles_of(image: Array, tiling: Tiling, mean: Array, std: Array) -> Array:
    """Return float32 [tiles, 3, side, side] of a picture uint8 [height, width, 3], as Transformers' processors do.

    Without grids, CLIPImageProcessor: the shorter side is resized, and the middle cut. With grids,
    LlavaNextImageProcessor; see `Tiling`. Resizing is bicubic; each colour is normalized.
    """
    side, (height, width) = tiling.side, image.shape[:2]
    if not tiling.grids:
        short = min(height, width)
        whole = _resized(image, side * height // short, side * width // short)
        top, left = (whole.shape[0] - side) // 2, (whole.shape[1] - side) // 2
        cut = whole[None, top : top + side, left : left + side]
    else:
        high, wide = tiling.grid(height, width)
        tall, broad = high, min(math.ceil(width * (high / height)), wide)
        if wide / width < high / height:
            tall, broad = min(math.ceil(height * (wide / width)), high), wide
        canvas = np.zeros((high, wide, COLOURS), np.uint8)
        top, left = (high - tall) // 2, (wide - broad) // 2
        canvas[top : top + tall, left : left + broad] = _resized(image, tall, broad)
        cut = canvas.reshape(high // side, side, wide // side, side, COLOURS).swapaxes(1, 2)
        cut = np.concatenate([_resized(image, side, side)[None], cut.reshape(-1, side, side, COLOURS)])
    normalized: Array = ((cut.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)
    return normalized


def _resized(image: Array, height: int, width: int) -> Array:
    from PIL import Image  # only where there are pictures

    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


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
            turned = ImageOps.exif_transpose(image)
            if turned.mode.startswith("I"):  # 16 bits of grey, which Pillow cuts at 255 instead of dividing them
                turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
            return np.asarray(turned.convert("RGB"))
    except UnidentifiedImageError:
        raise BadPictureError(f"is none: its {len(content):,} bytes are no {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError:  # by the sizes in the file, before it can be asked for them
        raise BadPictureError(f"has more than {MOST_PIXELS:,} pixels, the most that are taken.") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise BadPictureError(f"is damaged: {error}.") from None


def _check_size(height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise BadPictureError(f"has {width} x {height} pixels; at most {MOST_PIXELS:,} are taken.")
    if max(height, width) > MOST_RATIO * min(height, width):
        raise BadPictureError(
            f"has {width} x {height} pixels; its longer side may be {MOST_RATIO} times the shorter one."
        )
