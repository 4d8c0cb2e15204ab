"""What should be served, and why an answer may differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from eval.diagnose.items import Item


class AnswerSource(Protocol):
    """The last stage before the servers."""

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the greedy continuation of each prompt, without the token that ends it."""
        ...

    def nearly_equal(self, ids: Sequence[int]) -> bool:
        """Return whether the two likeliest next tokens differ by no more than the noise of the arithmetic."""
        ...


@dataclass
class RightAnswers:
    """What should be served.

    Attributes:
        items: what is asked.
        source: answers it.
        new_tokens: most tokens of an answer.
        tokenizer: the model's own.
        ends: tokens that end an answer, the tokenizer's first.
        before: the stage that the answers are of.
    """

    items: Sequence[Item]
    source: AnswerSource
    new_tokens: int
    tokenizer: Any
    ends: tuple[int, ...]
    before: str

    @cached_property
    def answers(self) -> list[list[int]]:
        """Token ids of the answer to each item."""
        return self.source.answers([item.ids for item in self.items])

    def text(self, item: Item, answer: Sequence[int], *, skip: bool = True) -> str:
        """Return an answer as text, with the space in front of it."""
        whole = self.tokenizer.decode([*item.ids, *answer], skip_special_tokens=skip)
        prompt = self.tokenizer.decode(list(item.ids), skip_special_tokens=skip)
        return str(whole)[len(prompt) :]

    def of_texts(self) -> RightAnswers:
        """Return what is expected of a server that takes no messages."""
        items = [item for item in self.items if item.text]
        return self if len(items) == len(self.items) else replace(self, items=items)

    def within_noise(self, item: Item, right: Sequence[int], given: Sequence[int]) -> bool:
        """Return whether two answers part where two tokens are nearly equally likely."""
        at = next((n for n, pair in enumerate(zip(right, given, strict=False)) if pair[0] != pair[1]), None)
        return at is not None and self.source.nearly_equal([*item.ids, *right[:at]])

    def ended_early(self, answer: Sequence[int]) -> bool:
        """Return whether the token that ends answers ended it."""
        return len(answer) < self.new_tokens


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as text, with the counts that came with it."""

    text: str
    prompt_tokens: int | None
    answer_tokens: int | None
