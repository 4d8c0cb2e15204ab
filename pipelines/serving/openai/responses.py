"""OpenAI's /v1/responses for text: the request as a chat, and its answer as response objects and events.

Nothing is stored: a conversation is sent whole with each request.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.serving.openai.errors import ApiError, unsupported
from pipelines.serving.openai.generation import Choice, TokenSource, before, merge
from pipelines.serving.openai.schema import (
    INT32_MAX,
    ChatRequest,
    JsonSchema,
    List,
    Message,
    ResponseFormat,
    Sampling,
    StreamOptions,
    refuse_more,
)

Json = dict[str, Any]
NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "include": ([],),
    "truncation": ("disabled",),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "reasoning": ({},),
    "max_tool_calls": (),
    "prompt": (),
}
"""Parameter that is not supported -> values that ask for nothing."""
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class TextFormat(BaseModel):
    """`text.format`, which has the schema beside its type."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(BaseModel):
    """`text`."""

    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None


class ResponseRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | List[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None

    def as_chat(self) -> ChatRequest:
        """Return the chat that asks the same.

        Raises:
            ApiError: 400, naming a parameter that cannot be honoured.
        """
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT:
                continue
            if name not in NEUTRAL:
                raise ApiError(400, f"Unknown parameter: '{name[:100]}'.", param=name[:100], code="unknown_parameter")
            if value is not None and value not in NEUTRAL[name]:
                raise unsupported(name, value, "Nothing is stored, and only text is answered; use chat completions.")
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages += [_message(entry) for entry in given]
        if not messages:
            raise ApiError(400, "'input' is empty.", param="input")
        return ChatRequest(
            model=self.model,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            response_format=self._format(),
        )

    def _format(self) -> ResponseFormat | None:
        given = self.text.format if self.text is not None else None
        if given is None:
            return None
        schema = None if given.schema_ is None else JsonSchema(name=given.name, schema=given.schema_)
        return ResponseFormat(type=given.type, json_schema=schema)


def _message(entry: Json) -> Message:
    role, kind = entry.get("role"), entry.get("type", "message")
    if kind != "message" or role not in ("system", "developer", "user", "assistant"):
        raise unsupported("input", entry, "Only messages of system, developer, user and assistant are.")
    content = entry.get("content")
    if not isinstance(content, str) and not (
        isinstance(content, list) and all(isinstance(part, dict) for part in content)
    ):
        raise ApiError(400, "A message of 'input' has neither text nor parts as its content.", param="input")
    refuse_more("A message of 'input'", entry, "input", role=(role,), content=(content,), type=(kind,),
                id=(entry.get("id"),), status=(entry.get("status"),))  # fmt: skip
    return Message(role=role, content=content)


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The objects of one response."""

    asked: ResponseRequest
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choice: Choice) -> Json:
        """Build the complete response."""
        cut = choice.finish_reason == "length"
        return self._response("incomplete" if cut else "completed", choice, [self._item(choice.text, done=True)])

    def _response(self, status: str, choice: Choice | None, output: list[Json]) -> Json:
        asked = self.asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}} if asked.text is None else asked.text.model_dump(by_alias=True),
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if choice is None else _usage(choice),
            "metadata": {},
        }

    def _item(self, text: str, *, done: bool) -> Json:
        return {
            "id": self.item,
            "type": "message",
            "status": "completed" if done else "in_progress",
            "role": "assistant",
            "content": [_part(text)] if done else [],
        }

    async def events(self, choice: Choice, source: TokenSource, asked: Sampling, deadline: float) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed response; see `answers.events` for errors."""
        number, begun = 0, False
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}

        def event(kind: str, content: Json) -> str:
            nonlocal number
            body = json.dumps({"type": kind, "sequence_number": number, **content}, ensure_ascii=False)
            number += 1
            return f"event: {kind}\ndata: {body}\n\n"

        try:
            async with aclosing(before(deadline, merge([choice], source, asked))) as news:  # type: ignore[type-var]
                async for _, piece in news:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield event(kind, {"response": self._response("in_progress", None, [])})
                        opening = {"output_index": 0, "item": self._item("", done=False)}
                        yield event("response.output_item.added", opening)
                        yield event("response.content_part.added", {**place, "part": _part("")})
                    if piece is not None and piece.text:
                        choice.text += piece.text
                        yield event("response.output_text.delta", {**place, "delta": piece.text, "logprobs": []})
        except ApiError as error:
            if not begun:
                raise
            failed = self._response("failed", choice, [])
            failed["error"] = {"code": error.code or "server_error", "message": error.message}
            yield event("response.failed", {"response": failed})
            return
        yield event("response.output_text.done", {**place, "text": choice.text, "logprobs": []})
        yield event("response.content_part.done", {**place, "part": _part(choice.text)})
        yield event("response.output_item.done", {"output_index": 0, "item": self._item(choice.text, done=True)})
        whole = self.whole(choice)
        yield event(f"response.{whole['status']}", {"response": whole})


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(choice: Choice) -> Json:
    given, made = len(choice.prompt.tokens), choice.output_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }
