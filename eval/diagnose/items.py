"""What goes through every stage: a few seeded prompts of different lengths, and messages where there is a template."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tokenizer import RenderedChat, chat_templates
from pipelines.domain.errors import UserError
from pipelines.host.files import parse_json
from pipelines.serving.openai.rendering import NoPromptError, Renderer

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
        text: what is sent to a server that takes no messages, and adds special tokens; empty if none gives these ids.
        ids: token ids, with the special tokens that the tokenizer adds; of a chat, with those of its template alone.
        messages: of a chat; None for a plain prompt.
    """

    name: str
    text: str
    ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...] | None = None


def make_items(tokenizer: Any, texts: Path, seed: int, longest: int, model: Path, template: Path | None) -> list[Item]:
    """Choose prompts from a file of texts: one of each length in `WORDS`, a long one, and chats.

    Args:
        tokenizer: of the model.
        texts: JSON lines with `text`.
        seed: the same seed chooses the same prompts.
        longest: most tokens of a prompt that the engine takes.
        model: Hugging Face folder.
        template: a chat template instead of the folder's own.

    Raises:
        UserError: the chat template gives no prompt.
    """
    lines = texts.read_text(encoding="utf-8").splitlines()
    drawn = random.Random(seed).sample(lines, min(len(lines), TEXTS))
    words = [parse_json(line)["text"].split() for line in drawn]
    long_enough = [next((each for each in words[at:] if len(each) >= n), words[at]) for at, n in enumerate(WORDS)]
    prompts = [" ".join(each[:count]) for each, count in zip(long_enough, WORDS, strict=True)]
    items = [_item(f"prompt of {len(text.split())} words", text, tokenizer) for text in prompts]
    long = _longest_prefix([word for each in words * 40 for word in each], tokenizer, min(longest, LONGEST))
    return [*items, _item("long prompt", long, tokenizer), *_chats(tokenizer, model, template)]


def _ids(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of a prompt; the template of a chat has written its special tokens."""
    return tuple(tokenizer(text, add_special_tokens=not isinstance(text, RenderedChat), verbose=False)["input_ids"])


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


def _chats(tokenizer: Any, model: Path, template: Path | None) -> list[Item]:
    templates, tokens = chat_templates(model, template)
    if "default" not in templates:
        return []
    renderer, found = Renderer(templates["default"], tokens), []
    for text in MESSAGES:
        messages = ({"role": "user", "content": text},)
        try:
            rendered = RenderedChat(renderer.render(messages, {}))
        except NoPromptError as fault:
            raise UserError(
                f"The model's chat template {fault}.", todo="Correct it, or give another: serving.chat_template=FILE"
            ) from None
        ids, texts = _ids(rendered, tokenizer), (str(rendered), rendered.removeprefix(tokenizer.bos_token or ""))
        sent = next((each for each in texts if _ids(each, tokenizer) == ids), "")
        found.append(Item(f"chat {json.dumps(text)}", sent, ids, messages))
    return found
