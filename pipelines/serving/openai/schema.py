"""Request schema. Unknown parameters, and known ones that cannot be honoured, are refused; none is ignored.

The parameters are OpenAI's, and those that vLLM, NIM and trtllm-serve add to them, with their meaning.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipelines.serving.openai import strict_json
from pipelines.serving.openai.errors import SHOWN_VALUE, ApiError, shortened, unsupported
from pipelines.serving.openai.guides import (
    Guide,
    ResponseFormat,
    StrictModel,
    StructuredOutputs,
    call_or_answer,
    call_schema,
)

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 32
MAX_BIASES = 1024
MAX_LOGPROBS = 20
"""Likeliest tokens of each place that may be asked for; vLLM's default for `--max-logprobs`."""
MAX_STOP_LENGTH = 1000
TOKEN = re.compile(r"[0-9]{1,10}")
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
# Metadata that does not change the response.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "prompt_cache_retention", "prompt_cache_options")  # fmt: skip
Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first fault is reported: a megabyte of faults would take seconds."""
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
LoraTask = Annotated[int, Field(ge=0, lt=2**64)]
SCORED = (
    "With echo and logprobs, the prompt is scored and at most one token is added: give max_tokens=1 and temperature=0,"
    " or max_tokens=0, and nothing else that changes tokens."
)


Unsupported = Mapping[str, tuple[str, tuple[object, ...]]]
"""Parameter that cannot be honoured -> what to do instead, and the values that ask for nothing."""


def refuse_unknown(parameters: Mapping[str, Any], table: Unsupported) -> None:
    """Refuse parameters that the schema does not have, unless they ask for nothing or change no answer.

    Raises:
        ApiError: 400, naming the parameter.
    """
    for name, value in parameters.items():
        if name in WITHOUT_EFFECT:
            continue
        if name not in table:
            short = shortened(name)
            raise ApiError(400, f"Unknown parameter: '{short}'.", param=short, code="unknown_parameter")
        instead, neutral = table[name]
        if value is not None and value not in neutral:
            raise unsupported(name, value, instead)


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(BaseModel):
    """Parameters shared by all endpoints."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    lora_task_id: LoraTask | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; an empty one asks for nothing."""
        return tuple(filter(None, (self.stop,) if isinstance(self.stop, str) else self.stop or ()))

    @property
    def guides(self) -> dict[str, Guide]:
        """Guides by the parameters that ask for them.

        Raises:
            ApiError: 400, one of them is not valid.
        """
        guides: dict[str, Guide | None] = {
            "response_format": self.response_format.guide() if self.response_format is not None else None,
            "structured_outputs": self.structured_outputs.guide() if self.structured_outputs is not None else None,
        }
        for name in GUIDED:  # as vLLM called them before
            if (value := getattr(self, name)) is not None:
                part = StructuredOutputs.model_validate({name.removeprefix("guided_"): value})
                guides[name] = part.guide(name)
        return {name: guide for name, guide in guides.items() if guide is not None}

    @cached_property
    def guide(self) -> Guide | None:
        """Kind and text of the guide that answers must follow."""
        return next(iter(self.guides.values()), None)

    @property
    def guide_parameters(self) -> tuple[str, ...]:
        """The parameters that the guide is made of."""
        return tuple(self.guides)[:1]

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens of each place are asked for; 0 is the chosen ones alone, None nothing."""
        return None

    @property
    def callable_functions(self) -> list[dict[str, Any]]:
        """The functions of the tools that may be called."""
        return []

    @property
    def ends_with_a_call(self) -> bool:
        """Whether the first call of a tool ends the answer, which only the service sees."""
        return False

    def refuse_unsupported(self) -> None:
        """Refuse parameters that cannot be honoured.

        Raises:
            ApiError: 400, naming the parameter.
        """
        self._refuse_long_lists()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' requires stream=true.", param="stream_options")
        if self.best_of is not None and self.best_of != self.choices:
            raise unsupported("best_of", self.best_of, "No more answers are made than n; ask for n.")
        first, *others = self.guides or ("",)  # some clients ask in the words of several versions of vLLM at once
        if other := next((name for name in others if self.guides[name] != self.guides[first]), None):
            raise ApiError(400, f"'{other}' conflicts with {first}: give one of them.", param=other)
        refuse_unknown(self.model_extra or {}, UNSUPPORTED)

    def _refuse_long_lists(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise ApiError(400, f"'stop' takes up to {MAX_STOPS} strings.", param="stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in self.stops):
            raise ApiError(400, f"A string of 'stop' is longer than {MAX_STOP_LENGTH} characters.", param="stop")
        if len(self.stop_token_ids or ()) > MAX_STOPS:
            raise ApiError(400, f"'stop_token_ids' takes up to {MAX_STOPS} tokens.", param="stop_token_ids")
        if len(self.logit_bias or {}) > MAX_BIASES:
            raise ApiError(400, f"'logit_bias' takes up to {MAX_BIASES} tokens.", param="logit_bias")
        wrong = next((key for key in self.logit_bias or () if not TOKEN.fullmatch(key)), None)
        if wrong is not None:
            raise ApiError(400, f"'logit_bias' has the key '{wrong[:50]}', which is no token id.", param="logit_bias")


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | List[str] | List[int] | List[List[int]]
    echo: bool | None = None
    logprobs: int | bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens of each place are asked for."""
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)

    @property
    def scores_prompts(self) -> bool:
        """Whether the log probabilities of the prompts are asked for."""
        return bool(self.echo) and self.scores is not None

    def refuse_unsupported(self) -> None:
        """Refuse parameters that cannot be honoured; see `Sampling`."""
        super().refuse_unsupported()
        if self.scores is not None and not 0 <= self.scores <= MAX_LOGPROBS:
            raise unsupported("logprobs", self.logprobs, f"0 to {MAX_LOGPROBS} are.")
        if self.return_tokens_as_token_ids and self.scores is None:
            raise unsupported("return_tokens_as_token_ids", True, "It needs logprobs.")
        if not self.scores_prompts:
            if self.max_tokens == 0:
                raise ApiError(400, "'max_tokens' = 0 needs echo and logprobs; give 1 or more.", param="max_tokens")
            return
        for name, value, fits in (
            ("max_tokens", self.max_tokens, self.max_tokens in (0, 1)),
            ("temperature", self.temperature, self.temperature == 0 or self.max_tokens == 0),
            ("n", self.n, self.choices == 1),
            ("stream", self.stream, not self.stream),
            ("stop", self.stop, not self.stops),
            ("stop_token_ids", self.stop_token_ids, not self.stop_token_ids),
            ("min_tokens", self.min_tokens, not self.min_tokens),
            ("presence_penalty", self.presence_penalty, not self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty, not self.frequency_penalty),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty in (None, 1)),
            ("logit_bias", self.logit_bias, not self.logit_bias),
            *((name, guide[1], False) for name, guide in self.guides.items()),
        ):
            if not fits:
                raise unsupported(name, value, SCORED)

    def separate(self) -> list[str | list[int]]:
        """Return the prompts one by one; a flat list of tokens is one.

        Raises:
            ApiError: 400, there is none, or one has no tokens.
        """
        prompt: Any = self.prompt
        one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [prompt] if one else list(prompt)
        if not prompts or not all(prompts):
            raise ApiError(400, "'prompt' is empty; a prompt needs at least one token.", param="prompt")
        if any(not 0 <= token <= INT32_MAX for each in prompts if not isinstance(each, str) for token in each):
            raise ApiError(400, f"'prompt' has a token id that is not 0 to {INT32_MAX}.", param="prompt")
        return prompts


class Message(BaseModel):
    """One message; its `content` is text, or parts of text and, of a user, pictures."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: List[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def plain(self, *, sees: bool = False) -> dict[str, Any]:
        """Return the message for the chat template; one without content, as some clients send, has empty text.

        Args:
            sees: whether the model takes pictures; a message with some has parts, and each picture its `url`.
        """
        refuse_more("A message", self.model_extra or {}, "messages", type=("text", "message"))
        message: dict[str, Any] = {"role": self.role, "content": self._parts(sees)}
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message

    def _parts(self, sees: bool) -> str | list[dict[str, str]]:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        parts = list[dict[str, str]]()
        for part in self.content:
            kind = part.get("type")
            name = kind if kind == "refusal" and self.role == "assistant" else "text"
            if kind in (*TEXTS, name) and isinstance(part.get(name), str):
                refuse_more("A part of a message", part, "messages", type=(kind,), **{name: (part[name],)})
                parts.append({"type": "text", "text": part[name]})
            elif sees and kind in PICTURES and self.role == "user":
                parts.append({"type": "image", "url": _url(part)})
            elif kind in PICTURES and not sees:
                raise unsupported("messages", part, NO_PICTURES)
            else:
                kinds = "text, or image_url in a user's message" if sees else "text"
                raise unsupported("messages", part, f"Send {kinds}.")
        return parts if any("url" in part for part in parts) else "".join(part["text"] for part in parts)


TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text, of chats and of responses."""
PICTURES = ("image_url", "input_image")
"""Types of parts that are pictures, of chats and of responses."""
NO_PICTURES = (
    "Only text content is supported: this service takes no pictures. It takes those of a LLaVA on the CPU engine; on a"
    " GPU, tensorrt_llm_bls takes them over gRPC."
)


def _url(part: dict[str, Any]) -> str:
    """Return the URL of a picture; a chat has it in an object, a response beside its type."""
    image_url = part.get("image_url")
    entries = image_url if isinstance(image_url, dict) else {"url": image_url, "detail": part.get("detail") or "auto"}
    url = entries.get("url")
    if not isinstance(url, str):
        raise unsupported("messages", part, "A picture has its URL in image_url.")
    what = "A picture of a message"
    refuse_more(what, entries, "messages", url=(url,), detail=("auto", "low"))  # the model decides
    detail = () if isinstance(image_url, dict) else (entries["detail"],)
    refuse_more(what, part, "messages", type=PICTURES, image_url=(image_url,), detail=detail)
    return url


def refuse_more(what: str, entries: Mapping[str, Any], param: str, **allowed: tuple[object, ...]) -> None:
    """Refuse what would be ignored; clients that send an answer back send its empty fields, too.

    Raises:
        ApiError: 400, naming the entry.
    """
    for name, value in entries.items():
        if value not in allowed.get(name, (None, "", [], {})):
            raise ApiError(400, f"{what} has '{shortened(name)}' = {SHOWN_VALUE.repr(value)}, which is not supported"
                           " here. Leave it out.", param=param, code="unknown_parameter")  # fmt: skip


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, as chat templates expect; OpenAI sends JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "An entry of 'tool_calls' has no function with a name.", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        what = f"the arguments of a call of '{shortened(function['name'])}'"
        arguments = strict_json.parse(arguments, what, "messages")
    if not isinstance(arguments, dict):
        raise ApiError(400, f"The arguments of a call of '{shortened(function['name'])}' are no JSON object.",
                       param="messages")  # fmt: skip
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


class NamedFunction(StrictModel):
    """The function of a `tool_choice`."""

    name: str


class NamedTool(StrictModel):
    """A `tool_choice` that names the tool to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """`tool_choice.allowed_tools`: the tools that this answer may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedChoice(StrictModel):
    """A `tool_choice` that narrows the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: List[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _narrow(self) -> Self:
        """Take the tools that are allowed as all there are."""
        if isinstance(self.tool_choice, AllowedChoice):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            tools = [tool for tool in self.tools or () if _name(tool) in names]
            if missing := names - {_name(tool) for tool in tools}:
                raise unsupported("tool_choice", sorted(missing), "It is none of the tools.")
            self.tools, self.tool_choice = tools, allowed.mode
        return self

    @property
    def limit(self) -> int | None:
        """Maximum of output tokens; the newer parameter takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """How many likeliest tokens of each place are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may be calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def forced(self) -> tuple[str, ...]:
        """The tools of which the answer must call one."""
        return tuple(function["name"] for function in self.callable_functions) if self.must_call else ()

    @cached_property
    def guide(self) -> Guide | None:
        """Kind and text of the guide that answers must follow: a call of a tool, the wanted format, or one of both."""
        if self.must_call:
            call = call_schema(self.callable_functions, several=self.may_call_several)
            return "json_schema", json.dumps(call)
        answer = self.response_format.schema_ if self.response_format is not None else None
        if self.calls_tools and answer is not None:
            return "json_schema", json.dumps(call_or_answer(self.callable_functions, answer))
        return super().guide

    @property
    def guide_parameters(self) -> tuple[str, ...]:
        """The parameters that the guide is made of."""
        if self.must_call:
            return ("tools",)
        return ("tools", "response_format") if self.guides_calls else super().guide_parameters

    @property
    def guides_calls(self) -> bool:
        """Whether calls of tools are written as the guide has them, not as the model learned it."""
        return self.must_call or (self.calls_tools and self.guide is not None)

    @property
    def may_call_several(self) -> bool:
        """Whether a guided answer is a list of calls; without the client's word it is one."""
        return self.tool_choice == "required" and self.parallel_tool_calls is True

    @property
    def ends_with_a_call(self) -> bool:
        """Whether the first call of a tool ends the answer; a guided one ends there anyway."""
        return self.calls_tools and self.parallel_tool_calls is False and not self.guides_calls

    @property
    def callable_functions(self) -> list[dict[str, Any]]:
        """The functions of the tools that may be called."""
        functions = [tool["function"] for tool in self.tools or ()]
        if not isinstance(self.tool_choice, NamedTool):
            return functions
        return [function for function in functions if function["name"] == self.tool_choice.function.name]

    def refuse_unsupported(self) -> None:
        """Refuse parameters that cannot be honoured; see `Sampling`."""
        super().refuse_unsupported()
        if self.max_tokens == 0:
            raise ApiError(400, "'max_tokens' = 0 leaves nothing to answer.", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs logprobs=true.", param="top_logprobs")
        if self.continue_final_message:
            raise unsupported("continue_final_message", True, "Use /v1/completions with the text so far.")
        for tool in self.tools or ():
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not _is_named(function):
                raise unsupported("tools", tool, "A tool is of type function and has a function with a name.")
            if not isinstance(function.get("parameters") or {}, dict):
                raise unsupported("tools", tool, "The parameters of a function are a JSON schema.")
        if self.calls_tools and (others := [name for name in self.guides if name != "response_format"]):
            raise ApiError(400, f"'{others[0]}' conflicts with tools, unless tool_choice is none.", param=others[0])
        if self.must_call and not self.callable_functions:
            instead = "It is none of the tools." if self.tools else "It needs tools."
            raise unsupported("tool_choice", self.model_dump()["tool_choice"], instead)


def _name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _is_named(function: dict[str, Any]) -> bool:
    return isinstance(function.get("name"), str) and bool(function["name"])


class TokenizeRequest(StrictModel):
    """POST /tokenize: the tokens of a text, or of the prompt that messages become."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeRequest(StrictModel):
    """POST /detokenize: the text of tokens."""

    model: str | None = None
    tokens: List[TokenId]


TEXT_MODEL = "This server runs a text model."
LEAVE_OUT = "Leave it out."
UNSUPPORTED: Unsupported = {
    "suffix": ("Put everything into the prompt.", ("",)),
    "min_p": ("TensorRT-LLM's Triton backend has no such input; use top_p.", (0,)),
    "length_penalty": ("It belongs to beam search; ask Triton's own interface.", (1,)),
    "use_beam_search": ("Ask Triton's own interface for beams.", (False,)),
    "parallel_tool_calls": ("It needs the tools of a chat.", (True, False)),
    "functions": ("Use tools.", ([],)),
    "function_call": ("Use tool_choice.", ("none", "auto")),
    "modalities": (TEXT_MODEL, ([], ["text"])),
    "audio": (TEXT_MODEL, ()),
    "prediction": (LEAVE_OUT, ()),
    "reasoning_effort": ("It goes to the template of a chat; use /v1/chat/completions.", ("none",)),
    "verbosity": (LEAVE_OUT, ("medium",)),
    "moderation": ("No moderation runs here.", ()),
    "web_search_options": (LEAVE_OUT, ()),
    "prompt_logprobs": ("Use /v1/completions with echo and logprobs.", ()),
    "guided_decoding_backend": ("The server has one backend.", ("auto", "guidance")),  # llguidance, in vLLM's words
    "guided_whitespace_pattern": ('Put "x-guidance": {"whitespace_pattern": ...} into the schema (llguidance).', ()),
    "echo": ("Use /v1/completions.", (False,)),
}
