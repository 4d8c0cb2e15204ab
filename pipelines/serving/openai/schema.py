"""Request schema. Unknown parameters, and known ones that cannot be honoured, are refused; none is ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pipelines.serving.openai.errors import ApiError, shortened, unsupported
from pipelines.serving.openai.limits import TokenCounter

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_LOGPROBS = 20
"""Likeliest tokens of each place of a prompt; vLLM's default for `--max-logprobs`."""
MAX_STOP_LENGTH = 1000
# Metadata that does not change the response.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first fault is reported: a megabyte of faults would take seconds."""


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(BaseModel):
    """Parameters shared by both endpoints."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | List[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def refuse_unsupported(self) -> None:
        """Refuse parameters that cannot be honoured.

        Raises:
            ApiError: 400, naming the parameter.
        """
        if len(self.stops) > MAX_STOPS or "" in self.stops:
            raise ApiError(400, f"'stop' takes up to {MAX_STOPS} non-empty strings.", param="stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in self.stops):
            raise ApiError(400, f"A string of 'stop' is longer than {MAX_STOP_LENGTH} characters.", param="stop")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' requires stream=true.", param="stream_options")
        self._refuse_broken_text()
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT or _says_nothing(value):
                continue
            instead = UNSUPPORTED.get(name)
            if instead is None:
                raise ApiError(
                    400, f"Unknown parameter: '{shortened(name)}'.", param=shortened(name), code="unknown_parameter"
                )
            raise unsupported(name, value, instead)

    def _refuse_broken_text(self) -> None:
        """Refuse half of a surrogate pair, which JSON can spell but which is not a character and has no UTF-8."""
        try:
            json.dumps(self.model_dump(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            broken = ascii(error.object[error.start])
            raise ApiError(
                400, f"The request contains {broken}, half of a surrogate pair: text must be valid Unicode."
            ) from None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | List[str] | List[int] | List[List[int]]
    echo: bool | None = None
    logprobs: bool | int | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def scores_prompts(self) -> bool:
        """Whether the log probabilities of the prompts are asked for."""
        return bool(self.echo) and self.logprobs is not None and self.logprobs is not False

    def refuse_unsupported(self) -> None:
        """Refuse parameters that cannot be honoured; see `Sampling`."""
        super().refuse_unsupported()
        if self.return_tokens_as_token_ids and not self.scores_prompts:
            raise unsupported("return_tokens_as_token_ids", True, "It goes with echo and logprobs.")
        if self.logprobs is None or self.logprobs is False:
            return
        if not self.echo or not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise unsupported(
                "logprobs", self.logprobs, f"{UNSUPPORTED['logprobs']} With echo=true, 0 to {MAX_LOGPROBS} are."
            )
        for name, given, fits in (
            ("max_tokens", self.max_tokens, self.max_tokens == 1),
            ("temperature", self.temperature, self.temperature == 0),
            ("n", self.n, self.choices == 1),
            ("stream", self.stream, not self.stream),
            ("stop", self.stop, not self.stops),
            ("presence_penalty", self.presence_penalty, not self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty, not self.frequency_penalty),
        ):
            if not fits:
                raise unsupported(name, given, "With echo and logprobs, the prompt is scored and one token is added:"
                                  " give max_tokens=1, temperature=0 and no n, stream, stop or penalties.")  # fmt: skip

    def separate(self) -> list[str | list[int]]:
        """Return the prompts one by one; a flat list of tokens is one."""
        given: Any = self.prompt
        one = isinstance(given, str) or (given and isinstance(given[0], int))
        return [given] if one else list(given)

    def token_prompts(self, tokens: TokenCounter) -> list[tuple[int, ...]]:
        """Return the prompts as tokens.

        Raises:
            ApiError: 400, there is none, or it has no tokens or impossible ones.
        """
        found = [tuple(tokens.ids(each) if isinstance(each, str) else each) for each in self.separate()]
        if not found or not all(found):
            raise ApiError(400, "'prompt' has no tokens.", param="prompt")
        if any(not 0 <= token <= INT32_MAX for prompt in found for token in prompt):
            raise ApiError(400, f"'prompt' has a token id that is not 0 to {INT32_MAX}.", param="prompt")
        return found

    def prompts(self) -> list[str]:
        """Return the prompts as text.

        Raises:
            ApiError: 400, there is none, or it is given as tokens.
        """
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not given or not all(isinstance(prompt, str) for prompt in given):
            raise unsupported("prompt", self.prompt, "Give text, or a list of texts; the server tokenizes them.")
        return [str(prompt) for prompt in given]


class Message(BaseModel):
    """One message; `content` parts of type text only."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | List[dict[str, Any]]

    def plain(self) -> dict[str, str]:
        """Return the message for the chat template."""
        return {"role": self.role, "content": self._text()}

    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise unsupported("messages", part, "Only text content is supported.")
        return "".join(part["text"] for part in self.content)


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None

    @property
    def limit(self) -> int | None:
        """Maximum of output tokens; the newer parameter takes precedence."""
        return self.max_completion_tokens or self.max_tokens


PLAIN_TEXT_ONLY = "Only plain text is supported."
UNSUPPORTED = {
    "logprobs": "Use the Triton interface with return_log_probs.",
    "top_logprobs": "Use the Triton interface with return_log_probs.",
    "best_of": "Use n.",
    "suffix": "Put everything into the prompt.",
    "logit_bias": "Use the Triton interface with embedding_bias_words.",
    "response_format": PLAIN_TEXT_ONLY,
    "tools": PLAIN_TEXT_ONLY,
    "tool_choice": PLAIN_TEXT_ONLY,
    "parallel_tool_calls": PLAIN_TEXT_ONLY,
    "functions": PLAIN_TEXT_ONLY,
    "function_call": PLAIN_TEXT_ONLY,
    "modalities": PLAIN_TEXT_ONLY,
    "audio": PLAIN_TEXT_ONLY,
    "prediction": "Leave it out.",
    "reasoning_effort": "Leave it out.",
    "verbosity": "Leave it out.",
    "web_search_options": "Leave it out.",
}


def _says_nothing(value: object) -> bool:
    """Return whether a value equals the default behaviour; logprobs=0 does not, it requests the chosen tokens' own."""
    return value is None or value is False or value in ({}, [], "none", ["text"], {"type": "text"})
