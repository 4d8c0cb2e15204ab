"""Scored prompts: the text, the names of its tokens, and where each begins."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from pipelines.serving.openai.inputs import InputTensor
from pipelines.serving.openai.scoring import PromptScorer, Scores, choice
from pipelines.serving.openai.tokenizer import ServedTokenizer

WORDS = ["<unk>", "<s>", "</s>", "▁The", "▁river", "s", "<0xC3>", "<0xA9>", "▁", "."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    """As Llama 2 and Mistral have it: a space in front of a text, which the decoder drops, and bytes."""
    made = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return ServedTokenizer(folder, adds_special=True)


@pytest.mark.parametrize(
    ("text", "names", "offsets"),
    [
        ("The rivers The", ["<s>", " The", " river", "s", " The"], [0, 0, 3, 9, 10]),
        ("The é river", ["<s>", " The", " ", "\ufffd", "\ufffd", " river"], [0, 0, 3, 4, 4, 5]),
        ("The</s>", ["<s>", " The", "</s>"], [0, 0, 3]),
    ],
)
def test_an_echoed_text_is_the_prompt_and_its_tokens_have_places_in_it(
    tokenizer: ServedTokenizer, text: str, names: list[str], offsets: list[int]
) -> None:
    """Without the BOS that the tokenizer adds; a token's name has its space."""
    tokens = (*tokenizer.ids(text), WORDS.index("."))
    scores = Scores(tokens, (None, *[-1.0] * (len(tokens) - 1)), (None, *[((4, -1.0),)] * (len(tokens) - 1)))
    found = choice(0, text, scores, tokenizer, with_best=True)
    assert found["text"] == f"{text}."
    assert found["logprobs"]["tokens"] == [*names, "."]
    assert found["logprobs"]["text_offset"] == [*offsets, len(text)]
    assert found["logprobs"]["top_logprobs"][1] == {" river": -1.0}
    alone = choice(0, text, scores, tokenizer, with_best=False, new=False)
    assert (alone["text"], alone["logprobs"]["text_offset"]) == (text, offsets)


def test_special_tokens_that_the_text_leaves_out_have_no_length(tokenizer: ServedTokenizer) -> None:
    """The text of a prompt of tokens is without them, as an echo without log probabilities has it."""
    tokens = (1, 3, 2, 4)
    scores = Scores((*tokens, 2), (None, *[-1.0] * 4), (None,) * 5)
    found = choice(0, tokenizer.text(tokens, skip_special=True), scores, tokenizer, with_best=False)
    assert (found["text"], found["logprobs"]["text_offset"]) == ("The river", [0, 0, 3, 3, 9])


def test_the_adapter_that_is_asked_for_scores_the_prompt() -> None:
    sent = []

    class Source:
        async def context_log_probs(self, inputs: Sequence[InputTensor]) -> Any:
            sent.append({entry.name: entry.values for entry in inputs})
            return np.zeros(1), np.zeros((2, 1), int), np.zeros((2, 1))

    scorer = PromptScorer(Source(), few=True)  # type: ignore[arg-type]
    for adapter in (3, None):
        asyncio.run(scorer.score([(5, 6)], 1, adapter))
    assert [inputs.get("lora_task_id") for inputs in sent] == [(3,), None]
