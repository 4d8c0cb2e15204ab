"""The HTTP service: OpenAI's endpoints, Triton's generate endpoints, health and metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from pipelines.serving.openai.answers import Form, events, scored_response
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.bodies import BodyGuard
from pipelines.serving.openai.errors import ApiError, shortened
from pipelines.serving.openai.generate import answers, generate_events, only_answer
from pipelines.serving.openai.generation import Choice, before, collect_all, too_slow
from pipelines.serving.openai.inputs import InputTensor
from pipelines.serving.openai.limits import REFUSAL_PAUSE_S, Limits
from pipelines.serving.openai.prepare import Prepared, read_request
from pipelines.serving.openai.reader import Reader
from pipelines.serving.openai.schema import Sampling
from pipelines.serving.openai.scoring import PromptScorer, Scoring, choice
from pipelines.serving.openai.served import ServedModel

READ_HERE_BYTES = 16_384  # reading so much takes a few milliseconds; more is read by a process of its own
CLIENT_CLOSED = 499
Result = TypeVar("Result")
Read = Callable[[str, Request], Awaitable[Any]]
"""Reads and checks the request of one endpoint; see `prepare.read_request`."""


def make_app(
    served: ServedModel, backend: Backend, limits: Limits | None = None, reader_options: Sequence[str] = ()
) -> FastAPI:
    """Build the service.

    Args:
        served: facts of the repository.
        backend: tritonserver.
        limits: of one request; None means the usual ones.
        reader_options: how to start the process that reads large bodies.
    """
    limits = limits or Limits()
    reader = Reader(reader_options)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        backend.open()
        yield
        await reader.close()
        await backend.close()

    app = FastAPI(title="OpenAI-compatible access", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(BodyGuard, limits=limits)

    async def read(way: str, request: Request) -> Any:
        body = await request.body()
        if len(body) <= READ_HERE_BYTES and way == "chat":  # its template is rendered by another process
            return await served.template.in_thread(lambda: read_request(way, body, served, limits))
        if len(body) <= READ_HERE_BYTES:
            return read_request(way, body, served, limits)
        return await _unless_client_leaves(request, reader.read(way, body))

    _add_error_handlers(app)
    _add_openai(app, served, backend, limits, read)
    _add_generate(app, served, backend, limits, read)
    _add_health(app, served, backend)
    return app


def _add_openai(app: FastAPI, served: ServedModel, backend: Backend, limits: Limits, read: Read) -> None:
    """Add OpenAI's endpoints."""
    scorer = PromptScorer(backend)

    async def answer(way: Literal["completions", "chat"], request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + limits.request_timeout_s
        _check_type(request)
        prepared: Prepared | Scoring = await read(way, request)
        if isinstance(prepared, Scoring):
            return await _scored(request, prepared, served, scorer, deadline)
        form = Form(way == "chat", prepared.asked.model, prepared.echo)
        return await _answer(request, form, _choices(prepared, served), backend, prepared.asked, deadline)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer("completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer("chat", request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return _model(served)


def _add_health(app: FastAPI, served: ServedModel, backend: Backend) -> None:
    """Add what load balancers and Prometheus ask for."""

    @app.get("/health")
    @app.get("/v2/health/ready")
    async def ready() -> Response:
        return Response(status_code=200 if await backend.ready() else 503)

    @app.get("/v2/health/live")
    async def live() -> Response:
        return Response(status_code=200 if await backend.alive() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            text = await asyncio.to_thread(_read, served.metrics_url)
        except OSError as error:
            raise ApiError(503, f"The metrics cannot be read: {error}", kind="server_error") from None
        return PlainTextResponse(text)


def _add_generate(app: FastAPI, served: ServedModel, backend: Backend, limits: Limits, read: Read) -> None:
    """Add Triton's generate endpoints of the models that clients send text to."""

    async def responses_of(name: str, request: Request) -> AsyncIterator[dict[str, Any]]:
        if name not in served.fields:
            known = ", ".join(served.fields)
            raise ApiError(404, f"The model '{shortened(name)}' cannot be asked here; these can: {known}.")
        deadline = asyncio.get_running_loop().time() + limits.request_timeout_s
        inputs: list[InputTensor] = await read(f"generate/{name}", request)
        return before(deadline, answers(backend, name, inputs))

    @app.post("/v2/models/{name}/generate")
    async def generate(name: str, request: Request) -> Response:
        responses = await responses_of(name, request)
        return JSONResponse(await _unless_client_leaves(request, only_answer(responses)))

    @app.post("/v2/models/{name}/generate_stream")
    async def generate_stream(name: str, request: Request) -> Response:
        return await _streamed(request, generate_events(await responses_of(name, request)))


async def _scored(
    request: Request, asked: Scoring, served: ServedModel, scorer: PromptScorer, deadline: float
) -> Response:
    """Answer with the log probabilities of the prompts."""
    assert served.tokens is not None  # checked when the request was read
    top, as_ids = int(asked.asked.logprobs or 0), bool(asked.asked.return_tokens_as_token_ids)
    found = await _unless_client_leaves(request, _in_time(deadline, scorer.score(asked.prompts, max(1, top))))
    choices = [choice(at, each, served.tokens, with_best=top > 0, as_ids=as_ids) for at, each in enumerate(found)]
    return JSONResponse(scored_response(asked.asked.model, choices, sum(map(len, asked.prompts))))


async def _answer(
    request: Request, form: Form, choices: list[Choice], backend: Backend, asked: Sampling, deadline: float
) -> Response:
    """Stream the response, or wait for all of it; either way, a client that disconnects cancels its requests."""
    if asked.stream:
        return await _streamed(request, events(form, choices, backend, asked, deadline))
    await _unless_client_leaves(request, _in_time(deadline, collect_all(choices, backend, asked)))
    return JSONResponse(form.whole(choices))


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
            async for event in stream:
                yield event

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _choices(prepared: Prepared, served: ServedModel) -> list[Choice]:
    pairs = [(prompt, number) for prompt in prepared.prompts for number in range(prepared.asked.choices)]
    return [
        Choice(index, prompt, prepared.max_tokens, served.max_seq_len, number, served.draws_anew)
        for index, (prompt, number) in enumerate(pairs)
    ]


def _check_type(request: Request) -> None:
    """Refuse what is not declared as JSON, which a web page could send from a browser without asking anyone.

    Raises:
        ApiError: 400, naming the type.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"Content-Type is '{shortened(given)}'; it must be application/json.")


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

    async def response(request: Request, error: ApiError) -> Response:
        await asyncio.sleep(REFUSAL_PAUSE_S)
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        body = {"error": error.message} if request.url.path.startswith("/v2/") else error.body()
        return JSONResponse(body, status_code=error.status, headers=headers)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return await response(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await response(request, ApiError(error.status_code, message))


def _model(served: ServedModel) -> dict[str, Any]:
    return {"id": served.label, "object": "model", "created": served.created, "owned_by": "trtllm-pipelines"}


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
