"""Turn the body of a request into prompts that can be sent to the model, or into the error that names what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from pipelines.serving.openai.errors import ApiError, unsupported
from pipelines.serving.openai.fields import PROMPT, to_tensors
from pipelines.serving.openai.inputs import InputTensor
from pipelines.serving.openai.limits import Limits
from pipelines.serving.openai.schema import ChatRequest, CompletionRequest, Sampling
from pipelines.serving.openai.scoring import Scoring
from pipelines.serving.openai.served import ServedModel

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
Asked = TypeVar("Asked", bound=Sampling)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been read and checked.

    Attributes:
        asked: its parameters.
        prompts: texts for the model.
        max_tokens: most output tokens for each.
    """

    asked: Sampling
    prompts: tuple[str, ...]
    max_tokens: int

    @property
    def echo(self) -> bool:
        """Whether every answer begins with its prompt."""
        return isinstance(self.asked, CompletionRequest) and bool(self.asked.echo)


def read_request(way: str, body: bytes, model: ServedModel, limits: Limits) -> Prepared | Scoring | list[InputTensor]:
    """Read and check a request.

    Args:
        way: "completions", "chat", or "generate/" and the name of a Triton model.
        body: JSON.
        model: facts of the served model.
        limits: of one request.

    Returns:
        the request, or the tensors of a generate endpoint.

    Raises:
        ApiError: it is broken, too large, or asks for what is not supported.
    """
    given = _read_json(body)
    if way == "completions":
        return _completion(_validate(CompletionRequest, given), model, limits)
    if way == "chat":
        return _chat(_validate(ChatRequest, given), model, limits)
    return _generate(way.removeprefix("generate/"), given, model)


def _read_json(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object.

    Raises:
        ApiError: 400, it is not.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"There was an error parsing the body: {reason}.") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"The body is not a JSON object but of the type {type(given).__name__}.")
    return given


def _completion(asked: CompletionRequest, model: ServedModel, limits: Limits) -> Prepared | Scoring:
    model.check_name(asked.model)
    asked.refuse_unsupported()
    if asked.scores_prompts:
        return _scoring(asked, model, limits)
    prompts = tuple(asked.prompts())
    _check_count(len(prompts), asked, limits)
    for prompt in prompts:
        model.check_length(prompt, "prompt")
    return Prepared(asked, prompts, asked.max_tokens or DEFAULT_MAX_TOKENS)


def _scoring(asked: CompletionRequest, model: ServedModel, limits: Limits) -> Scoring:
    if model.tokens is None:
        raise unsupported("logprobs", asked.logprobs, "This repository has no tokenizer.json.")
    given = asked.separate()
    _check_count(len(given), asked, limits)
    for prompt in given:
        if isinstance(prompt, str):
            model.check_length(prompt, "prompt")
    prompts = tuple(asked.token_prompts(model.tokens))
    for tokens in prompts:
        model.check_tokens(len(tokens), "prompt")
    return Scoring(asked, prompts)


def _chat(asked: ChatRequest, model: ServedModel, limits: Limits) -> Prepared:
    model.check_name(asked.model)
    asked.refuse_unsupported()
    _check_count(1, asked, limits)
    prompt = model.template.render([message.plain() for message in asked.messages])
    model.check_length(prompt, "messages")
    return Prepared(asked, (prompt,), asked.limit or model.room_after(prompt))


def _generate(name: str, given: dict[str, Any], model: ServedModel) -> list[InputTensor]:
    prompt = given.get(PROMPT)
    if isinstance(prompt, str):
        model.check_length(prompt, PROMPT)
    return to_tensors(model.fields[name], given)


def _check_count(prompts: int, asked: Sampling, limits: Limits) -> None:
    answers = prompts * asked.choices
    if answers > limits.prompts:
        param = "prompt" if prompts > 1 else "n"
        message = (
            f"{prompts} prompts with n={asked.choices} are {answers} answers; one request may ask for up to "
            f"{limits.prompts}. Send several requests."
        )
        raise ApiError(400, message, param=param, code="too_many_prompts")


def _validate(kind: type[Asked], given: dict[str, Any]) -> Asked:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"] if not str(part)[:1].isupper()]
        message = f"{'.'.join(place) or 'The body'}: {first['msg']}."
        raise ApiError(400, message, param=place[0] if place else None) from None
