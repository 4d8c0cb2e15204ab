"""Limits on requests, each and all together, checked before a body is parsed."""

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.serving.openai.errors import ApiError, shortened
from pipelines.serving.openai.metrics import ServiceMetrics

REFUSAL_PAUSE_S = 0.03
"""A refusal waits so long, so that whoever sends bad requests in a loop leaves most of the time to the others."""
BODY_TIMEOUT_S = 30.0
BODIES_HELD = 16  # of the largest size, over all requests that are being answered
LINGER_S = 2.0
KEYLESS = re.compile(r"/health|(/v[12])?/health/(live|ready)|(/v1)?/(metrics|version)")
"""Paths of probes and of Prometheus, which send no key."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    Attributes:
        prompts: answers it may ask for: prompts times n.
        request_timeout_s: time from its arrival to its last token.
        api_key: that it must send; None asks for none.
        image_hosts: servers that its pictures may be fetched from.
    """

    body_bytes: int = 4_000_000
    prompts: int = 128
    request_timeout_s: float = 600
    api_key: str | None = field(default=None, repr=False)
    image_hosts: tuple[str, ...] = ()


class BodyLimit:
    """ASGI middleware that hands the application whole bodies only, and counts requests by their status.

    A body that is too long, too slow or one too many is refused here. Bytes held count against a common bound, so that
    many clients together cannot fill the memory either; a client that sends slowly holds only what it has sent.
    """

    def __init__(self, app: App, *, limits: Limits, metrics: ServiceMetrics) -> None:
        self._app, self._metrics = app, metrics
        self._most = limits.body_bytes
        self._key = None if limits.api_key is None else limits.api_key.encode()
        self._answer_timeout_s = limits.request_timeout_s + LINGER_S
        self._held = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, refusal, whole, counts = bytearray(), None, False, False

        def counted(message: Message) -> Awaitable[None]:  # no coroutine of its own, which would cost each token time
            nonlocal counts
            if not counts:
                counts = True
                self._metrics.answered(scope, message["status"])
            return send(message)

        try:
            try:
                self._check_head(scope)
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    whole = await self._read(receive, body)
            except TimeoutError:
                message = f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s."
                refusal = ApiError(408, message, code="body_too_slow")
            except ApiError as error:
                refusal = error
            if refusal is not None:
                self._metrics.failed(refusal)
                await _refuse(refusal, receive, counted)
            elif whole:
                # The application keeps its own time limit, unless the client stops reading.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._answer_timeout_s):
                        await self._app(scope, _replay(bytes(body), receive), counted)
        except Exception:
            self._metrics.failed(ApiError(500, "", kind="server_error"))
            if not counts:
                self._metrics.answered(scope, 500)
            raise
        finally:
            self._held -= len(body)

    def _check_head(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        right = scheme.lower() == b"bearer" and hmac.compare_digest(key.lstrip(b" "), self._key or b"")
        if self._key is not None and not right and not KEYLESS.fullmatch(scope["path"]):
            sent = "another" if b"authorization" in headers else "none"
            message = f"This server asks for an API key (Authorization: Bearer ...), and got {sent}."
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"Content-Encoding is '{shortened(encoding)}'; send the body as it is, without one."
            raise ApiError(415, message, code="unsupported_encoding")
        length = int(headers.get(b"content-length", b"0"))  # the HTTP parser has checked that it is a number
        if length > self._most:
            raise self._too_large(length)

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Collect the body; return False if the client left."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            if self._held + len(part) > BODIES_HELD * self._most:
                raise ApiError(429, "The server holds too many large requests. Try again later.",
                               kind="rate_limit_error", code="rate_limit_exceeded")  # fmt: skip
            body += part
            self._held += len(part)
            if len(body) > self._most:
                raise self._too_large(len(body))
            if not message.get("more_body", False):
                return True

    def _too_large(self, size: int) -> ApiError:
        message = (
            f"The body has {size:,} bytes or more; this server takes up to {self._most:,} (serving.max_body_bytes)."
        )
        return ApiError(413, message, code="body_too_large")


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    """Answer with an error and close the connection.

    A client that is still sending would see a broken connection instead of the answer, so it is read a little longer.
    """
    await asyncio.sleep(REFUSAL_PAUSE_S)
    body = json.dumps(error.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives the whole body, then waits for the client to leave."""
    replayed = False

    async def next_message() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
