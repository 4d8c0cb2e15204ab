"""A folder's tokenizer for commands: what is wrong with it is an error of the user's input."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tokenizer_folder import TokenizerFaultError, TokenizerFolder, read_text
from pipelines.domain.errors import UserError

BESIDE_WEIGHTS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates/*.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
"""Files of a model's folder beside config.json and the weights."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A tokenizer needs one of these; the other files only describe it."""


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class RenderedChat(str):
    """A chat in the form of a model's template, which writes the special tokens itself: none are added."""

    __slots__ = ()


def opened(folder: Path, key: str = "") -> TokenizerFolder:
    """Open a folder's tokenizer and read everything that stands beside it.

    Raises:
        UserError: it cannot be used; names the file.
    """
    tokenizer = TokenizerFolder(folder)
    with _as_user_error(f"{key} needs it." if key else ""):
        tokenizer.tokenizer, tokenizer.end_ids, tokenizer.special  # noqa: B018 - read now, to fail now
    return tokenizer


def partial_characters(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of the tokens that are no whole characters."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if "ByteLevel" in str(tokenizer.decoder):
        return _byte_level(vocabulary)
    # SentencePiece's byte tokens are spelled like <0xE2>
    values = {token: int(match[1], 16) for word, token in vocabulary.items() if (match := BYTE_TOKEN.fullmatch(word))}
    return {token: bytes([value]) for token, value in values.items() if value >= 0x80}


def _byte_level(vocabulary: Mapping[str, int]) -> dict[int, bytes]:
    """Return the bytes of byte-level BPE tokens, where every character stands for one byte."""
    # GPT-2's alphabet: printable Latin-1 stands for itself, U+0100 onwards for the other bytes, in order
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    partial = {}
    for word, token in vocabulary.items():
        if word.isascii() or any(character not in table for character in word):
            continue
        raw = bytes(table[character] for character in word)
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError:
            partial[token] = raw
    return partial


def chat_templates(folder: Path, template: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates of a folder by name, and its special tokens.

    Args:
        folder: a Hugging Face folder.
        template: a template of the user's own, which takes the place of all of them.

    Raises:
        UserError: a file cannot be used.
    """
    tokenizer = TokenizerFolder(folder)
    with _as_user_error():
        own = None if template is None else read_text(template)
        return (tokenizer.templates if own is None else {"default": own}), tokenizer.special


def check_files(folder: Path) -> None:
    """Read the small files of a folder's tokenizer, without opening it; templates may be missing, tokenizer.json not.

    Raises:
        UserError: a file cannot be used, or there is no tokenizer.json.
    """
    tokenizer = TokenizerFolder(folder)
    with _as_user_error():
        tokenizer.check_files()


Tokens = tuple[object, list[tuple[int, str]]]
"""Vocabulary of a tokenizer.json, in the form of its kind, and every added token with its id."""


def beyond(tokens: Tokens, size: int) -> list[str]:
    """List the tokens whose ids a model of `size` tokens does not have, those of the vocabulary first."""
    vocabulary, added = tokens
    if isinstance(vocabulary, dict):
        own = [str(token) for token, number in vocabulary.items() if isinstance(number, int) and number >= size]
    else:  # Unigram's: tokens with their scores, in the order of their ids
        own = [str(entry[0]) for entry in vocabulary[size:]] if isinstance(vocabulary, list) else []
    return list(dict.fromkeys([*own, *(token for number, token in added if number >= size)]))


def tokens_of(folder: Path) -> Tokens:
    """Return the tokens of a folder's tokenizer and their ids, without opening it.

    Raises:
        UserError: its tokenizer.json cannot be used.
    """
    with _as_user_error():
        return TokenizerFolder(folder).listed()


@contextmanager
def _as_user_error(allowed: str = "") -> Iterator[None]:
    try:
        yield
    except TokenizerFaultError as fault:
        raise UserError(str(fault), allowed=allowed) from None
