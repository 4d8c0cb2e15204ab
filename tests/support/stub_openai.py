"""An OpenAI endpoint without a model; its answers, their timing and what it refuses are known exactly."""

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipelines.checkpoint.tokenizer import opened
from tests.support.load_settings import TINY_LLAMA

TOKENIZER = opened(TINY_LLAMA).tokenizer
JSON, EVENTS, HTML = "application/json", "text/event-stream", "text/html; charset=utf-8"


@dataclass
class StubOpenAi:
    """How it answers, and what it was sent.

    Attributes:
        models: names it lists.
        ttft_s: before the first event.
        itl_s: between two events.
        per_event: tokens of one event.
        overhead: input tokens that it adds to a prompt.
        per_message: and for each further message of a chat.
        per_word: and for each space, as another tokenizer may.
        usage: whether it counts tokens.
        cached: input tokens of a request that it says to have found in its cache.
        silent: whether its tokens are without text.
        hidden: so many tokens at the end are without text, and only the end of the answer is an event again.
        most: output tokens that an answer has at most, whatever is asked for.
        refuses: names of parameters that it does not know.
        key: API key that it wants.
        fault: after `faults_after` requests of a load, what goes wrong instead: "early", "busy", "gone", "mute",
            "broken".
        html: whether it is a web page.
        raw: bytes that it answers whatever it is asked; then it closes the connection.
        closes: whether it closes each connection after an answer, without a word of it, as llama.cpp's server does.
        sent: bodies of the requests.
        headers: of the last request.
        connections: how many were opened.
    """

    models: tuple[str, ...] = ("stub",)
    ttft_s: float = 0.0
    itl_s: float = 0.0
    per_event: int = 1
    overhead: int = 5
    per_message: int = 4
    per_word: int = 0
    usage: bool = True
    cached: int = 0
    silent: bool = False
    hidden: int = 0
    most: int = 2**31
    refuses: tuple[str, ...] = ()
    key: str = ""
    fault: str = ""
    faults_after: int = 6
    html: bool = False
    raw: bytes = b""
    closes: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                self.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(self.headers.get("content-length", 0)))
                if self.raw:
                    writer.write(self.raw.replace(b"{authorization}", self.headers.get("authorization", "").encode()))
                    break
                await self._answer(first.split()[1], json.loads(body) if body else {}, writer)
                await writer.drain()
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.html:
            return _whole(writer, "200 OK", HTML, b"<html>Welcome</html>")
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            return _fault(writer, "401 Unauthorized", "Incorrect API key provided")
        if path == "/health":
            return _whole(writer, "200 OK", HTML, b"")
        if path == "/v1/models":
            return _json(writer, {"data": [{"id": name} for name in self.models]})
        if not path.endswith("/completions"):
            return _fault(writer, "404 Not Found", "Not Found")
        if unknown := set(self.refuses) & set(body):
            return _fault(writer, "400 Bad Request", f"Unknown parameter: {min(unknown)}")
        self.sent.append(body)
        fault = self.fault if len(self.sent) > self.faults_after else ""
        if fault == "busy":
            return _fault(writer, "429 Too Many Requests", "queue is full", "Retry-After: 7\r\n")
        if fault == "gone":
            return _fault(writer, "503 Service Unavailable", "no worker")
        return writer.close() if fault == "mute" else await self._write(body, writer, fault)

    async def _write(self, body: dict[str, Any], writer: asyncio.StreamWriter, fault: str) -> None:
        texts = [body["prompt"]] if "prompt" in body else [each["content"] for each in body["messages"]]
        count = min(body["max_tokens"], self.most)
        isl = sum(len(TOKENIZER.encode(text, add_special_tokens=False).ids) for text in texts)
        isl += self.overhead + self.per_message * (len(texts) - 1) + self.per_word * texts[0].count(" ")
        usage: dict[str, Any] = {"prompt_tokens": isl, "completion_tokens": count}
        usage |= {"prompt_tokens_details": {"cached_tokens": self.cached}}
        words = [" is"] * count if not self.silent else [""] * count
        await asyncio.sleep(self.ttft_s)
        if not body.get("stream"):
            part = {"message": {"content": "".join(words)}} if "messages" in body else {"text": "".join(words)}
            return _json(writer, {"choices": [part]} | ({"usage": usage} if self.usage else {}))
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if "messages" in body:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for start in range(0, count, self.per_event):
            if start:
                await asyncio.sleep(self.itl_s)
            if start >= count - self.hidden:
                continue
            piece = "".join(words[start : start + self.per_event])
            _event(writer, {"choices": [{"delta": {"content": piece}} if "messages" in body else {"text": piece}]})
            if fault == "early":
                writer.close()
                return None
            if fault == "broken":
                _event(writer, {"error": {"message": "no memory", "type": "server_error", "param": None, "code": None}})
                return _chunk(writer, b"")
        if self.hidden:
            _event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if self.usage and body.get("stream_options"):
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return None


def _whole(writer: asyncio.StreamWriter, status: str, media: str, body: bytes, more: str = "") -> None:
    head = f"HTTP/1.1 {status}\r\nServer: stub\r\nContent-Type: {media}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _json(writer: asyncio.StreamWriter, reply: dict[str, Any], status: str = "200 OK", more: str = "") -> None:
    _whole(writer, status, JSON, json.dumps(reply).encode(), more)


def _fault(writer: asyncio.StreamWriter, status: str, message: str, more: str = "") -> None:
    _json(writer, {"error": {"message": message}}, status, more)


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(stub: StubOpenAi, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[str]:
    """Serve in a thread; yield the URL up to and with /v1."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(stub.serve, "127.0.0.1", port, ssl=tls))
    port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
