"""Turn the body of a request into prompts that can be sent to the model, or into the error that names what is wrong."""

import filecmp
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pipelines.checkpoint.pictures import BadPictureError, Pictures, decode
from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.serving.openai import strict_json
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.channels import Channels, channels_of
from pipelines.serving.openai.errors import SHOWN_VALUE, ApiError, shortened, unsupported
from pipelines.serving.openai.generate import (
    ID,
    PROMPT,
    Field,
    Fields,
    read_fields,
    request_id,
    to_tensors,
    with_parameters,
)
from pipelines.serving.openai.generation import Prompt
from pipelines.serving.openai.guides import left_out_by_xgrammar
from pipelines.serving.openai.inputs import ServedEngine
from pipelines.serving.openai.pictures import content_of, refused
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.responses import ResponseRequest, in_its_words
from pipelines.serving.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Sampling,
    TokenizeRequest,
)
from pipelines.serving.openai.scoring import Scoring
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.openai.tools import ToolForm
from pipelines.serving.repository import ENCODER_FOLDER, ENGINE_FOLDER, ModelRepository
from pipelines.settings.model import BUNDLED

# Facts of the served repository that responses depend on.

SHIPPED_TEMPLATE = BUNDLED / "chat_template.jinja"
"""Of the bundled models, whose folders have none: their content is in the keys of all that is made from them."""


@dataclass(frozen=True, slots=True)
class ServedModel(ServedEngine):
    """The served model.

    Attributes:
        created: time of the repository, seconds since 1970.
        fields: what its Triton models for clients take: model -> name of the input -> its type.
        pictures: how it takes pictures; None for a text model.
        channels: how answers to chats are written in channels; None if they are not.
    """

    template: ChatTemplate
    created: int
    metrics_url: str
    fields: Mapping[str, Mapping[str, Field]]
    pictures: Pictures | None = None
    channels: Channels | None = None

    def check_name(self, model: str) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: 404, as OpenAI does.
        """
        if model != self.repository.label:
            message = f"The model '{shortened(model)}' does not exist. This server has '{self.repository.label}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, prompt: str, param: str) -> None:
        """Refuse a prompt that is far too long, before anything tokenizes the whole of it.

        Raises:
            ApiError: 400, it has more tokens than the model takes.
        """
        limit = self.repository.longest_prompt
        if limit is not None and self.tokenizer.exceeds(prompt, limit):
            message = (
                f"'{param}' has {len(prompt):,} characters, which are more than {limit} tokens; the engine was built "
                f"with {'max_input_len' if self.repository.max_input_len else 'max_seq_len'}={limit}. Shorten it."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def check_tokens(self, count: int, param: str) -> None:
        """Refuse a prompt of too many tokens.

        Raises:
            ApiError: 400, it has more tokens than the model takes.
        """
        limit = self.repository.longest_prompt
        if limit is not None and count > limit:
            message = f"'{param}' has {count:,} tokens; this model takes {limit:,}."
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def room_after(self, prompt: int) -> int:
        """Return how many output tokens fit after the tokens of a chat's prompt.

        Raises:
            ApiError: 400, the prompt leaves no room, or the limit is unknown.
        """
        most = self.repository.max_seq_len
        if most is None:
            raise ApiError(400, "Give max_completion_tokens: this repository does not state the model's limit.",
                           param="max_completion_tokens")  # fmt: skip
        room = most - prompt
        if room < 1:
            message = f"The messages take {prompt} tokens; this model takes {most} in all."
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return room


def served(repository: ModelRepository, metrics_url: str, chat_template: Path | None = None) -> ServedModel:
    """Collect the facts of the repository that responses depend on."""
    tokenizer = ServedTokenizer(repository.tokenizer, adds_special=repository.adds_special_tokens)
    encoder, engine = repository.path / ENCODER_FOLDER, repository.path / ENGINE_FOLDER
    pictures = Pictures(encoder, engine, repository.max_images) if repository.max_images else None
    token = None if pictures is None else tokenizer.text([pictures.token])
    template = ChatTemplate.load(repository.tokenizer, chat_template or _shipped(repository.tokenizer), token)
    return ServedModel(
        tokenizer,
        repository,
        template,
        created=int(repository.path.stat().st_mtime),
        metrics_url=metrics_url,
        fields=read_fields(repository.path),
        pictures=pictures,
        channels=channels_of(template.source, tokenizer.token),
    )


def _shipped(tokenizer: Path) -> Path | None:
    """Return the template beside the bundled models, for a copy of one of their tokenizers without its own."""
    if "default" in chat_templates(tokenizer)[0]:
        return None
    own, tokenizers = tokenizer / "tokenizer.json", BUNDLED.glob("models/*/tokenizer.json")
    bundled = own.is_file() and any(filecmp.cmp(own, each, shallow=False) for each in tokenizers)
    return SHIPPED_TEMPLATE if bundled else None


DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
ALL_THAT_FITS = -1
"""Value of `truncate_prompt_tokens`, as vLLM has it."""
Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been read and checked.

    Attributes:
        max_tokens: most output tokens for each.
        tools: how the model writes calls of tools; None where an answer is none.
        one_call: whether an answer calls one tool at most.
        forced: the tools of which an answer must call one; empty where it may be text.
        responding: the request to /v1/responses that it stands for.
    """

    sampling: Sampling
    prompts: tuple[Prompt, ...]
    max_tokens: int
    tools: ToolForm | None = None
    one_call: bool = False
    forced: tuple[str, ...] = ()
    responding: ResponseRequest | None = None


Request = Prepared | Scoring | Prompt | tuple[int, ...] | Fields
"""What is read from a body: a request, prompts to score or to tokenize, tokens, fields of a generate endpoint."""


def read_request(way: str, body: bytes, model: ServedModel, limits: Limits) -> Request:
    """Read and check a request.

    Args:
        way: "completions", "chat", "responses", "tokenize", "detokenize", or "generate/" and a Triton model's name.
        body: JSON.
        model: facts of the served model.
        limits: of one request.

    Returns:
        the request, a prompt to tokenize, tokens to detokenize, or the fields of a generate endpoint.

    Raises:
        ApiError: it is broken, too large, or asks for what is not supported.
    """
    content = strict_json.parse(body)
    if not isinstance(content, dict):
        raise ApiError(400, f"The body is not a JSON object but of the type {type(content).__name__}.")
    if way == "completions":
        return _completion(_validate(CompletionRequest, content), model, limits)
    if way == "chat":
        return _chat(_validate(ChatRequest, content), model, limits)
    if way == "responses":
        responding = _validate(ResponseRequest, content)
        chat_body = responding.as_chat()  # its errors are in the request's own words
        try:
            chat = _chat(_validate(ChatRequest, chat_body), model, limits)
        except ApiError as error:
            raise in_its_words(error) from None
        return replace(chat, responding=responding)
    if way == "tokenize":
        return _tokens(_validate(TokenizeRequest, content), model, limits)
    if way == "detokenize":
        return _known(_validate(DetokenizeRequest, content), model)
    return _generate(way.removeprefix("generate/"), content, model)


def prepared_pictures(
    contents: Sequence[bytes], tokens: Sequence[int], model: ServedModel
) -> tuple[Any, tuple[int, ...]]:
    """Decode files of pictures.

    Returns:
        their tiles as the encoder takes them, float16 [tiles, 3, side, side], and the prompt with rows of features.

    Raises:
        ApiError: 400, one cannot be used, or the prompt becomes too long.
    """
    assert model.pictures is not None  # or the request would have been refused
    images = []
    for number, content in enumerate(contents, 1):
        try:
            images.append(decode(content))
        except BadPictureError as error:
            raise refused(f"Picture {number} {error}") from None
    placed = model.pictures.places(tokens, [(image.shape[0], image.shape[1]) for image in images])
    model.check_tokens(len(placed), "messages")
    return model.pictures.prepare(images), tuple(placed)


def with_rows(prepared: Prepared, tokens: tuple[int, ...], model: ServedModel) -> Prepared:
    """Return a chat whose prompt has rows of features in the places of its pictures.

    Raises:
        ApiError: 400, they leave no room for an answer.
    """
    (prompt,), request = prepared.prompts, prepared.sampling
    assert isinstance(request, ChatRequest)  # nothing else has pictures
    most = request.limit or model.room_after(len(tokens))
    _check_least(request, most)
    return replace(prepared, prompts=(replace(prompt, tokens=tokens, pictures=()),), max_tokens=most)


def _completion(request: CompletionRequest, model: ServedModel, limits: Limits) -> Prepared | Scoring:
    model.check_name(request.model)
    request.refuse_unsupported()
    _check_guide(request, model)
    inputs = request.separate()
    _check_count(len(inputs), request, model, limits)
    prompts = tuple(_prompt(each, request, model, "prompt") for each in inputs)
    if request.scores_prompts:
        return Scoring(request, tuple(each.tokens for each in prompts), tuple(each.text for each in prompts))
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    _check_least(request, most)
    return Prepared(request, prompts, most)


def _prompt(
    prompt: str | list[int], sampling: Sampling, model: ServedModel, param: str, pictures: tuple[bytes | str, ...] = ()
) -> Prompt:
    """Tokenize a prompt that was given as text, and refuse one that is too long."""
    if pictures and sampling.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", sampling.truncate_prompt_tokens, "It would cut pictures.")
    if isinstance(prompt, str):
        if sampling.truncate_prompt_tokens is None:
            model.check_length(prompt, param)
        tokens = model.tokenizer.ids(prompt, special=sampling.add_special_tokens)
        fixed = len(tokens) - len(model.tokenizer.ids(prompt, special=False)) if sampling.truncate_prompt_tokens else 0
    else:
        tokens, fixed = prompt, 0
    tokens = _truncated(tokens, fixed, sampling.truncate_prompt_tokens, model)
    if not tokens:
        raise ApiError(400, f"'{param}' has no tokens.", param=param)
    _check_places(tokens, len(pictures), model, param)
    model.check_tokens(len(tokens), param)
    text = prompt if isinstance(prompt, str) else model.tokenizer.text(tokens, skip_special=True)
    return Prompt(tuple(tokens), text, pictures)


def _check_places(tokens: list[int], pictures: int, model: ServedModel, param: str) -> None:
    try:
        if model.pictures is not None:
            model.pictures.check_places(tokens, pictures)
    except BadPictureError as error:
        raise refused(str(error), param) from None


def _rendered(
    messages: list[Message], values: Mapping[str, Any], model: ServedModel, limits: Limits
) -> tuple[str, tuple[bytes | str, ...]]:
    plain = [message.plain(sees=model.pictures is not None) for message in messages]
    parts = [part for message in plain if isinstance(message["content"], list) for part in message["content"]]
    urls = [part.pop("url") for part in parts if "url" in part]
    if urls and model.pictures is not None:
        try:
            model.pictures.check_count(len(urls))
        except BadPictureError as error:
            raise refused(str(error)) from None
    pictures = tuple(content_of(url, number, limits.image_hosts) for number, url in enumerate(urls, 1))
    return model.template.render(plain, values), pictures


def _truncated(tokens: list[int], fixed: int, most: int | None, model: ServedModel) -> list[int]:
    """Keep the last tokens of a prompt, and the special ones that the tokenizer puts in front."""
    if most == ALL_THAT_FITS:
        most = model.repository.longest_prompt
    if most is None or len(tokens) <= most:
        return tokens
    if most <= fixed:
        raise ApiError(400, f"'truncate_prompt_tokens' = {most} leaves nothing of the prompt.",
                       param="truncate_prompt_tokens")  # fmt: skip
    return [*tokens[:fixed], *tokens[len(tokens) - (most - fixed) :]]


def _chat(request: ChatRequest, model: ServedModel, limits: Limits) -> Prepared:
    model.check_name(request.model)
    request.refuse_unsupported()
    _check_guide(request, model)
    _check_count(1, request, model, limits)
    tools = model.template.tools if request.calls_tools else None
    if tools is ToolForm.HARMONY and model.channels is not Channels.HARMONY:
        tools = ToolForm.JSON
    if request.calls_tools and tools is None:
        raise unsupported("tools", [tool["function"]["name"] for tool in request.tools or ()],
                          "The chat template of this model knows no tools.")  # fmt: skip
    if request.guides_calls:
        tools = ToolForm.GUIDED_LIST if request.may_call_several else ToolForm.GUIDED
    values: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        values["reasoning_effort"] = request.reasoning_effort
    if request.tools and tools is not None:
        values["tools"] = request.tools
    if request.add_generation_prompt is not None:
        values["add_generation_prompt"] = request.add_generation_prompt
    text, pictures = _rendered(request.messages, values, model, limits)
    prompt = _prompt(text, request, model, "messages", pictures)
    most = request.limit or model.room_after(len(prompt.tokens))
    _check_least(request, most)
    one_call, forced = request.parallel_tool_calls is False, request.forced
    return Prepared(request, (prompt,), most, tools, one_call=one_call, forced=forced)


def _check_least(sampling: Sampling, most: int) -> None:
    if sampling.min_tokens is not None and sampling.min_tokens > most:
        message = f"'min_tokens' = {sampling.min_tokens} is more than the {most} tokens that the answer may have."
        raise ApiError(400, message, param="min_tokens")


def _check_guide(sampling: Sampling, model: ServedModel) -> None:
    if sampling.guide is None:
        return
    if not model.repository.guided:
        instead = "This server was started without guided decoding; on the CPU, guided=llguidance adds it."
        if isinstance(sampling, ChatRequest) and sampling.must_call:
            raise unsupported("tool_choice", sampling.model_dump()["tool_choice"], instead)
        name = next(iter(sampling.guides))
        raise unsupported(name, getattr(sampling.response_format, "type", sampling.guides[name][1]), instead)
    kind, text = sampling.guide
    if kind != "json_schema" or model.repository.guided != "xgrammar":
        return
    schema, names = json.loads(text), sampling.guide_parameters
    whose, param = " with ".join(f"'{name}'" for name in names), names[0] if len(names) == 1 else None
    if len(names) > 1 and "allOf" in schema["anyOf"][-1]:  # what tells an open answer from a call
        message = f'{whose} needs a format with "additionalProperties": false where xgrammar guides answers.'
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    if (word := left_out_by_xgrammar(schema)) is not None:
        message = f"The schema of {whose} has {word}, which xgrammar leaves out: answers may not keep to it."
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _tokens(request: TokenizeRequest, model: ServedModel, limits: Limits) -> Prompt:
    if request.model is not None:
        model.check_name(request.model)
    pictures: tuple[bytes | str, ...] = ()
    if request.messages is None:
        assert request.prompt is not None  # one of the two is
        text, special = request.prompt, request.add_special_tokens is not False
    else:
        prompted = request.add_generation_prompt is not False
        values = {"add_generation_prompt": prompted, **(request.chat_template_kwargs or {})}
        text, pictures = _rendered(request.messages, values, model, limits)
        special = None
    tokens = model.tokenizer.ids(text, special=special)
    _check_places(tokens, len(pictures), model, "messages")
    return Prompt(tuple(tokens), text, pictures)


def _known(request: DetokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    if request.model is not None:
        model.check_name(request.model)
    size = model.tokenizer.size
    beyond = next((token for token in request.tokens if token >= size), None)
    if beyond is not None:
        message = f"'tokens' has token {beyond}; the tokenizer's vocabulary ends at {size - 1}."
        raise ApiError(400, message, param="tokens")
    return tuple(request.tokens)


def _generate(name: str, content: dict[str, Any], model: ServedModel) -> Fields:
    own = request_id(content)
    content = with_parameters({name: value for name, value in content.items() if name != ID})
    prompt = content.get(PROMPT)
    if prompt is None:
        raise ApiError(400, f"'{PROMPT}' is missing: the text of the prompt.", param=PROMPT)
    if isinstance(prompt, str):
        model.check_length(prompt, PROMPT)
    return Fields(to_tensors(model.fields[name], content), own)


def _check_count(prompts: int, sampling: Sampling, model: ServedModel, limits: Limits) -> None:
    answers, most, room = prompts * sampling.choices, limits.prompts, model.repository.most_at_once
    if room is not None and not (isinstance(sampling, CompletionRequest) and sampling.scores_prompts):
        most = min(most, room)  # scored prompts come one after the other
    if answers > most:
        param = "prompt" if prompts > 1 else "n"
        message = (
            f"{prompts} prompts with n={sampling.choices} are {answers} answers; one request may ask for up to "
            f"{most}. Send several requests."
        )
        raise ApiError(400, message, param=param, code="too_many_prompts")


def _validate(kind: type[Parsed], content: dict[str, Any]) -> Parsed:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        faults = [(_place(item["loc"]), item) for item in error.errors(include_url=False, include_context=False)]
        # a value that may be of several kinds has a fault for each; the deepest is of the kind that it is
        place, first = max(
            ((at, item) for at, item in faults if at[:1] == faults[0][0][:1]), key=lambda one: len(one[0])
        )
        wanted = dict.fromkeys(A_DICTIONARY.sub("an object", item["msg"]) for at, item in faults if at == place)
        message = " or ".join(wanted).replace(f" or {WANTED}", " or ")
        given = f", not {SHOWN_VALUE.repr(first['input'])}" if message.startswith(WANTED) else ""
        raise ApiError(400, f"{'.'.join(place) or 'The body'}: {message}{given}.",
                       param=place[0] if place else None) from None  # fmt: skip


WANTED = "Input should be "
A_DICTIONARY = re.compile(r"a valid dictionary( or instance of \w+)?")
A_KIND = re.compile(r"[A-Z].*|.*\[.*|str|int|bool|dict")
"""Part of pydantic's path that is no field of the request but one of the kinds that a value may be of."""


def _place(path: Iterable[object]) -> list[str]:
    return [str(part) for part in path if not A_KIND.fullmatch(str(part))]
