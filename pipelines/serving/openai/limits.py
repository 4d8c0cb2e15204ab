"""Bounds on what one client can make the service do, and the count of a text's tokens without long waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE = 16_384  # characters that are tokenized at a time
SHRINKING = 4  # normalizers may drop or join characters before a text is tokenized
MARGIN = 8  # tokens that a tokenizer may add to a piece: its special ones, and those that the cut takes apart

REFUSAL_PAUSE_S = 0.03
"""A refusal waits so long, so that whoever sends bad requests in a loop leaves most of the time to the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may be.

    Attributes:
        body_bytes: size of its body.
        prompts: answers it may ask for: prompts times n.
        request_timeout_s: time from its arrival to its last token.
    """

    body_bytes: int = 4_000_000
    prompts: int = 128
    request_timeout_s: float = 600


class TokenCounter:
    """Counts a prompt's tokens as the preprocessing model does."""

    def __init__(self, file: Path, *, adds_special: bool) -> None:
        """Load a `tokenizer.json`."""
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))
        self._special = adds_special
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)

    def count(self, text: str) -> int:
        """Count the tokens of a whole prompt."""
        return len(self._tokenizer.encode(text, add_special_tokens=self._special))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=self._special).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text surely has more tokens than the limit.

        The time this takes depends on the limit, not on the text: a token is no longer than the longest of the
        vocabulary, and pieces are tokenized only until they have reached the limit. Near the limit the answer is no.
        """
        if len(text) <= limit // 4 or len(text.encode()) <= limit:  # no character has more than four bytes
            return False
        if len(text) > (limit + MARGIN) * self._longest * SHRINKING:
            return True
        found = 0
        for start in range(0, len(text), PIECE):
            found += len(self._tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)) - MARGIN
            if found > limit:
                return True
        return False
