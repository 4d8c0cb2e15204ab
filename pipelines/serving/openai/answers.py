"""Build the JSON of OpenAI's responses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generation import Choice, TextSource, before, merge
from pipelines.serving.openai.schema import Sampling

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """Response format of one of the two endpoints.

    Attributes:
        chat: whether it is /v1/chat/completions rather than /v1/completions.
        model: name that the client used.
        echo: whether every text begins with its prompt.
    """

    chat: bool
    model: str
    echo: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Build a complete response."""
        return {
            **self._head(chunk=False),
            "choices": [self._whole(choice) for choice in choices],
            "usage": usage(choices),
        }

    def chunk(self, choice: Choice, text: str | None, *, first: bool = False) -> Json:
        """Build one chunk of a stream: new text, or its end for None."""
        head = self._head(chunk=True)
        shared = {
            "index": choice.index,
            "finish_reason": choice.finish_reason if text is None else None,
            "logprobs": None,
        }
        if not self.chat:
            return {**head, "choices": [{**shared, "text": text or ""}]}
        delta = {"role": "assistant", "content": ""} if first else {} if text is None else {"content": text}
        return {**head, "choices": [{**shared, "delta": delta}]}

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """Build the last chunk, sent with stream_options.include_usage."""
        return {**self._head(chunk=True), "choices": [], "usage": usage(choices)}

    def _whole(self, choice: Choice) -> Json:
        shared: Json = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self.chat:
            return {**shared, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {**shared, "text": choice.prompt + choice.text if self.echo else choice.text}

    def _head(self, *, chunk: bool) -> Json:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def scored_response(model: str, choices: Sequence[Json], prompt_tokens: int) -> Json:
    """Build the response of a request that scores prompts; each has got one new token."""
    new = len(choices)
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}
    return {**Form(chat=False, model=model)._head(chunk=False), "choices": list(choices), "usage": counts}


def usage(choices: Iterable[Choice]) -> Json:
    """Count tokens as the engine does; a prompt with several answers counts once."""
    choices = list(choices)
    prompts = sum(choice.input_tokens for choice in choices if choice.number == 0)
    outputs = sum(choice.output_tokens for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": outputs, "total_tokens": prompts + outputs}


async def events(
    form: Form, choices: Sequence[Choice], source: TextSource, asked: Sampling, deadline: float
) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed response, until a time of the event loop's clock.

    An error before the first chunk is raised, so that it can still become an HTTP status; a later one ends the stream
    with an error event and without [DONE].
    """
    begun = False
    try:
        async with aclosing(before(deadline, merge(choices, source, asked))) as news:  # type: ignore[type-var]
            async for choice, text in news:
                if not begun:
                    begun = True
                    for chunk in _openings(form, choices):
                        yield event(chunk)
                yield event(form.chunk(choice, text))
    except ApiError as error:
        if not begun:
            raise
        yield event(error.body())
        return
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(form.usage_chunk(choices))
    yield "data: [DONE]\n\n"


def _openings(form: Form, choices: Sequence[Choice]) -> list[Json]:
    """Yield what comes before the first token: the role, or the echoed prompt."""
    if form.chat:
        return [form.chunk(choice, "", first=True) for choice in choices]
    return [form.chunk(choice, choice.prompt) for choice in choices] if form.echo else []


def event(content: Json) -> str:
    """Write one server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
