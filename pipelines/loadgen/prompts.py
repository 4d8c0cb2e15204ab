"""Make prompts with an exact number of tokens, from tokens of the model's own tokenizer.

The server receives text and tokenizes it again, so token ids cannot simply be drawn: neighbours may merge. So words
that are single tokens in any context are found first, and texts made of them keep their count. Every text is tokenized
again before use, and repaired if tokens merged after all.
"""

import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError

if TYPE_CHECKING:
    import numpy as np

_WORD = re.compile(r" [A-Za-z]{2,}")
_ENOUGH = 16
_TRIES = 64
IMAGE = "<image>"
"""A picture's place in a prompt of Triton's models."""


class PromptMaker:
    """Makes texts of exact length for one tokenizer."""

    def __init__(
        self,
        tokenizer_dir: Path,
        *,
        add_special_tokens: bool = True,
        added_tokens: int = 0,
        turn_tokens: int | None = None,
        images: int = 0,
    ) -> None:
        """Read the tokenizer and find its words.

        Args:
            tokenizer_dir: folder with tokenizer.json.
            add_special_tokens: whether the server's preprocessing adds them (BOS); they count as input tokens.
            added_tokens: input tokens that the server adds besides, e.g. those of a chat template.
            turn_tokens: those that it adds for an answer and the next message; None if a conversation is one text.
            images: places of pictures before each text, which are no part of it.

        Raises:
            UserError: there is no tokenizer.json, or it cannot be read.
        """
        self._tokenizer, self.folder = opened(tokenizer_dir).tokenizer, tokenizer_dir
        self._special, self._added, self.turn_tokens = add_special_tokens, added_tokens, turn_tokens
        self._before = IMAGE * images
        self.overhead = self.count("")
        """Tokens of the empty text, that is, those of pictures and those that the server adds."""
        self._words = self._find_words()
        self._first = self._find_first()

    @property
    def words(self) -> dict[str, int]:
        """Words that are one token after a space, and their places."""
        return {word.lstrip(): place for place, word in enumerate(self._words)}

    def count(self, text: str) -> int:
        """Count the input tokens of a text as the server does."""
        return len(self._tokenizer.encode(self._before + text, add_special_tokens=self._special).ids) + self._added

    def make(self, lengths: Sequence[int], rng: Random, *, prefix_share: float = 0.0) -> list[str]:
        """Make one random text per length.

        Args:
            lengths: input tokens of each, including special tokens.
            rng: random number generator.
            prefix_share: this share of the tokens of each text is the beginning of one common text.

        Raises:
            UserError: a length leaves no room for a word, or the tokenizer has no text of that length.
        """
        if not lengths:
            return []
        if min(lengths) <= self.overhead:
            raise UserError(
                f"workload.isl={min(lengths)} leaves no room for text: special tokens and pictures take"
                f" {self.overhead}.",
                todo=f"Use at least {self.overhead + 1}.",
            )
        common = self._draw(max(lengths), rng) if prefix_share else []
        texts = []
        for length in lengths:
            words = self._draw(length - self.overhead, rng)
            same = min(round(prefix_share * length), len(words))
            texts.append("".join(common[:same] + words[same:]))
        return self._checked(texts, lengths, rng)

    def extend(self, text: str, length: int, rng: Random) -> str:
        """Extend `text` to exactly `length` tokens."""
        missing = length - self.count(text)
        return self._repaired(text, text + "".join(rng.choices(self._words, k=max(missing, 0))), length, rng)

    def _draw(self, count: int, rng: Random) -> list[str]:
        return [rng.choice(self._first), *rng.choices(self._words, k=count - 1)]

    def _checked(self, texts: list[str], lengths: Sequence[int], rng: Random) -> list[str]:
        whole = [self._before + text for text in texts]
        encodings = self._tokenizer.encode_batch(whole, add_special_tokens=self._special)
        return [
            text if len(item.ids) + self._added == length else self._repaired("", text, length, rng)
            for text, item, length in zip(texts, encodings, lengths, strict=True)
        ]

    def _repaired(self, keep: str, text: str, length: int, rng: Random) -> str:
        """Change words after `keep` until the count is right."""
        pool = self._words or self._first
        for attempt in range(_TRIES):
            count = self.count(text)
            if count == length:
                return text
            if count < length:
                text += "".join(rng.choices(pool, k=length - count))
            else:  # sometimes cut more than needed, because the cut itself may change the count
                body = text[len(keep) :]
                words = re.findall(r"\s?\S+", body)
                text = keep + "".join(words[: max(len(words) - (count - length) - attempt % 3, 0)])
        raise UserError(
            f"The tokenizer in {self.folder} gave no text of exactly {length} tokens in {_TRIES} attempts.",
            todo="Choose another workload.isl.",
        )

    def _find_words(self) -> list[str]:
        """Find words with a leading space that are one token in any context."""
        tokenizer, anchor = self._tokenizer, "the"
        before = tokenizer.decode(tokenizer.encode(anchor, add_special_tokens=False).ids)
        ids = range(tokenizer.get_vocab_size())
        start = tokenizer.encode(anchor, add_special_tokens=False).ids
        pieces = tokenizer.decode_batch([[*start, token] for token in ids])
        candidates = [(token, text[len(before) :]) for token, text in zip(ids, pieces, strict=True)]
        candidates = [(token, piece) for token, piece in candidates if _WORD.fullmatch(piece)]
        again = tokenizer.encode_batch([anchor + piece * 2 for _, piece in candidates], add_special_tokens=False)
        words = [
            piece for (token, piece), got in zip(candidates, again, strict=True) if got.ids == [*start, token, token]
        ]
        if len(words) < _ENOUGH:
            raise UserError(
                f"The tokenizer in {self.folder} has {len(words)} tokens that are words; prompts need {_ENOUGH}.",
                todo="Use workload=trace with prompts of your own.",
            )
        return words

    def _find_first(self) -> list[str]:
        """Find forms that are one token at the very beginning: without the space if possible, else with it."""
        follow = self._words[0]
        for forms in ([word.lstrip() for word in self._words], self._words):
            texts = [self._before + form + follow for form in forms]
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            places = len(self._tokenizer.encode(self._before, add_special_tokens=False).ids)
            fine = [form for form, got in zip(forms, encodings, strict=True) if len(got.ids) == places + 2]
            if len(fine) >= _ENOUGH:
                return fine
        return self._words


# Pictures of requests, made from seeds.

_CELLS = 24
"""Squares of a picture in a row and in a column, so that every patch of an encoder differs between pictures."""


def picture(seed: int, side: int) -> "np.ndarray[Any, Any]":
    """Return a picture of coloured squares, uint8 [side, side, 3]; another seed gives other colours everywhere."""
    import numpy as np  # planning does without it

    cells = np.random.default_rng(seed).integers(0, 256, (_CELLS, _CELLS, 3), dtype=np.uint8)
    places = np.arange(side) * _CELLS // side
    return np.ascontiguousarray(cells[places][:, places])


def png(pixels: "np.ndarray[Any, Any]") -> bytes:
    """Return the PNG file of a picture, uint8 [height, width, 3]."""
    import numpy as np

    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each begins with its filter, 0 for none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
