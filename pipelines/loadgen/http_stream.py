"""OpenAI's HTTP interface: one keep-alive connection carries one request at a time; every event is stamped on arrival.

httptools parses, and callbacks of asyncio's protocol stamp: a task is woken once a request, not once a token.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns as now
from typing import Any
from urllib.parse import urlsplit

import httptools
from pydantic_core import from_json

from pipelines.domain.errors import stated_reason
from pipelines.loadgen.request_stream import RequestStream, classify

_IDLE_NS = 3 * 10**9
"""An idle connection is replaced after this time: uvicorn closes after 5 s, and a request that meets it would fail."""
_CONNECT_S = 10.0
_KINDS = {408: "timeout", 429: "rejected", 503: "unavailable", 504: "timeout"}
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")
_MOST_TOKENS = 2**31
_BOM = b"\xef\xbb\xbf"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass
class HttpRequest:
    """One request."""

    method: str
    path: str
    body: bytes = b""
    id: str = ""


@dataclass
class HttpReply:
    """The received part of one response.

    Attributes:
        ended: resolved when nothing more will come.
        status: of HTTP; 0 before it arrived.
        headers: names in lower case.
        body: of a response that is not a stream of events.
        text: parts of the answer, if kept.
        usage: the server's counts, tokens.
        fault: kind of error and words, of an event that reports one or cannot be read.
        stamps: of each event with content, ns.
        stamp: of the last bytes, ns.
        end: of the last event with content or with the reason for the end, before which tokens without text may come.
        finished: whether an event gave the reason for the end (`finish_reason`).
        whole: whether HTTP's message is complete.
        done: whether the answer ended as it should.
    """

    ended: asyncio.Future[None]
    keeps_text: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    text: list[str] = field(default_factory=list)
    usage: dict[str, int] | None = None
    fault: tuple[str, str] | None = None
    stamps: list[int] = field(default_factory=list)
    stamp: int = 0
    end: int = 0
    finished: bool = False
    whole: bool = False
    done: bool = False

    @property
    def media(self) -> str:
        """The content type without its parameters, in lower case; empty if there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.media == "text/event-stream"

    def take(self, event: dict[str, Any]) -> None:
        """Read one event, or a whole response, and stamp it if it has content.

        Raises:
            ValueError, TypeError, AttributeError: it is not as OpenAI defines it.
        """
        if (usage := event.get("usage")) and "completion_tokens" in (counts := _counts(usage)):
            self.usage = counts
        if fault := event.get("error") or (event.get("object") == "error" and event):
            bare = not isinstance(fault, dict)
            stated = {"message": fault} if bare else fault
            message, code = str(stated.get("message") or stated), stated.get("code")
            # TGI names refusals of a request beside the bare text
            accepted = bool(self.stamps) or stated.get("type") == "server_error"
            accepted |= bare and event.get("error_type") != "validation"
            self.fault = _kind(code) if isinstance(code, int) else classify(message, accepted=accepted), message
        filled = False
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            texts = [part[name] for name in ("text", *_TEXTS) if part.get(name)]
            filled = filled or bool(texts or part.get("tool_calls"))
            self.finished = self.finished or bool(choice.get("finish_reason"))
            if self.keeps_text:
                self.text.append("".join(texts))
            if filled or choice.get("finish_reason"):
                self.end = self.stamp
        if filled:
            self.stamps.append(self.stamp)

    def error(self) -> tuple[str, str] | None:
        """Return the kind of error and the server's words; None if it is a whole answer."""
        if self.status >= 400:
            wait, page = self.headers.get("retry-after"), "html" in self.media
            reason = "an HTML page" if page else stated_reason(self.body) or "no reason given"
            return _kind(self.status), f"HTTP {self.status}{f', Retry-After {wait}' if wait else ''}: {reason}"
        if self.status >= 300:
            where = self.headers.get("location", "elsewhere")
            return "invalid", f"HTTP {self.status}: the server sends requests on to {where[:200]}"
        if self.fault is not None or self.done:
            return self.fault
        if not self.whole:
            return "connection", "the server closed the connection before the answer's end"
        if self.is_stream:
            return "server_error", "the stream of events ended without [DONE]"
        what = f"is {self.media}" if self.media else "has no content type"
        return "invalid", f"the answer {what}, not JSON or text/event-stream"


class _Protocol(asyncio.Protocol):
    """One connection; `reply` is of the current request."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.reply: HttpReply | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._rest = self._data = b""
        """A line that has not ended, and the lines of an event that are no JSON yet."""
        self._events = self._cut = False
        """Whether the answer is events, and whether the last bytes ended with CR, of which LF would be the rest."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        stamp = now()
        if self.reply is None:  # unsolicited
            self.transport.abort()
            return
        self.reply.stamp = stamp
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reply.fault = "invalid", f"this is not HTTP: {error}"
            self.reply.status = self.reply.status or 200
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        reply = self.reply
        if reply is not None and not reply.ended.done():
            closed = reply.body or (self._events and error is None)
            if closed and "content-length" not in reply.headers and "transfer-encoding" not in reply.headers:
                self.on_message_complete()  # this body ends with the connection
            else:
                self._end_event()
                reply.ended.set_result(None)
        self.transport = None

    def on_message_begin(self) -> None:
        self._rest, self._data, self._cut = b"", b"", False

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.reply is not None
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.reply is not None
        self.reply.status = self._parser.get_status_code()
        self._events = self.reply.is_stream and self.reply.status < 300

    def on_body(self, body: bytes) -> None:
        reply = self.reply
        assert reply is not None
        if not self._events:
            reply.body += body
            return
        for line in self._lines(body):
            if not line:
                self._end_event()
            if not line.startswith(b"data:"):
                if not line.startswith(_BOM + b"data:"):  # it may be before the first event
                    continue  # comments, names of events and the empty lines between them
                line = line.removeprefix(_BOM)
            data = line[5:].strip()
            if data == b"[DONE]":
                self._end_event()
                reply.done = True
            elif data:  # with nearly every server a line is an event
                self._data += data
                if self._take(self._data, whole=False):
                    self._data = b""

    def _lines(self, body: bytes) -> list[bytes]:
        """Return the lines that are whole; they end with LF, CR or both."""
        if self._cut:
            body = body.removeprefix(b"\n")
        self._cut = body.endswith(b"\r")
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + body).split(b"\n") if self._rest else body.split(b"\n")
        return lines

    def _end_event(self) -> None:
        if self._data:
            self._take(self._data)
        self._data = b""

    def on_message_complete(self) -> None:
        reply = self.reply
        if reply is None or reply.ended.done() or reply.status in (100, 102, 103):
            return
        reply.whole = True
        self._end_event()
        if not self._events and reply.status < 300:
            reply.done = self._take(reply.body)
        elif self._events and (reply.usage is not None or reply.finished):
            reply.done = True  # complete by HTTP, though without [DONE]
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
            self.transport = None
        reply.ended.set_result(None)

    def _take(self, data: bytes, *, whole: bool = True) -> bool:
        """Read JSON and return whether it is as it should be; that more lines may follow is no fault."""
        reply = self.reply
        assert reply is not None
        why = ""
        try:
            event = from_json(data)
            if isinstance(event, dict):
                reply.take(event)
                return True
        except ValueError as error:
            why = f" ({error})"
        except (AttributeError, TypeError):
            pass
        if whole and (self._events or "json" in reply.media):
            what = "event" if self._events else "answer"
            reply.fault = "invalid", f"invalid {what}{why}: {_plain(data.decode(errors='replace'), 80)}"
        return False


def _kind(status: int) -> str:
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid")


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    """Return the counts that a usage states; ValueError if one is not a number of tokens."""
    stated = {**(usage.get("prompt_tokens_details") or {}), **usage}
    counts = {name: stated[name] for name in _COUNTS if stated.get(name) is not None}
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < _MOST_TOKENS:
            raise ValueError(f"{name}={value!r}")
    return counts


def _plain(text: str, most: int = 500) -> str:
    """Return the start of a server's words on one line, without control characters and without our key."""
    if key := os.environ.get("OPENAI_API_KEY"):
        text = text.replace(key, "***")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:most]


class HttpStream(RequestStream):
    """A connection to an OpenAI endpoint."""

    __slots__ = ("_head", "_idle_since", "_keeps_text", "_protocol", "_reuses", "_tls", "_url", "reply")

    def __init__(self, url: str, *, keeps_text: bool = False, tls: ssl.SSLContext | None = None) -> None:
        """Prepare.

        Args:
            url: up to and with /v1.
            keeps_text: whether the answer's text is kept, because its tokens are still to be counted.
            tls: for https.
        """
        super().__init__()
        self._url, self._keeps_text, self._tls = urlsplit(url), keeps_text, tls
        self._protocol: _Protocol | None = None
        self._idle_since = 0
        self._reuses = True
        """Whether the server keeps connections, as far as is known: llama.cpp's says so and closes them."""
        self.reply: HttpReply | None = None
        """Of the last request."""
        lines = [f"Host: {self._url.netloc.rpartition('@')[2]}", "Accept: */*", "Content-Type: application/json"]
        if key := os.environ.get("OPENAI_API_KEY"):
            lines.append(f"Authorization: Bearer {key}")
        self._head = "\r\n".join(lines)

    async def open(self) -> None:
        """See `RequestStream`."""
        try:
            await self._connect()
        except (OSError, TimeoutError):
            self._protocol = None

    async def close(self) -> None:
        """See `RequestStream`."""
        self._cancel()
        self._protocol = None

    def take_text(self) -> str | None:
        """See `RequestStream`."""
        reply = self.reply
        return "".join(reply.text) if self._keeps_text and reply is not None and reply.usage is None else None

    def _cancel(self) -> None:
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.abort()

    async def _connect(self) -> _Protocol:
        secure = self._url.scheme == "https"
        host, port = self._url.hostname or "", self._url.port or (443 if secure else 80)
        making = asyncio.get_running_loop().create_connection(_Protocol, host, port, ssl=self._tls if secure else None)
        _, self._protocol = _, protocol = await asyncio.wait_for(making, _CONNECT_S)
        self._idle_since = now()
        return protocol

    async def _exchange(self, request: HttpRequest, chunks: list[int], counts: list[int]) -> tuple[int, str | None]:
        head = (
            f"{request.method} {self._url.path.rstrip('/')}{request.path} HTTP/1.1\r\n{self._head}\r\n"
            f"X-Request-Id: {request.id}\r\nContent-Length: {len(request.body)}\r\n\r\n"
        )
        message = head.encode("latin-1") + request.body
        try:
            reused = self._reuses and self._is_open()
            reply = await self._send(message, chunks, fresh=not reused)
            if reply is None and reused and self.given_up is None:  # closed while idle: the server never read it
                self._reuses = False
                reply = await self._send(message, chunks, fresh=True)
        except TimeoutError:
            self.error_text = f"no connection within {_CONNECT_S:g} s"
            return now(), "connection"
        except OSError as error:
            self.error_text = _reason(error)
            return now(), "connection"
        if reply is None:
            self.error_text = "the server closed the connection without an answer"
            return now(), "connection"
        if failure := reply.error():
            kind, reason = failure
            self.error_text = _plain(reason)
            return reply.stamp or now(), kind
        if usage := reply.usage:
            counts[0] = usage.get("prompt_tokens") or counts[0]
            counts.append(usage.get("completion_tokens") or 0)
            if (cached := usage.get("cached_tokens")) is not None:
                self.cached_tokens = (self.cached_tokens or 0) + cached
        return reply.end or reply.stamp, None

    def _is_open(self) -> bool:
        protocol = self._protocol
        return protocol is not None and protocol.transport is not None and now() - self._idle_since <= _IDLE_NS

    async def _send(self, message: bytes, chunks: list[int], *, fresh: bool) -> HttpReply | None:
        """Send a request; return what came, or None if the server closed the connection before any of it."""
        if fresh:
            self._cancel()
            await self._connect()
        protocol = self._protocol
        assert protocol is not None
        self.reply = reply = HttpReply(asyncio.get_running_loop().create_future(), self._keeps_text, stamps=chunks)
        if protocol.transport is None:
            return None
        protocol.reply = reply
        protocol.transport.write(message)
        await reply.ended
        protocol.reply = None
        self._idle_since = now()
        return reply if reply.status else None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        authority = os.environ.get("SSL_CERT_FILE")
        missing = f" (SSL_CERT_FILE={authority} is no file)" if authority and not Path(authority).is_file() else ""
        return f"its certificate is not valid: {error.verify_message}{missing}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error}), as it does with an http:// server"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}".lower()
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)  # asyncio's is longer


@asynccontextmanager
async def transport(url: str, *, keeps_text: bool) -> AsyncIterator[Callable[[], RequestStream]]:
    """Return a maker of connections; see `Interface.transport`."""
    tls = ssl.create_default_context() if url.startswith("https") else None
    yield lambda: HttpStream(url, keeps_text=keeps_text, tls=tls)
