"""Tokens past tritonserver: in order, to their own request, and never lost without a word."""

import select
import socket
from collections.abc import Callable, Iterator

import pytest

from pipelines.host.token_socket import KEY, MOST_SERVICES, NAME, TokenConnections, TokenListener, parsed


class Loop:
    """Which files a listener watches."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def turn(self) -> None:
        for number in select.select(list(self.readers), [], [], 0)[0]:
            self.readers[number]()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def listener(loop: Loop) -> Iterator[TokenListener]:
    made = TokenListener()
    made.open(loop.readers.__setitem__, loop.readers.pop)
    yield made
    made.close()
    assert not loop.readers


@pytest.fixture
def connections() -> Iterator[TokenConnections]:
    made = TokenConnections()
    yield made
    made.close()


def expected(listener: TokenListener, tokens: list[int]) -> tuple[str, int]:
    parameter, _ = listener.expect(tokens.extend)
    target = parsed(parameter)
    assert target is not None
    return target


def test_tokens_arrive_in_order_at_their_own_request(
    listener: TokenListener, connections: TokenConnections, loop: Loop
) -> None:
    first: list[int] = []
    second: list[int] = []
    to_first, to_second = expected(listener, first), expected(listener, second)
    for token in range(100):
        assert connections.send(to_first, [token, -token])
        assert connections.send(to_second, [2**31 - 1])
    loop.turn()  # the connection
    loop.turn()
    assert first == [value for token in range(100) for value in (token, -token)]
    assert second == [2**31 - 1] * 100


def test_what_was_sent_before_a_response_of_tritonserver_is_read_before_it(
    listener: TokenListener, connections: TokenConnections
) -> None:
    tokens: list[int] = []
    assert connections.send(expected(listener, tokens), [1, 2])
    listener.read()  # without a turn of the loop
    assert tokens == [1, 2]


def test_tokens_of_a_request_that_nobody_waits_for_are_dropped(
    listener: TokenListener, connections: TokenConnections
) -> None:
    tokens: list[int] = []
    target = expected(listener, tokens)
    assert connections.send(target, [1])
    listener.forget(target[1])
    listener.read()
    assert tokens == []
    assert connections.send(target, [2])  # the service is there, the request is not


def test_a_service_that_does_not_keep_up_or_is_gone_gets_nothing(
    listener: TokenListener, connections: TokenConnections
) -> None:
    """The engine then sends through tritonserver, and what has come before stays."""
    tokens: list[int] = []
    target = expected(listener, tokens)
    sent = 0
    while connections.send(target, [sent]):
        sent += 1
    assert 10 < sent < 100_000
    listener.read()
    assert tokens == list(range(sent))
    assert connections.send(target, [7])
    listener.close()
    assert not connections.send(target, [8])
    assert not connections.send(("0" * 16, 1), [8])


def test_other_programs_cannot_harm_it(listener: TokenListener, connections: TokenConnections, loop: Loop) -> None:
    tokens: list[int] = []
    target = expected(listener, tokens)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(NAME.format(target[0]))
        for message in (b"x", b"1234567", KEY.pack(target[1]) + b"odd", KEY.pack(target[1] ^ 1) + b"1234"):
            other.send(message)
        loop.turn()
        loop.turn()
    loop.turn()
    assert len(loop.readers) == 1  # its connection is closed
    assert connections.send(target, [3])
    loop.turn()
    assert tokens == [3]


@pytest.mark.parametrize("parameter", ["", "abc", "../x 0000000000000000", "0" * 33, f"{'0' * 16} {'0' * 16}\n"])
def test_only_our_own_sockets_can_be_named(parameter: str) -> None:
    assert parsed(parameter) is None


def test_an_engine_connects_to_few_services(connections: TokenConnections) -> None:
    listeners = [TokenListener() for _ in range(MOST_SERVICES + 1)]
    for each in listeners:
        each.open(lambda _number, _read: None, lambda _number: None)
    sent = [connections.send(expected(each, []), [1]) for each in listeners]
    for each in listeners:
        each.close()
    assert sent == [True] * MOST_SERVICES + [False]
