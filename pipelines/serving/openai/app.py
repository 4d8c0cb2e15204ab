"""The HTTP service: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from pipelines.serving.openai.answers import Form, events
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.generation import Choice, collect_all
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.schema import ChatRequest, CompletionRequest, Sampling

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it
CLIENT_CLOSED = 499
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model.

    Attributes:
        label: the model's name for clients.
        created: time of the repository, seconds since 1970.
        max_seq_len: maximum of prompt and output tokens; None if the repository does not state it.
        template: the model's chat template.
        count_tokens: counts the tokens of a prompt; None without a tokenizer.
        metrics_url: tritonserver's metrics.
    """

    label: str
    created: int
    max_seq_len: int | None
    template: ChatTemplate
    count_tokens: Callable[[str], int] | None
    metrics_url: str

    def check_name(self, model: str) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: 404, as OpenAI does.
        """
        if model != self.label:
            message = f"The model '{model}' does not exist. This server has '{self.label}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def room_after(self, prompt: str) -> int:
        """Return how many output tokens fit after a prompt.

        Raises:
            ApiError: 400, the prompt leaves no room, or the limit is unknown.
        """
        if self.max_seq_len is None or self.count_tokens is None:
            raise ApiError(400, "Give max_completion_tokens: this repository does not state the model's limit.",
                           param="max_completion_tokens")  # fmt: skip
        room = self.max_seq_len - self.count_tokens(prompt)
        if room < 1:
            message = f"The messages take {self.max_seq_len - room} tokens; this model takes {self.max_seq_len} in all."
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return room


def make_app(served: ServedModel, backend: Backend) -> FastAPI:
    """Build the service."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        backend.open()
        yield
        await backend.close()

    app = FastAPI(title="OpenAI-compatible access", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_error_handlers(app)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        served.check_name(asked.model)
        asked.refuse_unsupported()
        limit = asked.max_tokens or DEFAULT_MAX_TOKENS
        pairs = [(prompt, number) for prompt in asked.prompts() for number in range(asked.choices)]
        choices = [
            Choice(index, prompt, limit, served.max_seq_len, number) for index, (prompt, number) in enumerate(pairs)
        ]
        return await _answer(request, Form(False, asked.model, bool(asked.echo)), choices, backend, asked)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        served.check_name(asked.model)
        asked.refuse_unsupported()
        said = [message.plain() for message in asked.messages]
        prompt = await served.template.in_thread(lambda: served.template.render(said))
        limit = asked.limit or served.room_after(prompt)
        choices = [Choice(number, prompt, limit, served.max_seq_len, number) for number in range(asked.choices)]
        return await _answer(request, Form(True, asked.model), choices, backend, asked)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return _model(served)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await backend.ready() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            text = await asyncio.to_thread(_read, served.metrics_url)
        except OSError as error:
            raise ApiError(503, f"The metrics cannot be read: {error}", kind="server_error") from None
        return PlainTextResponse(text)

    return app


async def _answer(request: Request, form: Form, choices: list[Choice], backend: Backend, asked: Sampling) -> Response:
    """Stream the response, or wait for all of it; either way, a client that disconnects cancels its requests."""
    if not asked.stream:
        await _unless_client_leaves(request, collect_all(choices, backend, asked))
        return JSONResponse(form.whole(choices))
    stream = events(form, choices, backend, asked)
    first = await _unless_client_leaves(request, anext(stream))  # an error up to here still gets its HTTP status

    async def body() -> AsyncIterator[str]:
        try:
            yield first
            async for event in stream:
                yield event
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


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
    """Return every error in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body" and not str(part)[:1].isupper()]
        message = f"{'.'.join(place) or 'The body'}: {first['msg']}."
        return JSONResponse(ApiError(400, message, param=place[0] if place else None).body(), status_code=400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, message).body(), status_code=error.status_code)


def _model(served: ServedModel) -> dict[str, Any]:
    return {"id": served.label, "object": "model", "created": served.created, "owned_by": "trtllm-pipelines"}


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
