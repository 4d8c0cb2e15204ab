"""The served model's tokenizer: prompts to tokens without long waits, and tokens to text as they arrive."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tokenizer import RenderedChat, opened, partial_characters

PIECE = 16_384  # characters that are tokenized at a time
SHRINKING = 4  # normalizers may drop or join characters before a text is tokenized
MARGIN = 8  # tokens that a tokenizer may add to a piece: its special ones, and those that the cut takes apart
ANCHOR = "a"
UNFINISHED = "\ufffd"
"""What a decoder writes for the bytes of an incomplete character."""
LONGEST_CHARACTER = 8  # tokens; a byte each is four


class ServedTokenizer:
    """Tokenizes and detokenizes in this process, like the repository's preprocessing and postprocessing models."""

    def __init__(self, folder: Path, *, adds_special: bool) -> None:
        """Open the tokenizer of a folder.

        Raises:
            UserError: it is none that can be opened.
        """
        loaded = opened(folder)
        self._tokenizer: Any = loaded.tokenizer
        self._adds_special = adds_special
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, vocabulary), default=1)
        self.size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._anchor = self._tokenizer.encode(ANCHOR, add_special_tokens=False).ids
        self._anchor_length = {skip: len(self.text(self._anchor, skip_special=skip)) for skip in (False, True)}
        self.end_ids, self.end_id = loaded.end_ids, loaded.end_id
        self.pad_id = loaded.id_of("pad_token")

    def ids(self, text: str, *, special: bool | None = None) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            text: of the prompt.
            special: whether to add special tokens such as BOS; None is as the repository was made, and for a rendered
                chat no.
        """
        usual = self._adds_special and not isinstance(text, RenderedChat)
        add = usual if special is None else special
        return list(self._tokenizer.encode(text, add_special_tokens=add).ids)

    def text(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of a whole sequence."""
        return str(self._tokenizer.decode(self._known(tokens), skip_special_tokens=skip_special))

    def continuation(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens that follow others.

        Decoders like SentencePiece's drop the space in front of the first token, so they are decoded after another one.
        """
        tokens = self._known(tokens)
        if not tokens:
            return ""
        if tokens[0] in self._special:
            return self.text(tokens, skip_special=skip_special)
        return self.text([*self._anchor, *tokens], skip_special=skip_special)[self._anchor_length[skip_special] :]

    @cached_property
    def _partial(self) -> dict[int, bytes]:
        return partial_characters(self._tokenizer)  # reads the whole vocabulary, which few requests need

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._partial.get(token) or self.continuation([token]).encode()

    def token(self, text: str) -> int | None:
        """Return the token that has this name in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text surely has more tokens than the limit.

        The time this takes depends on the limit, not on the text: a token is no longer than the longest of the
        vocabulary, and pieces are tokenized only until they have reached the limit. Near the limit the answer is no.
        """
        if len(text) <= limit // 4 or len(text.encode()) <= limit:  # no character has more than four bytes
            return False
        if len(text) > (limit + MARGIN) * self._longest * SHRINKING:
            return True
        count = 0
        for start in range(0, len(text), PIECE):
            count += len(self._tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)) - MARGIN
            if count > limit:
                return True
        return False

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return those that have a text; engines pad the vocabulary."""
        return [token for token in tokens if 0 <= token < self.size]


class TextStream:
    """Turns the tokens of one answer into text as they arrive; an incomplete character waits for its rest."""

    def __init__(self, tokenizer: ServedTokenizer, *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Add a token and return the text that is complete."""
        self._held.append(token)
        text = self._tokenizer.continuation(self._held, skip_special=self._skip)
        if text.endswith(UNFINISHED) and len(self._held) < LONGEST_CHARACTER:
            return ""
        self._held = []
        return text

    def rest(self) -> str:
        """Return the text of what was held back, once no more tokens arrive."""
        held, self._held = self._held, []
        return self._tokenizer.continuation(held, skip_special=self._skip)
