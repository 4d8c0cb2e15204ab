"""Run the service: python -m pipelines.serving.openai --repository R --grpc HOST:PORT ..."""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import os
import resource
import socket
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pipelines.domain.benchmark import Slo
from pipelines.serving.config import API_KEY
from pipelines.serving.logs import FRONT_STARTED
from pipelines.serving.openai.app import make_app
from pipelines.serving.openai.backend import Backend
from pipelines.serving.openai.bodies import Limits
from pipelines.serving.openai.nginx import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MOST_CONNECTIONS, Nginx, find
from pipelines.serving.openai.prepare import served
from pipelines.serving.repository import read_repository

FILES = 2 * MOST_CONNECTIONS
LAST_LOOK_S = 0.1
LONG_HEAD = f"The head of a request has at most {MAX_HEAD_BYTES} bytes."
MMAP_THRESHOLD, SMALL = -3, 128 * 1024
"""Of mallopt(3). Set, it no longer grows, so that the memory of every large body returns to the system at once."""


def main() -> None:
    """Serve until SIGTERM; running responses finish first."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.serving.openai", description=__doc__)
    parser.add_argument("--repository", type=Path, required=True, help="the model repository that tritonserver serves")
    parser.add_argument("--grpc", required=True, help="host:port of tritonserver's gRPC service")
    parser.add_argument("--metrics", required=True, help="URL of tritonserver's metrics")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain-timeout-s", type=int, default=30)
    parser.add_argument("--cors-origin", action="append", default=[], help="a web page's origin; may be repeated")
    parser.add_argument("--image-host", action="append", default=[], help="to fetch pictures from; may be repeated")
    parser.add_argument("--api-key", action="store_true", help=f"ask clients for the key in {API_KEY}")
    parser.add_argument("--chat-template", type=Path, help="instead of the tokenizer's own")
    usual = Limits()
    parser.add_argument("--max-body-bytes", type=int, default=usual.body_bytes)
    parser.add_argument("--max-prompts", type=int, default=usual.prompts)
    parser.add_argument("--request-timeout-s", type=float, default=usual.request_timeout_s)
    for metric in ("ttft", "itl", "e2e"):
        parser.add_argument(f"--slo-{metric}-ms", type=float, help="a limit that the metrics show exactly")
    arguments = parser.parse_args()
    _allow_connections()
    key = os.environ.pop(API_KEY, "") if arguments.api_key else None
    if key == "":
        raise SystemExit(f"{API_KEY} is not set.")
    hosts = tuple(arguments.image_host)
    limits = Limits(arguments.max_body_bytes, arguments.max_prompts, arguments.request_timeout_s, key, hosts)
    repository = read_repository(arguments.repository)
    load = partial(served, repository, arguments.metrics, arguments.chat_template)
    slo = Slo("given", arguments.slo_ttft_ms, arguments.slo_itl_ms, arguments.slo_e2e_ms)
    backend = Backend(arguments.grpc, token_socket=not repository.gpu)
    app = make_app(load, backend, limits, arguments.cors_origin, slo)
    gc.freeze()  # no later collection walks through the modules, while all answers wait for it
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
        libc.mallopt(MMAP_THRESHOLD, SMALL)
    here = arguments.host == "localhost" or ipaddress.ip_address(arguments.host).is_loopback
    program = None if here else find()
    nginx = Nginx(program, arguments.host, arguments.port, limits, arguments.drain_timeout_s) if program else None
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        uds=str(nginx.upstream) if nginx else None,
        http=BoundedProtocol,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        log_level="error",  # one line per broken request would let anyone fill the disk
        timeout_graceful_shutdown=arguments.drain_timeout_s,
    )
    with contextlib.suppress(KeyboardInterrupt):  # raised again once Ctrl-C has been obeyed
        _Server(config, nginx).run()
    if nginx is not None and nginx.died:
        raise SystemExit("nginx ended.")


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with the bounds of a head in bytes and time that httptools does not have."""

    _head_bytes, _head_is_whole = 0, False
    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request; uvicorn's own is for those that follow."""
        super().connection_made(transport)
        self._start_clock()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, once what has arrived in time is read."""
        self.timeout_keep_alive_task = self._close_soon()

    def on_message_begin(self) -> None:
        """Note that a head has begun."""
        super().on_message_begin()
        self._head_is_whole = False

    def on_headers_complete(self) -> None:
        """Note that it is whole."""
        super().on_headers_complete()
        self._head_is_whole = True
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Unchunked
            self.cycle.chunked_encoding = False

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived, in parts, so that a long head is refused before all of it is parsed."""
        for at in range(0, len(data), MAX_HEAD_BYTES):
            part, begun_before = data[at : at + MAX_HEAD_BYTES], not self._head_is_whole
            super().data_received(part)
            if self.transport.is_closing():
                break
            if self._head_is_whole:
                self._stop_clock()
                continue
            self._head_bytes = self._head_bytes + len(part) if begun_before else 0
            if self._head_bytes >= MAX_HEAD_BYTES:
                self.send_400_response(LONG_HEAD)
                break
            if self._clock is None:
                self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop_clock()

    def shutdown(self) -> None:
        """Close the connection unless its request is being answered; one that is still being sent is not."""
        super().shutdown()
        if self.cycle is not None and self.cycle.more_body:
            self.transport.close()

    def _close_soon(self) -> asyncio.TimerHandle:
        """Close after a last look at the socket: uvloop, when it was late itself, runs due timers before it reads."""
        return self.loop.call_later(LAST_LOOK_S, self.transport.close)

    def _start_clock(self) -> None:
        def late() -> None:
            self._clock = self._close_soon()

        self._clock = self.loop.call_later(HEAD_TIMEOUT_S, late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class _Unchunked(RequestResponseCycle):
    """A response in HTTP/1.0, which knows no chunks: a stream ends with the connection."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Server(uvicorn.Server):
    """Logs that it listens; exits if its port is taken or its nginx crashes."""

    def __init__(self, config: uvicorn.Config, nginx: Nginx | None) -> None:
        super().__init__(config)
        self._nginx = nginx

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._nginx is not None:
            try:
                self._nginx.start()
            except SystemExit:
                await self.lifespan.shutdown()
                raise
        print(FRONT_STARTED, flush=True)  # noqa: T201 - read by frontend.py

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or (self._nginx is not None and self._nginx.died)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._nginx is not None:
            self._nginx.drain()
        await super().shutdown(sockets)
        if self._nginx is not None:
            self._nginx.close()


def _allow_connections() -> None:
    """Raise the limit of open files, each connection being one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


if __name__ == "__main__":
    main()
