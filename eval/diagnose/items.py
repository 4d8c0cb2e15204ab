"""What goes through every stage: a few seeded prompts of different lengths, and messages where there is a template."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.host.files import parse_json

WORDS = (1, 6, 12, 24, 40)
"""Words of the prompts: a batch of different lengths, the first as short as possible."""
TEXTS = 64
"""Texts that prompts are taken from."""
LONGEST = 2560
"""Tokens of the long prompt, or what the engine takes if that is less."""
MESSAGES = ("Hello!", "Where does the river begin?")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt.

    Attributes:
        name: in messages, e.g. "prompt of 12 words".
        text: what is sent; of a chat, what the template makes of it.
        ids: token ids, with the special tokens that the tokenizer adds.
        messages: of a chat; None for a plain prompt.
    """

    name: str
    text: str
    ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | None = None


def make_items(tokenizer: Any, texts: Path, seed: int, longest: int, template: str | None) -> list[Item]:
    """Choose prompts from a file of texts: one of each length in `WORDS`, a long one, and chats.

    Args:
        tokenizer: of the model.
        texts: JSON lines with `text`.
        seed: the same seed chooses the same prompts.
        longest: most tokens of a prompt that the engine takes.
        template: a chat template instead of the tokenizer's own.
    """
    lines = texts.read_text(encoding="utf-8").splitlines()
    drawn = random.Random(seed).sample(lines, min(len(lines), TEXTS))
    words = [parse_json(line)["text"].split() for line in drawn]
    long_enough = [next((each for each in words[at:] if len(each) >= n), words[at]) for at, n in enumerate(WORDS)]
    prompts = [" ".join(each[:count]) for each, count in zip(long_enough, WORDS, strict=True)]
    items = [_item(f"prompt of {len(text.split())} words", text, tokenizer) for text in prompts]
    long = _longest_prefix([word for each in words * 40 for word in each], tokenizer, min(longest, LONGEST))
    return [*items, _item("long prompt", long, tokenizer), *_chats(tokenizer, template)]


def _ids(text: str, tokenizer: Any, *, special: bool = True) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _item(name: str, text: str, tokenizer: Any) -> Item:
    return Item(name, text, _ids(text, tokenizer))


def _longest_prefix(words: Sequence[str], tokenizer: Any, most: int) -> str:
    """Return as many of the first words as have at most so many tokens."""
    size, step = 0, 1 << 12
    while step:
        if size + step <= len(words) and len(_ids(" ".join(words[: size + step]), tokenizer)) <= most:
            size += step
        step //= 2
    return " ".join(words[:size])


def _chats(tokenizer: Any, template: str | None) -> list[Item]:
    if template is None and not getattr(tokenizer, "chat_template", None):
        return []
    found = []
    for text in MESSAGES:
        messages = ({"role": "user", "content": text},)
        rendered = tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
        ids = _with_bos(_ids(rendered, tokenizer, special=False), tokenizer)
        found.append(Item(f"chat {json.dumps(text)}", rendered, ids, messages))
    return found


def _with_bos(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """Return a rendered chat with the BOS token, where the tokenizer adds one and the template wrote none."""
    bos = tokenizer.bos_token_id
    adds = bos is not None and _ids("a", tokenizer)[:1] == (bos,)
    return (bos, *ids) if adds and ids[:1] != (bos,) else ids
