"""Read the bodies of requests within bounds of size, memory and time, before anything parses them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from pipelines.serving.openai.errors import ApiError, shortened

# Bounds on what one client can make the service do.

REFUSAL_PAUSE_S = 0.03
"""A refusal waits so long, so that whoever sends bad requests in a loop leaves most of the time to the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may be.

    Attributes:
        body_bytes: size of its body.
        prompts: answers it may ask for: prompts times n.
        request_timeout_s: time from its arrival to its last token.
    """

    body_bytes: int = 4_000_000
    prompts: int = 128
    request_timeout_s: float = 600


BODY_TIMEOUT_S = 30.0
BODIES_HELD = 16  # of the largest size, over all requests that are being answered
LINGER_S, LINGER_BODIES = 2.0, 8
TRIM_AFTER_S = 1.0
LARGE_BODY = 2**16
INTAKE_BYTES_PER_S = 4_000_000
"""What is taken in each second for each processor, beyond the first LARGE_BODY bytes of a body."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class BodyGuard:
    """Stands before the application and hands it whole bodies only.

    A body that is too long, too slow or one too many is answered here. What is held counts against a common bound, so
    that many clients together cannot fill the memory either; a client that sends slowly holds only what it has sent.
    """

    def __init__(self, app: App, *, limits: Limits) -> None:
        self._app = app
        self._most = limits.body_bytes
        self._answer_timeout_s = limits.request_timeout_s + LINGER_S
        self._held = 0
        self._trimmer = _Trimmer()
        self._pace, self._pace_of_refused = _Pace(), _Pace()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        try:
            try:
                self._check_declared(scope)
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    whole = await self._read(receive, parts)
            except TimeoutError:
                message = f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s."
                await self._refuse(ApiError(408, message, code="body_too_slow"), receive, send)
                return
            except ApiError as error:
                await self._refuse(error, receive, send)
                return
            if whole:
                # The application ends in time by itself, unless the client does not read what it is sent.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._answer_timeout_s):
                        await self._app(scope, _replay(b"".join(parts), receive), send)
        finally:
            size = sum(map(len, parts))
            self._held -= size
            if size > LARGE_BODY:
                self._trimmer.soon()

    def _check_declared(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"Content-Encoding is '{shortened(encoding)}'; send the body as it is, without one."
            raise ApiError(415, message, code="unsupported_encoding")
        length = headers.get(b"content-length", b"0")
        if int(length) > self._most:  # the HTTP parser has checked that it is a number
            raise self._too_large(int(length))

    async def _read(self, receive: Receive, parts: list[bytes]) -> bool:
        """Collect the parts of the body; return False if the client left."""
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            if self._held + len(part) > BODIES_HELD * self._most:
                raise ApiError(429, "The server holds too many large requests. Try again later.",
                               kind="rate_limit_error", code="rate_limit_exceeded")  # fmt: skip
            parts.append(part)
            self._held += len(part)
            size += len(part)
            if size > self._most:
                raise self._too_large(size)
            if not message.get("more_body", False):
                return True
            if size > LARGE_BODY:
                await self._pace.wait(len(part))

    def _too_large(self, size: int) -> ApiError:
        message = (
            f"The body has {size:,} bytes or more; this server takes up to {self._most:,} (serving.max_body_bytes)."
        )
        return ApiError(413, message, code="body_too_large")

    async def _refuse(self, error: ApiError, receive: Receive, send: Send) -> None:
        """Answer with an error and close the connection.

        A client that is still sending would see a broken connection instead of the answer, so some more is taken in.
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
        taken = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while taken < LINGER_BODIES * self._most:
                    message = await receive()
                    if not message.get("more_body", False):
                        break
                    taken += len(message["body"])
                    await self._pace_of_refused.wait(len(message["body"]))
        await send({"type": "http.response.body", "body": b""})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives the whole body, then waits for the client to leave."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


class _Pace:
    """Bounds the bytes taken in per second, over all clients.

    The loopback and fast networks carry gigabytes per second; receiving them, and reading what was received, would take
    the processors that tokens are computed on.
    """

    def __init__(self) -> None:
        self._rate = INTAKE_BYTES_PER_S * len(os.sched_getaffinity(0))
        self._free_at = 0.0

    async def wait(self, size: int) -> None:
        """Wait until so many bytes more are due, behind all who came before."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        await asyncio.sleep(self._free_at - now)


class _Trimmer:
    """Returns freed memory to the system a moment after large bodies; the C library would keep it."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        self._waiting = False

    def soon(self) -> None:
        """Trim once, a little later."""
        if self._trim is not None and not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._start)

    def _start(self) -> None:
        self._waiting = False
        if self._trim is not None:
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
