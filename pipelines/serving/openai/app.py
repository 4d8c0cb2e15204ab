"""The HTTP service: OpenAI's endpoints, Triton's generate endpoints, health and metrics."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from pipelines import __version__
from pipelines.domain.benchmark import NO_SLO, Slo
from pipelines.serving.openai.answers import Form, scored_response
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.bodies import REFUSAL_PAUSE_S, BodyLimit, Limits
from pipelines.serving.openai.channels import ChannelReader, Channels, HarmonyReader, ThinkReader
from pipelines.serving.openai.errors import CLIENT_CLOSED, ApiError, shortened
from pipelines.serving.openai.generate import Fields, answers, generate_events, only_answer
from pipelines.serving.openai.generation import Completion, Prompt, before, collect_all, too_slow
from pipelines.serving.openai.metrics import CONTENT_TYPE, AnswerClock, ServiceMetrics
from pipelines.serving.openai.pictures import fetched
from pipelines.serving.openai.prepare import Prepared, ServedModel, read_request, with_rows
from pipelines.serving.openai.reader import Reader
from pipelines.serving.openai.responses import ResponseForm, in_its_words
from pipelines.serving.openai.schema import ChatRequest, CompletionRequest
from pipelines.serving.openai.scoring import PromptScorer, Scoring, choice
from pipelines.serving.openai.tools import ToolForm

READ_HERE_BYTES = 16_384  # reading so much takes a few milliseconds; more is read by a process of its own
GUIDE = "guided_decoding_guide="
RENDERING = ("chat", "responses", "tokenize")
"""Ways that may render a chat template."""
Result = TypeVar("Result")
Read = Callable[[str, Request], Awaitable[Any]]
"""Reads and checks the request of one endpoint; see `prepare.read_request`."""


def make_app(
    load: Callable[[], ServedModel],
    backend: Backend,
    limits: Limits,
    cors_origins: Sequence[str] = (),
    slo: Slo = NO_SLO,
) -> FastAPI:
    """Build the service.

    Args:
        load: collects the facts of the repository, here and in the process that reads large bodies.
        backend: tritonserver.
        limits: of one request.
        cors_origins: of web pages that may use the service from a browser.
        slo: limits that the metrics show exactly how many answers meet.
    """
    served, reader = load(), Reader(load, limits)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with backend:
            reader.open()
            yield
            reader.close()

    app = FastAPI(title="OpenAI-compatible access", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.metrics = ServiceMetrics(served.repository.label, slo)
    app.add_middleware(BodyLimit, limits=limits, metrics=app.state.metrics)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])

    async def read(way: str, request: Request) -> Any:
        body = await request.body()
        if len(body) > READ_HERE_BYTES:
            return await _unless_client_leaves(request, reader.read(way, body))
        if way in RENDERING:  # the template is rendered by another process
            return await served.template.in_thread(lambda: read_request(way, body, served, limits))
        return read_request(way, body, served, limits)

    _add_error_handlers(app)
    _add_openai(app, served, backend, limits, read, reader)
    _add_tokens(app, served, limits, read, reader)
    _add_generate(app, served, backend, limits, read)
    _add_health(app, served, backend)
    return app


def _readable(app: FastAPI, path: str) -> Callable[[Any], Any]:
    """Answer GET, and HEAD with the same head; the HTTP library leaves the body out."""
    return app.api_route(path, methods=["GET", "HEAD"])


def _add_openai(
    app: FastAPI, served: ServedModel, backend: Backend, limits: Limits, read: Read, reader: Reader
) -> None:
    scorer = PromptScorer(backend, few=served.repository.few_log_probs)

    async def answer(way: Literal["completions", "chat", "responses"], request: Request) -> Response:
        started, deadline = perf_counter(), asyncio.get_running_loop().time() + limits.request_timeout_s
        _check_type(request)
        prepared: Prepared | Scoring = await read(way, request)
        if isinstance(prepared, Scoring):
            return await _scored(request, prepared, served, scorer, deadline)
        if any(prompt.pictures for prompt in prepared.prompts):
            seen = _in_time(deadline, _with_features(prepared, served, backend, reader, limits))
            prepared = await _unless_client_leaves(request, seen)
        clock = partial(AnswerClock, app.state.metrics, started)
        sampling, choices = prepared.sampling, _choices(prepared, served, clock)
        form = ResponseForm(prepared.responding) if prepared.responding else _form(way == "chat", prepared, served)
        with _guide_named(prepared):
            if sampling.stream:
                return await _streamed(request, form.events(choices, backend, sampling, deadline))
            await _unless_client_leaves(request, _in_time(deadline, collect_all(choices, backend, sampling)))
        return JSONResponse(form.whole(choices, sampling))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer("completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer("chat", request)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer("responses", request)

    @_readable(app, "/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(served)]}

    @_readable(app, "/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return _model(served)


def _add_tokens(app: FastAPI, served: ServedModel, limits: Limits, read: Read, reader: Reader) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        _check_type(request)
        prompt: Prompt = await read("tokenize", request)
        tokens = (await _pixels(prompt, reader, limits))[1] if prompt.pictures else prompt.tokens
        return {"count": len(tokens), "max_model_len": served.repository.max_seq_len, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        _check_type(request)
        tokens: tuple[int, ...] = await read("detokenize", request)
        return {"prompt": served.tokenizer.text(tokens)}


def _add_health(app: FastAPI, served: ServedModel, backend: Backend) -> None:
    @_readable(app, "/health")
    @_readable(app, "/v1/health/ready")
    @_readable(app, "/v2/health/ready")
    async def ready() -> Response:
        return Response(status_code=200 if await backend.ready() else 503)

    @_readable(app, "/v1/health/live")
    @_readable(app, "/v2/health/live")
    async def live() -> Response:
        return Response(status_code=200 if await backend.alive() else 503)

    @_readable(app, "/version")
    @_readable(app, "/v1/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    @_readable(app, "/v1/metadata")
    async def metadata() -> dict[str, Any]:
        return {"version": __version__, "modelInfo": [{"shortName": served.repository.label, "modelUrl": ""}]}

    @_readable(app, "/metrics")
    @_readable(app, "/v1/metrics")
    async def metrics() -> Response:
        triton = await asyncio.to_thread(_get, served.metrics_url)
        return PlainTextResponse(app.state.metrics.page(triton), media_type=CONTENT_TYPE)


def _add_generate(app: FastAPI, served: ServedModel, backend: Backend, limits: Limits, read: Read) -> None:
    """Add Triton's generate endpoints of the models that clients send text to."""

    async def responses_of(name: str, request: Request) -> AsyncIterator[dict[str, Any]]:
        if name not in served.fields:
            names = ", ".join(served.fields)
            raise ApiError(404, f"The model '{shortened(name)}' cannot be asked here; these can: {names}.")
        deadline = asyncio.get_running_loop().time() + limits.request_timeout_s
        fields: Fields = await read(f"generate/{name}", request)
        return before(deadline, answers(backend, name, fields))

    @app.post("/v2/models/{name}/generate")
    async def generate(name: str, request: Request) -> Response:
        responses = await responses_of(name, request)
        return JSONResponse(await _unless_client_leaves(request, only_answer(responses)))

    @app.post("/v2/models/{name}/generate_stream")
    async def generate_stream(name: str, request: Request) -> Response:
        return await _streamed(request, generate_events(await responses_of(name, request)))


async def _scored(
    request: Request, scoring: Scoring, served: ServedModel, scorer: PromptScorer, deadline: float
) -> Response:
    top, as_ids = scoring.request.scores or 0, bool(scoring.request.return_tokens_as_token_ids)
    new = scoring.request.max_tokens != 0
    scored = scorer.score(scoring.prompts, max(1, top), scoring.request.lora_task_id)
    scores = await _unless_client_leaves(request, _in_time(deadline, scored))
    choices = [
        choice(at, scoring.texts[at], each, served.tokenizer, with_best=top > 0, as_ids=as_ids, new=new)
        for at, each in enumerate(scores)
    ]
    prompt_tokens = sum(map(len, scoring.prompts))
    return JSONResponse(scored_response(scoring.request.model, choices, prompt_tokens, len(scores) if new else 0))


async def _with_features(
    prepared: Prepared, served: ServedModel, backend: Backend, reader: Reader, limits: Limits
) -> Prepared:
    """Fetch, decode and encode the pictures of a chat, which has one prompt."""
    try:
        pixels, tokens = await _pixels(prepared.prompts[0], reader, limits)
        prepared = with_rows(prepared, tokens, served)
    except ApiError as error:
        raise (in_its_words(error) if prepared.responding else error) from None
    (prompt,) = prepared.prompts
    return replace(prepared, prompts=(replace(prompt, features=await backend.features(pixels)),))


async def _pixels(prompt: Prompt, reader: Reader, limits: Limits) -> tuple[Any, tuple[int, ...]]:
    contents = [
        await asyncio.to_thread(fetched, each, number, limits.body_bytes) if isinstance(each, str) else each
        for number, each in enumerate(prompt.pictures, 1)
    ]
    return await reader.pixels(contents, prompt.tokens)


async def _in_time(deadline: float, work: Awaitable[Result]) -> Result:
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        raise too_slow() from None


async def _streamed(request: Request, stream: AsyncIterator[str]) -> Response:
    """Send events as they come; an error before the first one still gets its HTTP status."""
    first = await _unless_client_leaves(request, anext(stream, ""))

    async def body() -> AsyncIterator[str]:
        async with aclosing(stream):  # type: ignore[type-var]
            yield first
            try:
                async for event in stream:
                    yield event
            except ApiError as error:  # the last event has said so
                request.app.state.metrics.failed(error)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@contextmanager
def _guide_named(prepared: Prepared) -> Iterator[None]:
    """Name the parameter that asked for a guide where the engine refuses it."""
    try:
        yield
    except ApiError as error:
        if not error.message.startswith(GUIDE):
            raise
        param, *others = prepared.sampling.guide_parameters
        names = " with ".join(f"'{name}'" for name in (param, *others))
        named = ApiError(error.status, error.message.replace(GUIDE, f"{names} = ", 1), param=None if others else param)
        raise (in_its_words(named) if prepared.responding else named) from None


def _form(chat: bool, prepared: Prepared, served: ServedModel) -> Form:
    sampling = prepared.sampling
    completion = sampling if isinstance(sampling, CompletionRequest) else None
    return Form(
        chat,
        sampling.model,
        served.tokenizer,
        echo=completion is not None and bool(completion.echo),
        as_ids=completion is not None and bool(completion.return_tokens_as_token_ids),
        counts_reuse=served.repository.tokens_per_block is not None,
    )


def _choices(prepared: Prepared, served: ServedModel, clock: Callable[[], AnswerClock]) -> list[Completion]:
    sampling = prepared.sampling
    pairs = [(prompt, number) for prompt in prepared.prompts for number in range(sampling.choices)]
    skip = (
        served.repository.skips_special_tokens if sampling.skip_special_tokens is None else sampling.skip_special_tokens
    )
    reader = _reader(prepared, served, skip=skip)
    skip = skip and prepared.tools is not ToolForm.MISTRAL  # whose mark is a special token
    return [
        Completion(
            index,
            prompt,
            prepared.max_tokens,
            served,
            skip_special=skip,
            number=number,
            tools=prepared.tools,
            one_call=prepared.one_call,
            forced=prepared.forced,
            channels=reader and reader(prompt, skip),
            clock=clock(),
        )
        for index, (prompt, number) in enumerate(pairs)
    ]


def _reader(prepared: Prepared, served: ServedModel, *, skip: bool) -> Callable[[Prompt, bool], ChannelReader] | None:
    """Return what makes the reader of an answer's channels; None if the client gets the answer as it is written."""
    calls = prepared.tools is ToolForm.HARMONY
    if not isinstance(prepared.sampling, ChatRequest) or not (skip or calls):
        return None
    if served.channels is Channels.HARMONY:
        return lambda _, skip: HarmonyReader(served.tokenizer, calls=calls, skip_special=skip)
    if served.channels is None or prepared.sampling.guide is not None:  # which leaves no room for reasoning
        return None
    calls = prepared.tools is ToolForm.HERMES
    marks = served.channels.value
    return lambda prompt, skip: ThinkReader(served.tokenizer, marks, prompt=prompt.text, calls=calls, skip_special=skip)


def _check_type(request: Request) -> None:
    """Refuse what is not declared as JSON, which a web page could send from a browser without asking anyone.

    Raises:
        ApiError: 400, naming the type.
    """
    header = request.headers.get("content-type", "")
    kind = header.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"Content-Type is '{shortened(header)}'; it must be application/json.")


async def _unless_client_leaves(request: Request, work: Awaitable[Result]) -> Result:
    """Do the work, but cancel it if the client disconnects."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "The client disconnected.")
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


def _add_error_handlers(app: FastAPI) -> None:
    """Return every error in OpenAI's format, and in Triton's where the endpoint is Triton's."""

    async def response(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        app.state.metrics.failed(error)
        await asyncio.sleep(REFUSAL_PAUSE_S)
        if error.status in (429, 503):
            headers = {"Retry-After": "1"}
        body = {"error": error.message} if request.url.path.startswith("/v2/") else error.body()
        return JSONResponse(body, status_code=error.status, headers=dict(headers or {}))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return await response(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {shortened(request.url.path)}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{asked} is not answered: this path takes {(error.headers or {}).get('Allow', '')}."
        elif error.status_code == HTTPStatus.NOT_FOUND:
            message = f"{asked} is not answered. This service answers {_paths(app, request.method)}."
        else:
            message = f"{asked}: {error.detail}"
        return await response(request, ApiError(error.status_code, message), error.headers)


def _paths(app: FastAPI, method: str) -> str:
    routes = [route for route in app.routes if isinstance(route, Route)]
    taking = [route.path_format for route in routes if method in (route.methods or ())]
    return f"{method} {', '.join(dict.fromkeys(taking))}" if taking else "nothing"


def _model(served: ServedModel) -> dict[str, Any]:
    return {"id": served.repository.label, "object": "model", "created": served.created, "owned_by": "trtllm-pipelines"}


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return None
