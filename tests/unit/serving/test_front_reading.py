"""Bodies, their reading process and the count of their tokens, without a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import given
from hypothesis import strategies as st

from pipelines.serving.openai import bodies
from pipelines.serving.openai.bodies import BodyGuard, Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.reader import Reader
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.settings.model import BUNDLED

GEMMA = ServedTokenizer(BUNDLED / "models" / "tiny_gemma", adds_special=True)


@given(st.text(max_size=400))
def test_a_text_that_fits_is_never_refused(text: str) -> None:
    """Also at the limit, where only the whole text's count decides."""
    assert not GEMMA.exceeds(text, len(GEMMA.ids(text)))
    assert not GEMMA.exceeds(text * 50, len(GEMMA.ids(text * 50)))


@pytest.mark.parametrize("word", ["a the ", "x", " ", "\u4e2d", "Zz9 "])
def test_the_time_to_refuse_depends_on_the_limit_not_on_the_text(word: str) -> None:
    text = word * (4_000_000 // len(word))
    begun = time.process_time()
    assert GEMMA.exceeds(text, 1000)
    assert time.process_time() - begun < 5  # all of it would take 20 s and more


async def never() -> dict[str, Any]:
    await asyncio.sleep(60)
    raise AssertionError


class Exchange:
    """One request to a BodyGuard in front of an application that answers with the body's size."""

    def __init__(self, guard: BodyGuard, parts: Iterable[bytes], declared: int | None = None) -> None:
        self._guard, self._parts = guard, iter(parts)
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self._scope = {"type": "http", "headers": headers}
        self.sent: list[dict[str, Any]] = []
        self.taken = 0

    async def receive(self) -> dict[str, Any]:
        part = next(self._parts, None)
        if part is None:
            return await never()
        self.taken += 1
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self) -> tuple[int, str]:
        await self._guard(self._scope, self.receive, self.send)
        body = b"".join(message.get("body", b"") for message in self.sent)
        found = json.loads(body)
        return self.sent[0]["status"], found["error"]["message"] if isinstance(found, dict) else str(found)


async def application(_scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def guard(app: Any = application) -> BodyGuard:
    return BodyGuard(app, limits=Limits(body_bytes=1000, request_timeout_s=1))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(bodies, "LINGER_S", 0.05)


@pytest.mark.parametrize(
    ("parts", "declared", "status", "said"),
    [
        ([b"a" * 400, b"b" * 600, b""], 1000, 200, "1000"),
        ([], 1001, 413, "The body has 1,001 bytes or more; this server takes up to 1,000"),
        ([b"a" * 600, b"b" * 600], None, 413, "The body has 1,200 bytes or more"),
        ([b"a"], 10, 408, "The body did not arrive within 0 s"),
    ],
)
def test_a_body_is_taken_whole_or_refused(parts: list[bytes], declared: int, status: int, said: str) -> None:
    found, text = asyncio.run(Exchange(guard(), parts, declared).run())
    assert (found, said in text) == (status, True), text


def test_all_bodies_together_are_bounded_and_slow_clients_hold_only_what_they_sent() -> None:
    """1,600 announced bodies take nothing; 16 whole ones take all there is, until they are answered."""

    async def check() -> None:
        released = asyncio.Event()

        async def waiting(scope: Any, receive: Any, send: Any) -> None:
            await released.wait()
            await application(scope, receive, send)

        one = guard(waiting)
        slow = [asyncio.create_task(Exchange(one, [b"a"], 1000).run()) for _ in range(1600)]
        full = [asyncio.create_task(Exchange(one, [b"a" * 900, b""]).run()) for _ in range(16)]
        await asyncio.sleep(0.02)
        status, said = await Exchange(one, [b"a" * 900, b""]).run()
        assert (status, "holds too many large requests" in said) == (429, True)
        released.set()
        assert {status for status, _ in await asyncio.gather(*full)} == {200}
        assert {status for status, _ in await asyncio.gather(*slow)} == {408}
        assert (await Exchange(one, [b"a" * 900, b""]).run())[0] == 200

    asyncio.run(check())


def test_large_bodies_are_taken_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 400 kB at 2 MB/s; the first 64 KiB of a body, and so all small ones, are free."""
    monkeypatch.setattr(bodies, "INTAKE_BYTES_PER_S", 2_000_000 / len(os.sched_getaffinity(0)))
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 5)
    one = BodyGuard(application, limits=Limits(body_bytes=10**6, request_timeout_s=1))

    async def seconds(*sizes: int) -> float:
        begun = time.monotonic()
        answers = await asyncio.gather(*(Exchange(one, [b"a" * size] * 10 + [b""]).run() for size in sizes))
        assert answers == [(200, str(10 * size)) for size in sizes]
        return time.monotonic() - begun

    small, large = asyncio.run(seconds(6000, 6000, 6000, 6000)), asyncio.run(seconds(40_000, 40_000))
    assert large > max(0.3, small)


def test_what_is_refused_is_taken_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on sending is read slowly, and not on the account of others."""
    monkeypatch.setattr(bodies, "INTAKE_BYTES_PER_S", 100_000 / len(os.sched_getaffinity(0)))
    one = guard()
    refused = Exchange(one, itertools.repeat(b"a" * 1000), 1001)
    assert asyncio.run(refused.run())[0] == 413
    assert 0 < refused.taken < 8  # 50 ms at 100 kB/s, and fewer on a busy machine


def exchange(*command: str, patience_s: float = 60.0) -> tuple[ApiError, bool]:
    """Let a program read a body; return the error, and whether the program is still there."""

    async def check() -> tuple[ApiError, bool]:
        one = Reader((), patience_s)
        one._command = command
        with pytest.raises(ApiError) as caught:
            await one.read("chat", b"{}")
        assert one._running is not None
        there = one._running.process.returncode is None
        await one.close()
        return caught.value, there

    return asyncio.run(check())


def test_a_busy_machine_is_not_the_clients_fault() -> None:
    """The process goes on, so that the next request need not wait until it has loaded again."""
    error, there = exchange("sleep", "60", patience_s=0.2)
    assert (error.status, there, "too busy to read this request" in error.message) == (503, True, True)


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGPROF)", 400, "more than 30 s of processor time"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 503, "ended while it read this one. Send it again"),
        ("sys.exit(1)", 503, "ended while it read this one. Send it again"),
    ],
)
def test_a_reading_process_that_ends_is_started_again(ending: str, status: int, said: str) -> None:
    """Processor time is the client's; whatever else ends it is not."""
    program = (
        f"import os, signal, sys; sys.stdin.buffer.read(8); signal.signal(signal.SIGPROF, signal.SIG_DFL); {ending}"
    )
    error, there = exchange("python3", "-c", program)
    assert (error.status, said in error.message, there) == (status, True, True), error.message
