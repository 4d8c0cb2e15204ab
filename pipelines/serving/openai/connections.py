"""What a connection may do before it has sent a request: classes between uvicorn and its HTTP parser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipelines.serving.openai.bodies import REFUSAL_PAUSE_S

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES, MAX_HEAD_LINES = 32_768, 200
END_OF_HEAD, LONGEST_END = re.compile(rb"\r?\n\r?\n"), 4
LENGTH = re.compile(rb"\ncontent-length:[ \t]*(\d{1,12})\s", re.IGNORECASE)
EXPECT = re.compile(rb"\nexpect:", re.IGNORECASE)
SMALL_BODY, SMALL_BODY_S = 2**14, 2.0
ROUNDS_BETWEEN = 3
LONG_HEAD = f"The head of a request has at most {MAX_HEAD_BYTES} bytes and {MAX_HEAD_LINES} lines."
CHUNKED = "Send the body with a Content-Length: chunked bodies are not accepted."


class Entrance:
    """Makes the protocols of new connections, and spreads what they cost over time.

    A hundred connections that start or end together would keep the event loop busy for 10 to 30 ms.
    """

    def __init__(self) -> None:
        self.starts, self.ends = Turns(), Turns()

    def protocol(self, **given: Any) -> Arrival:
        """Make the protocol of a new connection; uvicorn's `http` setting."""
        return Arrival(self, **given)


class Turns:
    """Does one piece of work at a time, the newest first, with some looks at everything else in between.

    Whoever comes after many waits for the piece that is being done, not for all; of those that came together, the last
    has the best chance that its client is still there.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._busy = False

    def take(self, work: Callable[[], None]) -> None:
        """Do the work now, or in its turn."""
        if self._busy:
            self._waiting.append(work)
        else:
            self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        self._busy = True
        try:
            work()
        finally:
            self._rest(ROUNDS_BETWEEN)

    def _rest(self, rounds: int) -> None:
        """Let the event loop go round, which looks at every connection each time."""
        loop = asyncio.get_running_loop()
        if rounds:
            loop.call_soon(self._rest, rounds - 1)
        else:
            self._busy = False
            if self._waiting:
                self._do(self._waiting.pop())


class Arrival(asyncio.Protocol):
    """A connection that has not sent a whole small request yet, or waits for its turn; it costs next to nothing.

    What is read of a body before the parser sees it is bounded, and so is the time: beyond either, the connection is
    started, and the bounds for bodies hold.
    """

    def __init__(self, entrance: Entrance, **given: Any) -> None:
        self._starts = entrance.starts
        self._make = partial(GuardedProtocol, entrance.ends, **given)
        self._connections: set[Any] = given["server_state"].connections
        self._loop: asyncio.AbstractEventLoop = given.get("_loop") or asyncio.get_running_loop()
        self._data = b""
        self._wanted: int | None = None  # bytes of head and body; not known before the head is whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        self._transport = transport
        self._connections.add(self)
        self._clock = self._loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Keep what has arrived; with what is wanted, or a head that can be none, let the connection be started."""
        seen = max(0, len(self._data) - LONGEST_END)
        self._data += data
        if self._wanted is None:
            hopeless = self._data[0] <= ord(" ") or len(self._data) > MAX_HEAD_BYTES  # TLS begins with a control byte
            if end := END_OF_HEAD.search(self._data, seen):
                self._wanted = end.end() + _body_to_wait_for(self._data[: end.end()])
                self._clock.cancel()
                self._clock = self._loop.call_later(SMALL_BODY_S, self._ready)
            elif hopeless:
                self._wanted = 0
        if self._wanted is not None and len(self._data) >= self._wanted:
            self._ready()

    def _ready(self) -> None:
        """Read no more before it is this connection's turn, for which a client waits no longer than we for a head."""
        self._clock.cancel()
        self._clock = self._loop.call_later(HEAD_TIMEOUT_S, self._transport.close)
        self._transport.pause_reading()
        self._starts.take(self._start)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._clock.cancel()
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Close the connection, as the server ends."""
        self._transport.close()

    def _start(self) -> None:
        """Hand the connection to the HTTP parser."""
        self._clock.cancel()
        self._connections.discard(self)
        if self._transport.is_closing():
            return
        protocol = self._make()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._transport.resume_reading()
        protocol.data_received(self._data)


def _body_to_wait_for(head: bytes) -> int:
    """Return how many bytes of the body are worth waiting for: a small one whole; none if the client waits for us."""
    length = LENGTH.search(head)
    return 0 if length is None or EXPECT.search(head) else min(int(length[1]), SMALL_BODY)


class GuardedProtocol(H11Protocol):
    """Uvicorn's protocol with bounds for the head of a request, without chunked bodies.

    The parser spends 10 to 40 µs on a line of the head or a chunk, and handles all that have arrived at once, so that a
    quarter of a megabyte of them would stop everyone's answers for half a second or longer. Clients of OpenAI's
    interface send a length.
    """

    def __init__(self, ends: Turns, **given: Any) -> None:
        super().__init__(**given)
        self._ends = ends
        self.conn: _BoundedParser = _BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock and what is sent; the rest has time."""
        self._stop_clock()
        if self.cycle is not None:
            self.cycle.disconnected = True
        self._ends.take(partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refuses, a moment later, and read nothing more until then."""
        self.transport.pause_reading()
        self.loop.call_later(REFUSAL_PAUSE_S, self._refuse, self.conn.refused or msg)

    def shutdown(self) -> None:
        """Close the connection unless its request is being answered; one that is still being sent is not."""
        super().shutdown()
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self.transport.close()

    def _refuse(self, why: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(why)

    def _watch_head(self) -> None:
        """Let the clock run while the head of a request is awaited."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._clock is None and not self.transport.is_closing():
            self._clock = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class _BoundedParser(h11.Connection):
    """A parser that refuses a long head before it parses it, and a chunked body as soon as it has read the head.

    Attributes:
        refused: what it refused, in words for the client; empty if nothing.
    """

    refused = ""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head = END_OF_HEAD.split(self.trailing_data[0][: MAX_HEAD_BYTES + 1], maxsplit=1)[0]
            if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEAD_LINES:
                self._refuse(LONG_HEAD)
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            self._refuse(CHUNKED)
        return event

    def _refuse(self, why: str) -> NoReturn:
        self.refused = why
        raise h11.RemoteProtocolError(why)
