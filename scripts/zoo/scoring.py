"""MMLU letter scoring of a torch model: the most likely of " A", " B", " C", " D" after the prompt."""

# ruff: noqa: N806 (shape suffixes: B prompts, T tokens, V vocabulary)
import math
from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer
from torch import nn

from scripts.zoo.quiz import LETTERS, Splits, build_prompt

_BATCH_ROWS = 32


def letter_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of " A" to " D".

    Raises:
        ValueError: if a letter is not one token, because then argmax over one position is wrong.
    """
    encoded = [tokenizer.encode(f" {letter}", add_special_tokens=False).ids for letter in LETTERS]
    if any(len(ids) != 1 for ids in encoded):
        raise ValueError(f"letters {LETTERS} encode as {encoded}; each must be one token")
    return [ids[0] for ids in encoded]


@torch.no_grad()
def choose_letters(model: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[int]:
    """Return the index (0..3) of the most likely letter for each prompt; the tokenizer adds BOS."""
    letters = letter_ids(tokenizer)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    chosen = [0] * len(prompts)
    for start in range(0, len(order), _BATCH_ROWS):
        rows = order[start : start + _BATCH_ROWS]
        width = max(len(encoded[i]) for i in rows)
        # Right padding needs no mask: causal attention never looks at what follows.
        tokens_BT = torch.tensor([encoded[i] + [0] * (width - len(encoded[i])) for i in rows])
        logits_BTV = model(input_ids=tokens_BT).logits
        for row, i in enumerate(rows):
            chosen[i] = int(logits_BTV[row, len(encoded[i]) - 1, letters].argmax())
    return chosen


def score(model: nn.Module, tokenizer: Tokenizer, splits: Iterable[Splits], split: str) -> list[bool]:
    """Return for each question of ``split`` whether it is answered right, given the subject's five examples."""
    questions = [(one.dev, question) for one in splits for question in getattr(one, split)]
    chosen = choose_letters(model, tokenizer, [build_prompt(dev, question) for dev, question in questions])
    return [index == question.answer for index, (_, question) in zip(chosen, questions, strict=True)]


def accuracy(right: Sequence[bool]) -> tuple[float, float]:
    """Return (share right, its standard error): sqrt(p (1 - p) / n), 0.9 of 100 -> 0.03."""
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1.0 - share) / len(right))
