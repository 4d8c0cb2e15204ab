"""Hold back tokens of incomplete characters, so that every streamed piece is whole text.

Each streamed piece is decoded on its own, so it must not end in the middle of a UTF-8 character. Most tokens are whole
characters; only the ids of the others are stored, so an ordinary token costs one dict look-up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pipelines.checkpoint.tokenizer import opened, partial_characters

MAX_CHARACTER = 4
"""Length of the longest UTF-8 character, bytes."""


class PartialCharacters:
    """The bytes of all tokens that are not whole characters."""

    def __init__(self, partial: Mapping[int, bytes]) -> None:
        """Take token id -> bytes, for tokens whose bytes are not valid UTF-8."""
        self._partial = dict(partial)

    @classmethod
    def none(cls) -> Self:
        """Return an instance without such tokens, which never holds anything back."""
        return cls({})

    @classmethod
    def load(cls, tokenizer_dir: Path) -> Self:
        """Read the tokenizer of a folder.

        Raises:
            UserError: it cannot be read.
        """
        return cls(partial_characters(opened(tokenizer_dir).tokenizer))

    def __len__(self) -> int:
        return len(self._partial)

    def whole(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens end with a complete character; the rest must wait for more."""
        if not tokens or tokens[-1] not in self._partial:
            return len(tokens)
        start = len(tokens) - 1
        while start > 0 and tokens[start - 1] in self._partial and len(tokens) - start < MAX_CHARACTER:
            start -= 1
        tail = b""
        for index in range(len(tokens) - 1, start - 1, -1):
            tail = self._partial[tokens[index]] + tail
            if any(byte & 0xC0 != 0x80 for byte in tail):  # one of them starts a character
                return index if _cut(tail) else len(tokens)
        return len(tokens)


def _cut(piece: bytes) -> bool:
    """Return whether the last character is incomplete; invalid bytes do not count, as waiting would not help."""
    for back in range(1, min(len(piece), MAX_CHARACTER - 1) + 1):
        byte = piece[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 1
        return length > back
    return False
