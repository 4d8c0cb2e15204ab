"""Ask an OpenAI endpoint which models it has, and by a few short requests how its answers are counted and ended."""

import asyncio
import base64
import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from pipelines.checkpoint.tokenizer import opened
from pipelines.domain.errors import UserError, did_you_mean, masked
from pipelines.loadgen.config import DEFAULT_MODEL, Api
from pipelines.loadgen.http_stream import HttpReply, HttpRequest, HttpStream, transport
from pipelines.loadgen.plan import PlannedRequest
from pipelines.loadgen.prompts import picture, png
from pipelines.loadgen.request_stream import RequestStream

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
_WAIT_S, _LIVE_WAIT_S = 60.0, 5.0
_PROBES = ("Say one word", "Say one word and then say one other word")
_PROBE_TOKENS = 4
_ENDLESS: tuple[tuple[str, ...], ...] = (("ignore_eos", "min_tokens"), ("ignore_eos",), ())
"""Parameters that forbid an early end, best first; a strict server refuses those that it does not know."""


@dataclass(frozen=True, slots=True)
class OpenAiInterface:
    """A model behind `/v1/completions` or `/v1/chat/completions`.

    Attributes:
        endless: names of parameters that forbid an early end.
        usage: whether the server counts tokens in a stream (`stream_options.include_usage`).
        added_tokens: input tokens that the server adds to a text, e.g. BOS or those of a chat template, by its own
            count; None if it does not count, or adds another number to another text.
        turn_tokens: those that it adds for an answer and the next message of a chat; 0 if it does not count.
    """

    model_name: str
    api: Api
    endless: tuple[str, ...] = ()
    usage: bool = True
    added_tokens: int | None = None
    turn_tokens: int | None = None

    @property
    def add_special_tokens(self) -> bool:
        """Whether special tokens count as input tokens by the tokenizer; here the server says how many it adds."""
        return self.added_tokens is None and self.api == "completions"

    @property
    def stop_input(self) -> str | None:
        """See `Interface`."""
        return ", ".join(self.endless) or None

    @property
    def counted_by(self) -> tuple[str, str]:
        """See `Interface`."""
        if self.usage:
            return "server", "server"
        return ("tokenizer" if self.api == "completions" else "tokenizer, without the chat template"), "tokenizer"

    @property
    def connection(self) -> str:
        """See `Interface`."""
        return (
            f"one request at a time on each of several HTTP connections, kept where the server keeps them ({self.api})"
        )

    def build(self, request: PlannedRequest, *, streaming: bool, ignore_eos: bool) -> HttpRequest:
        """Build the request; greedy, as Triton's models generate unless told otherwise."""
        texts = (*request.history, request.text)
        messages: list[dict[str, Any]] = [
            {"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts)
        ]
        if request.images:
            parts = [_image_part(seed, request.image_side) for seed in request.images]
            messages[0]["content"] = [*parts, {"type": "text", "text": texts[0]}]
        body: dict[str, Any] = {
            "model": self.model_name,
            **({"messages": messages} if self.api == "chat" else {"prompt": request.text}),
            "max_tokens": request.osl,
            "temperature": 0,
            "stream": streaming,
        }
        if streaming and self.usage:
            body["stream_options"] = {"include_usage": True}
        if ignore_eos:
            body |= {name: request.osl if name == "min_tokens" else True for name in self.endless}
        return HttpRequest("POST", _PATHS[self.api], json.dumps(body, separators=(",", ":")).encode())

    def transport(self, url: str) -> AbstractAsyncContextManager[Callable[[], RequestStream]]:
        """See `Interface`."""
        return transport(url, keeps_text=not self.usage)


def _image_part(seed: int, side: int) -> dict[str, Any]:
    content = base64.b64encode(png(picture(seed, side))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


class OpenAiEndpoint:
    """One endpoint, up to and with /v1. Takes the same questions as `pipelines.loadgen.server.Server`."""

    def __init__(self, url: str, api: Api, tokenizer_dir: Path, images: int = 0, image_side: int = 0) -> None:
        """Prepare to send pictures with each request; the probes find their input tokens."""
        self.url, self._api, self._tokenizer_dir = url, api, tokenizer_dir
        self._pictures = tuple(range(images)), image_side
        self._name, self._server, self._shown = "", "unknown", masked(url)

    def close(self) -> None:
        """Nothing stays open."""

    def is_live(self) -> bool:
        """Return whether the server responds."""
        return self._ask(HttpRequest("GET", "/models"), _LIVE_WAIT_S)[0].status > 0

    def counters(self) -> dict[str, dict[str, int]]:
        """Return nothing: OpenAI's interface has no statistics."""
        return {}

    def describe(self, model_name: str, *, streaming: bool) -> OpenAiInterface:
        """Find the model and probe it with a few short requests: how it counts tokens, and which parameters it accepts.

        Raises:
            UserError: no OpenAI endpoint responds, it refuses, or it has no such model.
        """
        key = os.environ.get("OPENAI_API_KEY", "")
        if not (key.isascii() and key.isprintable()):
            raise UserError("OPENAI_API_KEY contains characters that HTTP headers do not allow.", todo="Set it again.")
        name = self._choose(model_name, self._models())
        interface, reply = self._accepted(name, streaming=streaming)
        chat = self._api == "chat"
        if not interface.usage:
            return replace(interface, turn_tokens=0 if chat else None)
        once, twice = _PROBES
        second, reason = self._probe(interface, twice, streaming=streaming)
        if reason:
            raise self._refused(reason, second)
        added, turn = [self._added(reply, once), self._added(second, twice)], None
        if chat:  # a server that takes no conversation says so when it is sent one
            reply, _ = self._probe(interface, once, twice, once, streaming=streaming)
            turn = max((self._added(reply, once, twice, once) or 0) - (added[0] or 0), 0)
        return replace(interface, added_tokens=added[0] if added[0] == added[1] else None, turn_tokens=turn)

    def facts(self, model_name: str) -> dict[str, Any]:
        """Return the names under which it was asked, for the result."""
        return {"url": self._shown, "model_name": self._name or model_name, "name": self._server, "version": "unknown"}

    def _models(self) -> list[str]:
        todo = "Check benchmark.url: an OpenAI endpoint up to and with /v1, or host:port of a Triton server's gRPC."
        reply, reason = self._ask(HttpRequest("GET", "/models"))
        self._server = reply.headers.get("server", "unknown")
        if reply.status == 0:
            if reason.startswith("its certificate"):
                todo = "Renew it, or name the file of the authority that signed it in SSL_CERT_FILE."
            raise UserError(f"No OpenAI server responds at {self._shown}: {reason}.", todo=todo)
        if reply.status in (401, 403):
            raise self._refused_key(reason)
        try:
            names = [str(each["id"]) for each in from_json(reply.body)["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if reason or not names:
            reason = reason or ("its list is empty" if b'"data"' in reply.body else "the answer has no list (data)")
            raise UserError(f"{self._shown}/models does not list models: {reason}.", todo=todo)
        return names

    def _choose(self, name: str, names: list[str]) -> str:
        """Return the model to ask: the only one unless one is named."""
        if name in names:
            self._name = name
        elif name == DEFAULT_MODEL and len(names) == 1:
            (self._name,) = names
        else:
            missing = name != DEFAULT_MODEL
            raise UserError(
                f"benchmark.model_name='{name}' is not a model of {self._shown}."
                if missing
                else f"{self._shown} has {len(names)} models.",
                allowed=f"It has {', '.join(sorted(names)[:20])}.",
                todo=did_you_mean(name, names) if missing else "Name one with benchmark.model_name.",
            )
        return self._name

    def _accepted(self, name: str, *, streaming: bool) -> tuple[OpenAiInterface, HttpReply]:
        """Return how the server lets itself be asked, best first, and its reply."""
        first = ""
        for endless, usage in product(_ENDLESS, (True, False)):
            interface = OpenAiInterface(name, self._api, endless, usage)
            reply, reason = self._probe(interface, _PROBES[0], streaming=streaming)
            if not reason:
                return replace(interface, usage=reply.usage is not None), reply
            if reply.status in (401, 403):
                raise self._refused_key(reason)
            first = first or reason
            if reply.status not in (400, 422):
                break
        raise self._refused(first, reply)

    def _added(self, reply: HttpReply, *texts: str) -> int | None:
        """Return how many input tokens the server added to texts; None if it does not say."""
        counted = (reply.usage or {}).get("prompt_tokens")
        if counted is None:
            return None
        tokenizer = opened(self._tokenizer_dir).tokenizer
        plain = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        if counted < plain:
            raise UserError(
                f"The server counts {counted} input tokens where the tokenizer of model= counts {plain}.",
                todo="Set model= to the model that the server has.",
            )
        return counted - plain

    def _probe(self, interface: OpenAiInterface, *texts: str, streaming: bool) -> tuple[HttpReply, str]:
        request = PlannedRequest(texts[-1], 0, _PROBE_TOKENS, 0, texts[:-1], *self._pictures)
        return self._ask(interface.build(request, streaming=streaming, ignore_eos=True))

    def _ask(self, request: HttpRequest, wait_s: float = _WAIT_S) -> tuple[HttpReply, str]:
        """Send one request on its own connection; return the reply, and the error if any."""

        async def ask() -> tuple[HttpReply, str]:
            async with transport(self.url, keeps_text=False) as connect:
                stream = connect()
                assert isinstance(stream, HttpStream)
                waiting = asyncio.get_running_loop().call_later(wait_s, stream.give_up, "timeout")
                error = (await stream.ask(request, 0, None, round(wait_s * 1e9), False, 0))[-1]
                waiting.cancel()
                await stream.close()
                reason = stream.error_text.removesuffix(" (benchmark.timeout_s)").rstrip(".")  # this wait is ours
                return stream.reply or HttpReply(asyncio.get_running_loop().create_future()), reason if error else ""

        return asyncio.run(ask())

    def _refused_key(self, reason: str) -> UserError:
        sent = "the key in OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else "a request without a key"
        return UserError(f"The server at {self._shown} refuses {sent}: {reason}.", todo="Set OPENAI_API_KEY.")

    def _refused(self, reason: str, reply: HttpReply) -> UserError:
        todo = f"Try benchmark.api={'completions' if self._api == 'chat' else 'chat'}, or see the server's log."
        if reply.status in (429, 503):
            todo = "Run this again when the server takes requests."
        return UserError(
            f"A request of {_PROBE_TOKENS} tokens ({self._api}) failed at {self._shown}: {reason}.",
            todo="See the server's log." if reply.status == 0 else todo,
        )
