"""Texts as windows of token ids, and whether two tokenizers give the same ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pipelines.checkpoint.tokenizer import RenderedChat
from pipelines.domain.errors import UserError

BETWEEN = "\n\n"
"""Joins the texts of a file."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text cut into sequences of one length that are read independently of each other.

    Attributes:
        name: of the text.
        rows: token ids of each window; all but the first of a window are predicted.
        unseen: whether calibration observed none of it.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    unseen: bool

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return sum(len(row) - 1 for row in self.rows)


def cut(
    name: str, texts: Callable[[], Iterable[str]], tokenizer: Any, *, length: int, tokens: int, observed: int
) -> Windows:
    """Cut the first tokens of a text into windows.

    Each window begins with the tokenizer's BOS token, if it has one, as a prompt would; the texts follow each other
    without special tokens between them, but for those that a chat template writes.

    Args:
        name: of the text.
        texts: returns the texts of the file, from its beginning.
        tokenizer: of the model.
        length: tokens of a window.
        tokens: number of predicted tokens, rounded up to whole windows.
        observed: how many of the texts calibration may have observed; they are left out if the others are enough.

    Raises:
        UserError: the text has fewer than two tokens.
    """
    bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    new, count = length - len(bos), -(-tokens // (length - 1))
    later = _ids(itertools.islice(texts(), observed, None), tokenizer, count * new) if observed else []
    unseen = not observed or len(later) == count * new
    ids = later if observed and unseen else _ids(texts(), tokenizer, count * new)
    rows = tuple((*bos, *ids[at : at + new]) for at in range(0, len(ids) - new + 1, new)) or ((*bos, *ids),)
    if len(rows[0]) < 2:
        raise UserError(
            f"The text '{name}' has {len(ids)} tokens, so that nothing is predicted.", todo="Give a longer text."
        )
    return Windows(name, rows, unseen)


def _ids(texts: Iterable[str], tokenizer: Any, most: int) -> list[int]:
    """Return the ids of the first texts that have `most` tokens together, or of all of them."""
    found: list[int] = []
    for text in texts:
        between = BETWEEN if found and not isinstance(text, RenderedChat) else ""
        found += tokenizer.encode(between + text, add_special_tokens=False, verbose=False)
        if len(found) >= most:
            break
    return found[:most]


def refuse_other_tokens(ours: Any, theirs: Any, *, model: str, reference: str) -> None:
    """Refuse to compare two models whose token ids mean different texts.

    Args:
        ours: tokenizer of the compressed model.
        theirs: tokenizer of the reference.
        model: name of the compressed model, for the message.
        reference: name of the reference, for the message.

    Raises:
        UserError: the tokenizers differ; the message names the first id that they read differently.
    """
    if ours is theirs:
        return
    mine, other = ({number: token for token, number in each.get_vocab().items()} for each in (ours, theirs))
    wrong = next(
        (number for number in sorted(mine.keys() | other.keys()) if mine.get(number) != other.get(number)), None
    )
    if wrong is None:
        return
    said = [f"{each[wrong]!r}" if wrong in each else "no token" for each in (mine, other)]
    raise UserError(
        f"{model} and {reference} have different tokenizers: token {wrong} is {said[0]} in {model} and {said[1]} in "
        f"{reference}, so their probabilities are not of the same tokens.",
        todo="Compare with the model it was made from, with its own tokenizer.",
    )
