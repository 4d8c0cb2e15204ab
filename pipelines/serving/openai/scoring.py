"""Score prompts: the log probability of each token, for `echo` with `logprobs`, as evaluation harnesses ask for it.

TensorRT-LLM's model returns the logits of the whole prompt, which are large (vocabulary x tokens x 4 bytes), this
project's own the log probabilities of as many tokens as are shown. Prompts of all requests are scored one after the
other.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from pipelines.host.log_probs import likeliest, norms_of
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.inputs import InputTensor, prompt_inputs
from pipelines.serving.openai.schema import CompletionRequest
from pipelines.serving.openai.tokenizer import ServedTokenizer

Json = dict[str, Any]
Best = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place and their log probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the log probabilities of prompts, of which it has the tokens and the texts."""

    request: CompletionRequest
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of a prompt and of the token that greedy decoding adds.

    Attributes:
        tokens: the prompt and the new token.
        log_probs: of each token after those before it; None for the first.
        best: likeliest tokens at each place and their log probabilities, the likeliest first; None for the first place.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    best: tuple[Best | None, ...]


class PromptSource(Protocol):
    """A model that reads prompts; see `pipelines.serving.openai.backend.Backend`."""

    async def context_logits(self, inputs: Sequence[InputTensor]) -> Any: ...  # noqa: D102
    async def context_log_probs(self, inputs: Sequence[InputTensor]) -> Any: ...  # noqa: D102


class PromptScorer:
    """Scores the prompts of all requests, one at a time."""

    def __init__(self, source: PromptSource, *, few: bool) -> None:
        """Take the model, and whether it returns the log probabilities of a few tokens."""
        self._source, self._few = source, few
        self._turn = asyncio.Lock()

    async def score(self, prompts: Sequence[tuple[int, ...]], top: int = 1, adapter: int | None = None) -> list[Scores]:
        """Score each prompt, with the `top` likeliest tokens at each place, by the model or one of its adapters.

        Raises:
            ApiError: the engine returns no logits of prompts, or the server returned an error.
        """
        return [await self._one(prompt, top, adapter) for prompt in prompts]

    async def _one(self, prompt: tuple[int, ...], top: int, adapter: int | None) -> Scores:
        inputs = prompt_inputs(prompt, 1)
        if adapter is not None:
            inputs.append(InputTensor("lora_task_id", "UINT64", (adapter,)))
        async with self._turn:
            if self._few:
                output = InputTensor("return_context_log_probs", "INT32", (top,))
                return _sent(prompt, *await self._source.context_log_probs([*inputs, output]))
            output = InputTensor("return_context_logits", "BOOL", (True,))
            logits = await self._source.context_logits([*inputs, output])
            if logits is None or logits.ndim != 2 or len(logits) != len(prompt):
                raise ApiError(
                    400,
                    "'logprobs' with echo needs the logits of the prompt, which this engine does not return."
                    " Build it with build.trtllm.gather_context_logits=true.",
                    param="logprobs",
                    code="unsupported_parameter",
                )
            return await asyncio.to_thread(scores_of, prompt, logits, top)


def pairs(tokens: Any, log_probs: Any) -> tuple[Best, ...]:
    """Pair tokens [N, K] with their log probabilities [N, K]."""
    return tuple(tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), log_probs.tolist(), strict=True))


def _sent(prompt: tuple[int, ...], own: Any, tokens: Any, log_probs: Any) -> Scores:
    """Return the scores of a prompt; see `Backend.context_log_probs`."""
    best = pairs(tokens, log_probs)
    token, score = best[-1][0]
    return Scores((*prompt, token), (None, *own.tolist(), score), (None, *best))


def scores_of(prompt: tuple[int, ...], logits: Any, top: int = 1) -> Scores:
    """Return the log probabilities; row i of the logits [tokens, vocabulary] is about token i + 1."""
    norms = norms_of(logits)
    own = logits[np.arange(len(prompt) - 1), list(prompt[1:])].astype(np.float64) - norms[:-1]
    return _sent(prompt, own, *likeliest(logits, norms, top))


def best_of(logits: Any, top: int) -> tuple[Best, ...]:
    """Return the `top` likeliest tokens of each row of logits [N, V] and their log probabilities."""
    return pairs(*likeliest(logits, norms_of(logits), top))


def choice(
    index: int, text: str, scores: Scores, tokens: ServedTokenizer, *, with_best: bool, as_ids: bool = False,
    new: bool = True,
) -> Json:  # fmt: skip
    """Build a choice of the response: the echoed prompt, mostly with one more token, and their log probabilities.

    Args:
        index: of the choice.
        text: the prompt as it was given.
        scores: of the prompt.
        tokens: makes text of tokens.
        with_best: with the likeliest tokens.
        as_ids: name tokens "token_id:5" instead of by their text, which several tokens may share.
        new: with the new token.
    """
    length = len(scores.tokens) if new else len(scores.tokens) - 1
    scores = Scores(scores.tokens[:length], scores.log_probs[:length], scores.best[:length])
    added = tokens.continuation(scores.tokens[-1:], skip_special=True) if new else ""
    prompt = scores.tokens[:-1] if new else scores.tokens

    @cache
    def name(token: int) -> str:
        return f"token_id:{token}" if as_ids else tokens.continuation([token])

    @cache
    def size(token: int) -> int:  # a special one may be left out of the text
        content = tokens.bytes_of(token)
        shown = tokens.continuation([token], skip_special=True) or content.decode(errors="replace") in text
        return len(content) if shown else 0

    # of several tokens with one text the likeliest stays
    top = [None if each is None else {name(token): score for token, score in each[::-1]} for each in scores.best]
    return {
        "index": index,
        "text": text + added,
        "finish_reason": "length",
        "logprobs": {
            "tokens": [name(token) for token in scores.tokens],
            "token_logprobs": list(scores.log_probs),
            "top_logprobs": top if with_best else None,
            "text_offset": [*_offsets(text, [*map(size, prompt)]), *[len(text)] * new],
        },
    }


def _offsets(text: str, sizes: Sequence[int]) -> list[int]:
    """Return the character of a text at which each of its tokens begins.

    They are counted from the end: BOS, and a space that the tokenizer puts in front, have no place in the text.

    Args:
        text: of the tokens.
        sizes: bytes of each token; 0 of one that the text leaves out.
    """
    encoded = text.encode(errors="replace")
    characters = list(accumulate(byte & 0xC0 != 0x80 for byte in encoded))  # begun up to each byte
    starts = [max(0, len(encoded) - rest) for rest in accumulate(reversed(sizes))]
    return [characters[at] - 1 if at < len(encoded) else len(text) for at in reversed(starts)]
