"""Build the JSON of OpenAI's responses."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generation import Completion, TextDelta, TokenScore, TokenSource, before, merge
from pipelines.serving.openai.schema import Sampling
from pipelines.serving.openai.tokenizer import ServedTokenizer

Json = dict[str, Any]
TEXT = "text_completion"


@dataclass(frozen=True, slots=True)
class Form:
    """Response format of one of the two endpoints.

    Attributes:
        chat: whether it is /v1/chat/completions rather than /v1/completions.
        echo: whether every text begins with its prompt.
        as_ids: name tokens "token_id:5" instead of by their text, which several tokens may share.
        counts_reuse: whether the engine says how much of a prompt was there already.
    """

    chat: bool
    model: str
    tokenizer: ServedTokenizer
    echo: bool = False
    as_ids: bool = False
    counts_reuse: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Completion], sampling: Sampling) -> Json:
        """Build a complete response."""
        return {
            **self._head(chunk=False),
            "choices": [self._whole(choice, sampling) for choice in choices],
            "usage": usage(choices, cached=self.counts_reuse),
        }

    async def events(
        self, choices: Sequence[Completion], source: TokenSource, sampling: Sampling, deadline: float
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed response, until a time of the event loop's clock.

        An error before the first chunk is raised, so that it can still become an HTTP status; a later one ends the
        stream with an error event and without [DONE], and is then raised.
        """
        begun = False
        try:
            async with aclosing(before(deadline, merge(choices, source, sampling))) as news:  # type: ignore[type-var]
                async for choice, delta in news:
                    if not begun:
                        begun = True
                        for each in choices if self.chat or self.echo else ():  # the role, or the echoed prompt
                            opening = TextDelta("" if self.chat else each.prompt.text)
                            yield event(self.chunk(each, opening, sampling, first=True))
                    if delta is None and choice.calls:
                        yield event(self.calls_chunk(choice))
                    yield event(self.chunk(choice, delta, sampling))
        except ApiError as error:
            if begun:
                yield event(error.body())
            raise
        if sampling.stream_options is not None and sampling.stream_options.include_usage:
            yield event(self.usage_chunk(choices))
        yield "data: [DONE]\n\n"

    def chunk(self, choice: Completion, delta: TextDelta | None, sampling: Sampling, *, first: bool = False) -> Json:
        """Build one chunk of a stream: new text, or its end for None."""
        text, scores = (delta.text, delta.scores) if delta else ("", ())
        scored = scores if scores or (delta and sampling.scores is not None and not first) else None
        shared = {
            "index": choice.index,
            "finish_reason": choice.finish_reason if delta is None else None,
            "logprobs": None if scored is None else self._log_probs(choice, scored, sampling),
        }
        head = self._head(chunk=True)
        if sampling.stream_options is not None and sampling.stream_options.continuous_usage_stats:
            made = choice.output_tokens if delta is None else delta.output_tokens
            head["usage"] = _counts(len(choice.prompt.tokens), made)
        if not self.chat:
            return {**head, "choices": [{**shared, "text": text}]}
        content = {"role": "assistant", "content": ""} if first else {"content": text} if delta else {}
        if delta and delta.reasoning:
            content = {"reasoning_content": delta.reasoning, **({"content": text} if text else {})}
        return {**head, "choices": [{**shared, "delta": content}]}

    def calls_chunk(self, choice: Completion) -> Json:
        """Build the chunk of a chat's stream with the calls of tools."""
        calls = {"tool_calls": [call.delta() for call in choice.calls]}
        shared = {"index": choice.index, "finish_reason": None, "logprobs": None}
        return {**self._head(chunk=True), "choices": [{**shared, "delta": calls}]}

    def usage_chunk(self, choices: Sequence[Completion]) -> Json:
        """Build the last chunk, sent with stream_options.include_usage."""
        return {**self._head(chunk=True), "choices": [], "usage": usage(choices, cached=self.counts_reuse)}

    def _whole(self, choice: Completion, sampling: Sampling) -> Json:
        scored = None if sampling.scores is None else self._log_probs(choice, choice.scores, sampling)
        shared: Json = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": scored}
        if not self.chat:
            return {**shared, "text": choice.prompt.text + choice.text if self.echo else choice.text}
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.channels is not None:
            message["reasoning_content"] = choice.reasoning or None
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [call.whole() for call in choice.calls]}
        return {**shared, "message": message}

    def _log_probs(self, choice: Completion, scores: Sequence[TokenScore], sampling: Sampling) -> Json:
        if self.chat:
            return {"content": [token_score(self.tokenizer, score) for score in scores], "refusal": None}
        before = len(choice.prompt.text) if self.echo else 0
        return {
            "tokens": [self._name(score.token) for score in scores],
            "token_logprobs": [score.log_prob for score in scores],
            "top_logprobs": [self._best(score) for score in scores] if sampling.scores else None,
            "text_offset": [before + score.start for score in scores],
        }

    def _best(self, score: TokenScore) -> dict[str, float]:
        """Return the likeliest tokens by name; the chosen one is always among them, as OpenAI documents."""
        best = {self._name(token): value for token, value in score.best[::-1]}
        return {self._name(score.token): score.log_prob, **best}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.tokenizer.continuation([token])

    def _head(self, *, chunk: bool) -> Json:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else TEXT
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def token_score(tokenizer: ServedTokenizer, score: TokenScore) -> Json:
    """Build the log probability of a token of a chat or response, with the likeliest ones at its place."""

    def one(token: int, value: float) -> Json:
        return {"token": tokenizer.continuation([token]), "logprob": value, "bytes": list(tokenizer.bytes_of(token))}

    return {**one(score.token, score.log_prob), "top_logprobs": [one(token, value) for token, value in score.best]}


def scored_response(model: str, choices: Sequence[Json], prompt_tokens: int, new_tokens: int) -> Json:
    """Build the response of a request that scores prompts."""
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": TEXT, "created": int(time.time()), "model": model}
    return {**head, "choices": list(choices), "usage": _counts(prompt_tokens, new_tokens)}


def usage(choices: Iterable[Completion], *, cached: bool) -> Json:
    """Count tokens as the engine does; a prompt with several answers counts once."""
    choices = list(choices)
    firsts = [choice for choice in choices if choice.number == 0]
    prompts = sum(len(choice.prompt.tokens) for choice in firsts)
    outputs = sum(choice.output_tokens for choice in choices)
    counts = _counts(prompts, outputs)
    if any(choice.channels for choice in choices):
        counts["completion_tokens_details"] = {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)}
    if cached:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
    return counts


def _counts(prompt: int, output: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""json.dumps would make an encoder for every event."""


def event(content: Json) -> str:
    """Write one server-sent event."""
    return f"data: {_encoded(content)}\n\n"
