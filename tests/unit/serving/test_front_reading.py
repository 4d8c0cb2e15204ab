"""Bodies, their reading process and the count of their tokens, without a server."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from hypothesis import given
from hypothesis import strategies as st

from pipelines.serving.openai import bodies, reader
from pipelines.serving.openai.bodies import BodyLimit, Limits
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.metrics import ServiceMetrics
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
    """One request to a BodyLimit in front of an application that answers with the body's size."""

    def __init__(self, guard: BodyLimit, parts: Iterable[bytes], declared: int | None = None) -> None:
        self._guard, self._parts = guard, iter(parts)
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self._scope = {"type": "http", "method": "POST", "headers": headers}
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


def guard(app: Any = application) -> BodyLimit:
    return BodyLimit(app, limits=Limits(body_bytes=1000, request_timeout_s=1), metrics=ServiceMetrics("m"))


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


def test_a_failure_of_our_own_is_counted_and_left_to_the_server() -> None:
    """Which answers 500, unless a part of the answer has been sent."""

    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ZeroDivisionError

    metrics = ServiceMetrics("m")
    service = BodyLimit(failing, limits=Limits(), metrics=metrics)
    exchange = Exchange(service, [b""], 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(exchange.run())
    assert exchange.sent == []
    page = metrics.page(None)
    assert 'http_requests_total{handler="none",method="POST",status="500"} 1.0' in page
    assert 'trtllm_request_error_total{model_name="m",reason="server_error",status="500"} 1.0' in page


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


class Model:
    """Stands for a served model whose name is checked in one way or another."""

    def check_name(self, name: str) -> None:
        if name == "endless":
            while True:
                pass
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ApiError(404, f"read by {os.getpid()}")


def loaded() -> Model:
    reader.CPU_SECONDS = 0.2
    return Model()


def late() -> Model:
    time.sleep(60)
    return Model()


def read(load: Callable[[], Any], *names: str, patience_s: float = 60.0) -> list[ApiError]:
    """Let a process read bodies one after the other, and return the errors."""

    async def check() -> list[ApiError]:
        one = Reader(load, Limits(request_timeout_s=patience_s))
        one.open()
        errors = []
        try:
            for name in names:
                with pytest.raises(ApiError) as caught:
                    await one.read("completions", json.dumps({"model": name, "prompt": "a"}).encode())
                errors.append(caught.value)
            assert len(multiprocessing.active_children()) == 1  # there for the next
        finally:
            one.close()
        return errors

    return asyncio.run(check())


def test_a_busy_machine_is_not_the_clients_fault() -> None:
    """The process goes on, so that the next request need not wait until it has loaded again."""
    for error in read(late, "first", "second", patience_s=0.2):
        assert (error.status, "too busy to read this request" in error.message) == (503, True)


def test_processor_time_is_the_clients_and_the_process_stays() -> None:
    before, error, after = read(loaded, "first", "endless", "third")
    assert (error.status, error.code, "of processor time" in error.message) == (400, "request_too_complex", True)
    assert before.message == after.message


def test_a_reading_process_that_ends_is_started_again() -> None:
    """That is not the client's fault."""
    before, error, after = read(loaded, "first", "killed", "third")
    assert (error.status, "ended while it read this one. Send it again" in error.message) == (503, True)
    assert (after.status, before.message == after.message) == (404, False)


def test_a_reading_process_that_ended_while_it_was_idle_is_started_again() -> None:
    async def check() -> None:
        one = Reader(loaded, Limits())
        one.open()
        pids = set()
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await one.read("completions", b'{"model": "m", "prompt": "a"}')
            pids.add(caught.value.message)
            (process,) = multiprocessing.active_children()
            process.kill()
            await asyncio.sleep(0.3)
        assert len(pids) == 2
        one.close()

    asyncio.run(check())


def test_a_reader_closed_while_it_reads_starts_no_process_again() -> None:
    async def check() -> None:
        one = Reader(late, Limits(request_timeout_s=0.2))
        one.open()
        with pytest.raises(ApiError, match="too busy"):
            await one.read("completions", b'{"model": "m", "prompt": "a"}')
        one.close()
        await asyncio.sleep(0.5)  # until the loop has heard of the end
        assert multiprocessing.active_children() == []

    asyncio.run(check())


def test_a_closed_reader_leaves_no_thread_that_python_wakes_at_its_end() -> None:
    async def closed() -> None:
        one = Reader(loaded, Limits())
        one.open()
        one.close()

    before = set(threading.enumerate())
    asyncio.run(closed())
    assert set(threading.enumerate()) <= before


def test_bodies_whose_clients_have_left_do_not_keep_others_waiting() -> None:
    """Also after the process was killed meanwhile."""

    async def check() -> None:
        one = Reader(loaded, Limits())
        one.open()
        body = json.dumps({"model": "killed", "prompt": "a"}).encode()
        left = [asyncio.create_task(one.read("completions", body)) for _ in range(20)]
        await asyncio.sleep(0.1)
        for task in left:
            task.cancel()
        with pytest.raises(ApiError, match="read by"):
            await one.read("completions", b'{"model": "m", "prompt": "a"}')
        one.close()

    asyncio.run(check())
