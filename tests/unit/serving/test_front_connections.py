"""What connections cost before and after their requests: on a real event loop, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from pipelines.serving.openai import connections
from pipelines.serving.openai.connections import ROUNDS_BETWEEN, SMALL_BODY, Entrance, Turns

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"


def test_work_is_done_a_piece_at_a_time_the_newest_first() -> None:
    """What has arrived for others is looked at between two pieces."""
    order: list[str] = []

    def work(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    async def others() -> None:
        while True:
            order.append("others")
            await asyncio.sleep(0)

    async def check() -> None:
        turns, beside = Turns(), asyncio.create_task(others())
        for name in "abc":
            turns.take(work(name))
        while "b" not in order:
            await asyncio.sleep(0)
        beside.cancel()
        await asyncio.sleep(0.01)
        turns.take(work("d"))

    asyncio.run(check())
    assert [name for name in order if name != "others"] == ["a", "c", "b", "d"]
    assert order.index("c") - order.index("a") > ROUNDS_BETWEEN


def test_work_that_fails_does_not_keep_the_others_from_their_turn() -> None:
    order: list[str] = []

    def fail() -> None:
        raise ValueError("once")

    async def check() -> None:
        turns = Turns()
        with pytest.raises(ValueError, match="once"):
            turns.take(fail)
        turns.take(lambda: order.append("next"))
        await asyncio.sleep(0.01)

    asyncio.run(check())
    assert order == ["next"]


class Wire:
    """Stands for a transport: keeps what the protocol does to it."""

    def __init__(self) -> None:
        self.reading = True
        self.closed = False
        self.protocol: Any = None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol


class Parser:
    """Stands for the HTTP parser's protocol: keeps what it is handed, and ends in its turn."""

    made = 0

    def __init__(self, ends: Turns, **given: Any) -> None:
        type(self).made += 1
        self.data = b""

    def connection_made(self, wire: Wire) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        self.data += data


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Any, Wire]]:
    """Return what makes a new connection; to be called on a running loop."""
    monkeypatch.setattr(connections, "GuardedProtocol", Parser)
    monkeypatch.setattr(Parser, "made", 0)

    def one() -> tuple[Any, Wire]:
        arrival = Entrance().protocol(server_state=SimpleNamespace(connections=set()))
        wire = Wire()
        arrival.connection_made(wire)  # type: ignore[arg-type]
        return arrival, wire

    return one


@pytest.mark.parametrize("end", range(len(HEAD) - 4, len(HEAD)))
def test_no_parser_is_made_before_the_head_is_whole(arrive: Callable[[], tuple[Any, Wire]], end: int) -> None:
    """Wherever the head is cut, also within the empty line at its end."""

    async def check() -> None:
        arrival, wire = arrive()
        for at in range(end):
            arrival.data_received(HEAD[at : at + 1])
        assert Parser.made == 0
        assert wire.reading
        arrival.data_received(HEAD[end:] + b"{}")
        assert wire.protocol.data == HEAD + b"{}"
        assert wire.reading

    asyncio.run(check())


def head(length: int, more: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\ncontent-Length: %d\r\n%s\r\n" % (length, more)


@pytest.mark.parametrize(
    ("first", "needed"),
    [
        (head(2), 2),
        (head(SMALL_BODY), SMALL_BODY),
        (head(10**9), SMALL_BODY),
        (head(10**9, b"Expect: 100-continue\r\n"), 0),
        (head(0), 0),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 0),
        (b"POST / HTTP/1.1\nContent-Length: 3\n\n", 3),
    ],
)
def test_a_small_body_is_awaited_whole_and_the_beginning_of_a_large_one(
    arrive: Callable[[], tuple[Any, Wire]], first: bytes, needed: int
) -> None:
    """Clients that send slowly cost no parser and no task until then."""

    async def check() -> None:
        arrival, wire = arrive()
        arrival.data_received(first[:-1])
        assert Parser.made == 0
        arrival.data_received(first[-1:])
        if needed:
            assert Parser.made == 0
            arrival.data_received(b"{" * (needed - 1))
            assert Parser.made == 0
            arrival.data_received(b"}")
        assert len(wire.protocol.data) == len(first) + needed

    asyncio.run(check())


def test_a_body_that_does_not_come_is_left_to_the_bounds_for_bodies(
    arrive: Callable[[], tuple[Any, Wire]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They answer with status 408 after a while."""
    monkeypatch.setattr(connections, "SMALL_BODY_S", 0.05)

    async def check() -> None:
        arrival, wire = arrive()
        arrival.data_received(head(2) + b"{")
        await asyncio.sleep(0.2)
        assert wire.protocol.data == head(2) + b"{"
        assert not wire.closed

    asyncio.run(check())


def test_a_connection_whose_turn_never_comes_is_closed(
    arrive: Callable[[], tuple[Any, Wire]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)

    async def check() -> None:
        arrival, wire = arrive()
        monkeypatch.setattr(Turns, "take", lambda *_: None)
        arrival.data_received(head(0))
        await asyncio.sleep(0.2)
        assert wire.closed

    asyncio.run(check())


def test_a_head_that_grows_too_long_goes_to_the_parser_which_refuses_it(
    arrive: Callable[[], tuple[Any, Wire]],
) -> None:
    async def check() -> None:
        arrival, wire = arrive()
        arrival.data_received(b"a" * connections.MAX_HEAD_BYTES)
        assert Parser.made == 0
        arrival.data_received(b"a")
        assert len(wire.protocol.data) == connections.MAX_HEAD_BYTES + 1

    asyncio.run(check())


def test_a_client_that_speaks_tls_is_refused_at_once(arrive: Callable[[], tuple[Any, Wire]]) -> None:
    """It would else wait for the end of a head that it never sends."""

    async def check() -> None:
        arrival, wire = arrive()
        arrival.data_received(b"\x16\x03\x01")
        assert wire.protocol.data == b"\x16\x03\x01"

    asyncio.run(check())


def test_a_client_that_left_before_its_turn_costs_no_parser(arrive: Callable[[], tuple[Any, Wire]]) -> None:
    async def check() -> None:
        arrival, wire = arrive()
        wire.closed = True
        arrival.data_received(HEAD)
        assert Parser.made == 0

    asyncio.run(check())
