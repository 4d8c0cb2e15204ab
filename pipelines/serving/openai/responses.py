"""OpenAI's /v1/responses for text and tools: the request as a chat, and its answer as response objects and events.

Nothing is stored: a conversation is sent whole with each request.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.serving.openai.answers import token_score
from pipelines.serving.openai.errors import ApiError, unsupported
from pipelines.serving.openai.generation import Completion, TokenScore, TokenSource, before, merge
from pipelines.serving.openai.guides import JsonSchema, StrictModel
from pipelines.serving.openai.schema import (
    INT32_MAX,
    MAX_LOGPROBS,
    List,
    LoraTask,
    Sampling,
    StreamOptions,
    Unsupported,
    refuse_more,
    refuse_unknown,
)
from pipelines.serving.openai.tools import ToolCall

Json = dict[str, Any]
STORED = "Nothing is stored here: send the whole conversation in 'input'."
NEUTRAL: Unsupported = {
    "truncation": ("Shorten the input.", ("disabled",)),
    "background": (STORED, (False,)),
    "previous_response_id": (STORED, ()),
    "conversation": (STORED, ()),
    "prompt": (STORED, ()),
    "context_management": (STORED, ([],)),
    "moderation": ("No moderation runs here.", ()),
    "image": ("This server runs a text model.", ()),
    "access_programs": ("No program runs here.", ([],)),
}
BUILT_IN_CALLS = "max_tool_calls"
"""Bound of the calls of tools that the server runs itself, of which there are none here."""
LOGPROBS = "message.output_text.logprobs"
NEVER_THERE = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)  # fmt: skip
"""Entries of `include` that ask for parts which no answer of this server has, so that nothing is left out."""
REFERENCES = (
    "Nothing is stored here: send the items themselves, without a previous response "
    "(in the Vercel AI SDK, set store to false)."
)
NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort", "logprobs": "include",
}  # fmt: skip
"""Parameter of a chat -> where it comes from here."""


class TextFormat(JsonSchema):
    """`text.format`, which has the schema beside its type."""

    type: Literal["text", "json_object", "json_schema"]

    def as_chat(self) -> Json:
        """Return the `response_format` of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "strict": self.strict, "schema": self.schema_}}


class TextSettings(StrictModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictModel):
    """`reasoning`; no answer has any to summarize or to carry over."""

    effort: str | None = None
    summary: Literal["none", "auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None


class ResponseRequest(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    input: str | List[Json]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: List[Json] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    include: List[str] | None = None
    lora_task_id: LoraTask | None = None

    def as_chat(self) -> Json:
        """Return the body of the chat that asks the same.

        Raises:
            ApiError: 400, naming a parameter that cannot be honoured.
        """
        self._refuse_unsupported()
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages += _messages(items)
        if not messages:
            raise ApiError(400, "'input' is empty.", param="input")
        asks_scores = LOGPROBS in (self.include or ())
        return {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": True if asks_scores else None,
            "top_logprobs": self.top_logprobs if asks_scores else None,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "response_format": self.text.format.as_chat() if self.text is not None and self.text.format else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "lora_task_id": self.lora_task_id,
        }

    def _refuse_unsupported(self) -> None:
        refuse_unknown(
            {name: value for name, value in (self.model_extra or {}).items() if name != BUILT_IN_CALLS}, NEUTRAL
        )
        for entry in self.include or ():
            if entry not in (LOGPROBS, *NEVER_THERE):
                raise unsupported("include", entry, f"'{LOGPROBS}' is.")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"'top_logprobs' needs include=['{LOGPROBS}'].", param="top_logprobs")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise unsupported("stream_options", "continuous_usage_stats", "Use /v1/chat/completions.")

    def _choice(self) -> str | Json | None:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.keys() == {"type", "mode", "tools"} and choice["type"] == "allowed_tools":
            tools = choice["tools"] if isinstance(choice["tools"], list) else [choice["tools"]]
            allowed = {"mode": choice["mode"], "tools": [_named_tool(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return _named_tool(choice)


def _named_tool(choice: object) -> Json:
    if not isinstance(choice, dict) or choice.keys() != {"type", "name"} or choice["type"] != "function":
        instead = (
            "It is none, auto, required, a function by type and name, or allowed_tools with mode and such functions."
        )
        raise unsupported("tool_choice", choice, instead)
    return {"type": "function", "function": {"name": choice["name"]}}


def in_its_words(error: ApiError) -> ApiError:
    """Return an error about the chat that a request stands for with the names of the request itself."""
    message = error.message
    for name, own in NAMES.items():
        message = message.replace(f"'{name}'", f"'{own}'")
    param = NAMES.get(error.param, error.param) if error.param else None
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code)


def _chat_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise unsupported("tools", tool, "Only functions are: tools that run on the client's side.")
    fields = ("type", "name", "description", "parameters", "strict")
    rest = {name: value for name, value in tool.items() if name not in fields}
    refuse_more("A tool", rest, "tools", defer_loading=(None, False))
    function = {name: tool[name] for name in fields[1:] if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _messages(items: Sequence[Json]) -> list[Json]:
    """Return the messages of a chat; calls of tools belong to the message of the assistant before them."""
    messages: list[Json] = []
    for entry in items:
        kind = entry.get("type") or "message"
        if kind == "message":
            messages.append(_message(entry))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(entry))
        elif kind == "function_call_output":
            messages.append(_output(entry))
        elif kind == "item_reference":
            raise unsupported("input", entry, REFERENCES)
        else:
            raise unsupported("input", entry, "Messages, function_call and function_call_output are.")
    return messages


def _message(entry: Json) -> Json:
    role = entry.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise unsupported("input", entry, "Only messages of system, developer, user and assistant are.")
    content = _content(entry.get("content"), "A message of 'input'")
    _refuse_rest("A message of 'input'", entry, "role", "content")
    return {"role": role, "content": content}


def _call(entry: Json) -> Json:
    name, arguments = _text(entry, "name"), _text(entry, "arguments")
    _refuse_rest("A function_call of 'input'", entry, "name", "arguments", "call_id")
    function = {"name": name, "arguments": arguments}
    return {"id": _text(entry, "call_id"), "type": "function", "function": function}


def _output(entry: Json) -> Json:
    output = _content(entry.get("output"), "A function_call_output of 'input'")
    _refuse_rest("A function_call_output of 'input'", entry, "output", "call_id")
    return {"role": "tool", "tool_call_id": _text(entry, "call_id"), "content": output}


def _text(entry: Json, name: str) -> str:
    text = entry.get(name)
    if not isinstance(text, str) or (not text and name != "arguments"):
        raise unsupported("input", entry, f"Its '{name}' is a text.")
    return text


def _content(content: object, what: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return content
    raise ApiError(400, f"{what} has neither text nor parts as its content.", param="input")


def _refuse_rest(what: str, entry: Json, *used: str) -> None:
    """Refuse what an item has beside the parts that are used and those that say where it comes from."""
    rest = {name: value for name, value in entry.items() if name not in (*used, "type", "id", "status")}
    refuse_more(what, rest, "input", phase=(None, "commentary", "final_answer"))


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The objects of one response."""

    request: ResponseRequest
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Completion], sampling: Sampling) -> Json:
        """Build the complete response; there is one choice."""
        return self._whole(choices[0])

    def _whole(self, choice: Completion) -> Json:
        cut = choice.finish_reason == "length"
        return self._response("incomplete" if cut else "completed", choice, self._output(choice))

    def _output(self, choice: Completion) -> list[Json]:
        message = [self._item(choice)] if choice.text or not choice.calls else []
        items = [*message, *(_call_item(call, done=True) for call in choice.calls)]
        if choice.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        return items

    def _response(self, status: str, choice: Completion | None, output: list[Json]) -> Json:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}}
            if request.text is None or request.text.format is None
            else request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": request.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None if choice is None else _usage(choice),
            "metadata": (request.model_extra or {}).get("metadata") or {},
        }

    def _item(self, choice: Completion | None) -> Json:
        return {
            "id": self.item,
            "type": "message",
            "status": "in_progress" if choice is None else "completed",
            "role": "assistant",
            "content": [] if choice is None else [_part(choice.text, _scores(choice, choice.scores))],
        }

    async def events(
        self, choices: Sequence[Completion], source: TokenSource, sampling: Sampling, deadline: float
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed response; see `answers.Form.events` for errors."""
        (choice,) = choices
        numbered = _Numbered()
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        begun = opened = False
        try:
            async with aclosing(before(deadline, merge([choice], source, sampling))) as news:  # type: ignore[type-var]
                async for _, delta in news:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield numbered.event(kind, {"response": self._response("in_progress", None, [])})
                    if not opened and (delta.text if delta is not None else not choice.calls):
                        opened = True
                        for event in self._opening(numbered):
                            yield event
                    if delta is None or not (delta.text or delta.scores):
                        continue
                    choice.text += delta.text
                    choice.scores += delta.scores
                    content = {**place, "delta": delta.text, "logprobs": _scores(choice, delta.scores)}
                    yield numbered.event("response.output_text.delta", content)
        except ApiError as error:
            if begun:
                failed = self._response("failed", choice, [])
                failed["error"] = {"code": error.code or "server_error", "message": error.message}
                yield numbered.event("response.failed", {"response": failed})
            raise
        for event in self._endings(choice, numbered, opened=opened):
            yield event

    def _opening(self, numbered: "_Numbered") -> Iterator[str]:
        place = {"item_id": self.item, "output_index": 0, "content_index": 0}
        yield numbered.event("response.output_item.added", {"output_index": 0, "item": self._item(None)})
        yield numbered.event("response.content_part.added", {**place, "part": _part("", [])})

    def _endings(self, choice: Completion, numbered: "_Numbered", *, opened: bool) -> Iterator[str]:
        """Yield the end of the message, the calls of tools, each in one piece, and the whole response."""
        items = self._output(choice)
        if opened:
            place = {"item_id": self.item, "output_index": 0, "content_index": 0}
            scores = _scores(choice, choice.scores)
            yield numbered.event("response.output_text.done", {**place, "text": choice.text, "logprobs": scores})
            yield numbered.event("response.content_part.done", {**place, "part": _part(choice.text, scores)})
            yield numbered.event("response.output_item.done", {"output_index": 0, "item": items[0]})
        for at, call in enumerate(choice.calls, int(opened)):
            done = items[at]
            place = {"item_id": done["id"], "output_index": at}
            opening = {"output_index": at, "item": _call_item(call, done=False)}
            yield numbered.event("response.output_item.added", opening)
            yield numbered.event("response.function_call_arguments.delta", {**place, "delta": call.arguments})
            named = {**place, "name": call.name, "arguments": call.arguments}
            yield numbered.event("response.function_call_arguments.done", named)
            yield numbered.event("response.output_item.done", {"output_index": at, "item": done})
        whole = self._whole(choice)
        yield numbered.event(f"response.{whole['status']}", {"response": whole})


class _Numbered:
    """Writes events, which carry their number."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, content: Json) -> str:
        body = json.dumps({"type": kind, "sequence_number": self._number, **content}, ensure_ascii=False)
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n"


def _call_item(call: ToolCall, *, done: bool) -> Json:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed" if done else "in_progress",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments if done else "",
    }


def _part(text: str, scores: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _scores(choice: Completion, scores: Sequence[TokenScore]) -> list[Json]:
    return [token_score(choice.engine.tokenizer, score) for score in scores]


def _usage(choice: Completion) -> Json:
    prompt_tokens, output_tokens = len(choice.prompt.tokens), choice.output_tokens
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }
