"""What a connection may do before it has sent a request: classes between uvicorn and its HTTP parser."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, NoReturn

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipelines.serving.openai.limits import REFUSAL_PAUSE_S

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES, MAX_HEAD_LINES = 32_768, 200
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
LONG_HEAD = f"The head of a request has at most {MAX_HEAD_BYTES} bytes and {MAX_HEAD_LINES} lines."
CHUNKED = "Send the body with a Content-Length: chunked bodies are not accepted."


class Turns:
    """Starts new connections one at a time, the newest first, with a look at all others in between.

    A hundred that arrive together keep the event loop busy for 20 ms and more. Whoever comes after them waits for the
    one that is being started, not for all; of those that came together, the last has the best chance that its client
    is still there.
    """

    def __init__(self) -> None:
        self._waiting: list[Arrival] = []
        self._busy = False

    def protocol(self, **given: Any) -> Arrival:
        """Make the protocol of a new connection; uvicorn's `http` setting."""
        return Arrival(self, **given)

    def take(self, arrival: Arrival, loop: asyncio.AbstractEventLoop) -> None:
        """Start a connection now, or in its turn."""
        if self._busy:
            self._waiting.append(arrival)
        else:
            self._start(arrival, loop)

    def _start(self, arrival: Arrival, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = True
        try:
            arrival.start()
        finally:
            loop.call_soon(self._next, loop)  # in the next round of the loop, which looks at the others too

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = False
        if self._waiting:
            self._start(self._waiting.pop(), loop)


class Arrival(asyncio.Protocol):
    """A connection that has sent nothing yet, or waits for its turn; it costs next to nothing until then."""

    def __init__(self, turns: Turns, **given: Any) -> None:
        self._turns = turns
        self._make = partial(GuardedProtocol, **given)
        self._connections: set[Any] = given["server_state"].connections
        self._loop: asyncio.AbstractEventLoop = given.get("_loop") or asyncio.get_running_loop()
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        self._transport = transport
        self._connections.add(self)
        self._clock = self._loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Keep what has arrived, and read no more of it before it is this connection's turn."""
        self._data = data
        self._transport.pause_reading()
        self._turns.take(self, self._loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._clock.cancel()
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Close the connection, as the server ends."""
        self._transport.close()

    def start(self) -> None:
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


class GuardedProtocol(H11Protocol):
    """Uvicorn's protocol with bounds for the head of a request, without chunked bodies.

    The parser spends 10 to 40 µs on a line of the head or a chunk, and handles all that have arrived at once, so that a
    quarter of a megabyte of them would stop everyone's answers for half a second or longer. Clients of OpenAI's
    interface send a length.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn: _BoundedParser = _BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

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
