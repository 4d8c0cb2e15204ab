"""Pictures in prompts that are scored: ids that stand for their features.

A picture's place in a prompt is one token, `<image>`. In its stead come as many ids as the encoder has features, far
above any vocabulary and made of the content of the picture, so that prompts are equal only if their pictures are.
An engine with an encoder turns the ids into rows of its prompt table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipelines.domain.errors import UserError
from pipelines.host.files import parse_json, small_text

MARK = 1 << 60
"""The least id of a picture; 48 bits of its digest and 12 of the row follow."""
ROW_BITS = 12


class ScoredPictures:
    """The pictures of a task, by the ids that stand for them."""

    def __init__(self, encoder: Path) -> None:
        """Read how a picture becomes features, and which token stands for it."""
        from pipelines.checkpoint.pictures import Tiling, decode  # loads numpy, which planning does without

        self._decode = decode
        self.encoder = encoder
        config = parse_json(small_text(encoder / "config.json"))
        self._tiling, self._token = Tiling.of(config), int(config["image_token_id"])
        self.tokens = self._tiling.most_tokens
        self._images: dict[int, bytes] = {}

    def placed(self, ids: Iterable[int], image: bytes) -> list[int]:
        """Return a prompt with the ids of a picture instead of its token.

        Raises:
            UserError: the prompt does not have one place for a picture.
        """
        ids = list(ids)
        if ids.count(self._token) != 1:
            raise UserError(
                f"A prompt about a picture has {ids.count(self._token)} places for it.",
                allowed=f"It needs one: the model's token {self._token}, <image>.",
            )
        key = int.from_bytes(hashlib.sha256(image).digest()[:6], "big")
        self._images[key] = image
        at, (height, width, _) = ids.index(self._token), self._decode(image).shape
        rows = self._tiling.rows(height, width, self._tiling.tiles(height, width) * self._tiling.features)
        return [*ids[:at], *((MARK | key << ROW_BITS) + rows).tolist(), *ids[at + 1 :]]

    def image(self, key: int) -> bytes:
        """Return the file of a picture by the bits of its digest."""
        return self._images[key]


@runtime_checkable
class SeeingSession(Protocol):
    """A loaded engine that can take a vision encoder beside it."""

    def see(self, pictures: ScoredPictures) -> None:
        """Score prompts with the ids of these pictures."""
        ...
