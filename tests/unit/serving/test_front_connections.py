"""What a connection may do before its request is whole: uvicorn with our protocol before a small application."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
import uvloop

from pipelines.serving.openai import __main__ as service
from pipelines.serving.openai.__main__ import LONG_HEAD, BoundedProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


async def application(_scope: Any, receive: Any, send: Any) -> None:
    """Answer with the whole body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Any, int]]:
    """Yield the server and its port."""
    config = uvicorn.Config(application, port=0, http=BoundedProtocol, ws="none", lifespan="off", log_level="critical",
                            timeout_graceful_shutdown=20)  # fmt: skip
    server = service._Server(config, None)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


def on_a_connection(
    check: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(10):
                await check(reader, writer)
            writer.close()

    asyncio.run(run())


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEAD_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("before", [b"", HEAD + b"{}"], ids=["first request", "second request"])
@pytest.mark.parametrize("sent", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_head_is_closed_after_a_while(before: bytes, sent: bytes) -> None:
    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(before)
        if before:
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        for byte in sent:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert await reader.read() == b""

    on_a_connection(check)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("before", [b"", HEAD + b"{}"], ids=["first request", "second request"])
def test_what_arrived_in_time_is_read_by_a_service_that_was_late(before: bytes) -> None:
    """A process that gets no processor while it waits for sockets, with the loop that the service has, uvloop."""
    end, other = socket.socketpair()

    async def run() -> None:
        def be_late() -> None:
            assert end.recv(1)
            assert os.write(sender.fileno(), HEAD + b"{}")
            time.sleep(0.4)

        async with serving() as (server, port):
            server.config.timeout_keep_alive = service.HEAD_TIMEOUT_S
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sender = writer.get_extra_info("socket")
            if before:
                writer.write(before)
                assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().add_reader(end, be_late)
            other.send(b"x")
            async with asyncio.timeout(10):
                assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
                assert await reader.read() == b""  # idle again, and closed
            writer.close()

    with end, other, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.usefixtures("_short")
def test_a_body_may_take_longer_than_a_head() -> None:
    """It has a time of its own, which the application counts."""

    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"{")
        await asyncio.sleep(0.6)
        writer.write(b"}")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")

    on_a_connection(check)


async def streaming(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer in two parts of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"data: 1\n\n", b"data: 2\n\n"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize(
    ("answering", "head", "body"),
    [
        (streaming, b"GET / HTTP/1.0\r\n\r\n", b"data: 1\n\ndata: 2\n\n"),
        (streaming, b"HEAD / HTTP/1.0\r\n\r\n", b""),
        (application, HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"{}", b"{}"),
    ],
    ids=["stream", "HEAD", "known length"],
)
def test_a_response_to_http_1_0_has_no_chunks(
    monkeypatch: pytest.MonkeyPatch, answering: Any, head: bytes, body: bytes
) -> None:
    """It ends with the connection."""
    monkeypatch.setitem(globals(), "application", answering)

    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        received, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert rest == body
        assert b"connection: close" in received
        assert b"chunked" not in received

    on_a_connection(check)


@pytest.mark.parametrize("before", [b"", HEAD + b"{}"], ids=["first request", "second request"])
def test_a_head_without_end_is_refused(before: bytes) -> None:
    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(before + b"GET / HTTP/1.1\r\n")
        for _ in range(9):
            writer.write(b"a: b\r\n" * 700)
            await asyncio.sleep(0.01)
        assert LONG_HEAD.encode() in await reader.read()

    on_a_connection(check)


def test_many_requests_on_one_connection_do_not_add_up() -> None:
    """Heads of 60 kB together, and bodies of which none counts as a head."""

    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 3000 + b"\r\nContent-Length: 50000\r\n\r\n"
        for _ in range(20):
            writer.write(head + b"c" * 50_000)
            await reader.readuntil(b"c" * 50_000)

    on_a_connection(check)


def test_requests_that_arrive_together_are_all_answered() -> None:
    """Bodies do not count as heads, wherever what has arrived is cut."""

    async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(20):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n" + b"c" * 30_000)
        for _ in range(20):
            await reader.readuntil(b"c" * 30_000)

    on_a_connection(check)


def test_half_sent_requests_do_not_delay_the_end() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as (server, port):
            for sent in (b"", b"GET / HT", HEAD + b"{"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
            await asyncio.sleep(0.2)
            begun = loop.time()
            server.should_exit = True
        assert loop.time() - begun < 5

    asyncio.run(run())
