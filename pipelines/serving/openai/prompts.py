"""Render chat templates in separate processes, which may crash without harm to the service."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipelines.checkpoint.tokenizer import RenderedChat, chat_templates
from pipelines.host.lifetimes import exit_code
from pipelines.serving.openai import template_process
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.template_process import (
    CPU_SECONDS,
    LENGTH_BYTES,
    MEMORY_BYTES,
    REFUSED,
    RENDERED,
    TOO_LARGE,
)
from pipelines.serving.openai.tools import form_of

WORKERS = 2
"""Processes per template, so that one slow prompt does not delay the next."""
ENDS_BY_ITSELF_S = 1.0
"""Time between the last byte of a process and its exit code."""
GROWTH, LEAST_TEXT_BYTES = 4, 2**20
"""A prompt may be so many times as long as its messages, and at least this long."""


class NoPromptError(Exception):
    """A template that gives no prompt, and why, as what follows "the template".

    Attributes:
        code: of the fault in the template; None if it refuses these messages.
    """

    def __init__(self, why: str, code: str | None = None) -> None:
        super().__init__(why)
        self.code = code


class StoppedTemplateError(Exception):
    """A template that was ended, and why."""


class InvalidTemplateError(Exception):
    """A template that does not compile, and why."""


class Renderer:
    """Processes that render one template, each one prompt at a time."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Start the first process; the others start when several prompts are rendered at a time."""
        self._setup = json.dumps({"source": source, "tokens": dict(tokens)}).encode()
        self._invalid = ""
        self._idle: queue.LifoQueue[_TemplateProcess | None] = queue.LifoQueue()
        self._all: list[_TemplateProcess] = []
        weakref.finalize(self, _end, self._all)
        for _ in range(WORKERS - 1):
            self._idle.put(None)
        self._idle.put(self._started())

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Return the prompt.

        Raises:
            NoPromptError: the template does not compile, refuses these messages, or was stopped.
        """
        worker = self._idle.get() or self._started()
        if worker.ended:  # by somebody else
            worker = self._replaced(worker)
        try:
            if not self._invalid:
                return worker.render(json.dumps({**values, "messages": list(messages)}).encode())
        except StoppedTemplateError as stopped:
            raise NoPromptError(f"was stopped: {stopped}", "chat_template_stopped") from None
        except InvalidTemplateError as invalid:
            self._invalid = str(invalid)
        finally:
            self._idle.put(self._replaced(worker) if worker.ended else worker)
        raise NoPromptError(f"is not valid: {self._invalid}", "invalid_chat_template")

    def _replaced(self, worker: _TemplateProcess) -> _TemplateProcess:
        self._all.remove(worker)
        return self._started()

    def _started(self) -> _TemplateProcess:
        worker = _TemplateProcess(self._setup)
        self._all.append(worker)
        return worker


def _end(workers: list[_TemplateProcess]) -> None:
    for worker in workers:
        worker.end()


class _TemplateProcess:
    """One process; its first answer says whether the template compiles."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", template_process.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._setup: bytes | None = setup

    @property
    def ended(self) -> bool:
        """Whether the process is no longer there."""
        return exit_code(self._process) is not None

    def render(self, request: bytes) -> str:
        """Return the prompt.

        Raises:
            NoPromptError: the template refuses these messages.
            InvalidTemplateError: it does not compile.
            StoppedTemplateError: it took too much time or memory with these messages, and the process was ended.
        """
        if self._setup is not None:
            try:
                kind, text = self._answer(self._setup, LEAST_TEXT_BYTES)
            except StoppedTemplateError as stopped:
                raise InvalidTemplateError(str(stopped)) from None
            if kind == REFUSED:
                raise InvalidTemplateError(text)
            self._setup = None
        kind, text = self._answer(request, max(LEAST_TEXT_BYTES, GROWTH * len(request)))
        if kind == REFUSED:
            raise NoPromptError(f"refuses these messages: {text}")
        return text

    def _answer(self, content: bytes, most: int) -> tuple[bytes, str]:
        """Send something and return the kind and the text of the answer.

        Raises:
            StoppedTemplateError: the process was stopped, or crashed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
            self._process.stdin.flush()
            return self._received(most)
        except (OSError, EOFError):
            raise StoppedTemplateError(_why(self.end(ENDS_BY_ITSELF_S))) from None
        except StoppedTemplateError:
            self.end()
            raise

    def _received(self, most: int) -> tuple[bytes, str]:
        """Return the kind and the text of the next answer, of at most this many bytes."""
        size = int.from_bytes(self._read(LENGTH_BYTES), "little")
        if size > most + 1:
            raise StoppedTemplateError(
                f"its prompt has {size - 1:,} bytes, and {most:,} are allowed for these messages"
            )
        content = self._read(size)
        kind, text = content[:1], content[1:]
        if kind == TOO_LARGE:
            raise StoppedTemplateError(f"it took more than {MEMORY_BYTES // 2**20} MiB of memory")
        if kind not in (RENDERED, REFUSED):
            raise StoppedTemplateError("its process gave no answer")
        return kind, text.decode(errors="replace")

    def _read(self, size: int) -> bytes:
        """Read exactly so many bytes; the kernel ends the process when it has used its share of processor time.

        Raises:
            EOFError: the process ended before.
        """
        assert self._process.stdout is not None
        content = self._process.stdout.read(size)
        if len(content) < size:
            raise EOFError
        return content

    def end(self, patience_s: float = 0.0) -> int:
        """Kill the process if it does not exit in this time, and return its exit code or -signal."""
        if (code := exit_code(self._process, patience_s)) is None:
            self._process.kill()
            code = exit_code(self._process, math.inf)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        return code or 0


def _why(code: int) -> str:
    """Say why a process ended without being told to."""
    if code == -signal.SIGPROF:
        return f"it took more than {CPU_SECONDS:g} s of processor time"
    if code < 0:
        return f"its process ended with {signal.Signals(-code).name}"
    return f"its process ended with code {code}"


# Render messages to the text that the model sees, with the model's own chat template.

Result = TypeVar("Result")
OF_THE_TEMPLATE = (
    ". Use /v1/completions with a prompt of your own, or give the server another template: serving.chat_template=FILE"
)
"""What to do about a template that gives no prompt whatever the messages."""
USED = ("default", "tool_use")
"""Names of templates that chats are rendered with, as Transformers picks them."""


class ChatTemplate:
    """The template of a Hugging Face tokenizer folder, run in jinja2's sandbox.

    Templates come with the model, so they are untrusted code: the sandbox limits them to producing text, and a process
    of their own to a share of time and memory.
    """

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str], picture: str | None = None) -> None:
        """Start the processes that render.

        Args:
            templates: by name: "default", and "tool_use" where chats with tools have one of their own.
            tokens: the special tokens by their names in templates.
            picture: text of the token for a picture; None for a text model.
        """
        self._picture, self._bos = picture, tokens.get("bos_token")
        self._seeing = {name for name in templates if picture is not None and "image" in templates[name]}
        self._renderers = {name: Renderer(templates[name], tokens) for name in USED if name in templates}
        self._developers = {name for name in self._renderers if "developer" in templates[name]}
        self.tools = form_of(templates.get("tool_use") or templates.get("default"))
        self.source = templates.get("default", "")
        self._threads = ThreadPoolExecutor(WORKERS, "chat-template")  # they start when they are needed

    @classmethod
    def load(cls, folder: Path, file: Path | None = None, picture: str | None = None) -> ChatTemplate:
        """Load a file, else the templates of the folder.

        Args:
            folder: of the tokenizer.
            file: the user's own template.
            picture: text of the token for a picture; None for a text model.

        Raises:
            UserError: a file of the folder cannot be used.
        """
        return cls(*chat_templates(folder, file), picture)

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None) -> str:
        """Render the prompt for the assistant's next answer; a `RenderedChat` has its special tokens.

        Args:
            messages: as the template takes them.
            values: others that the template may use, such as `tools` and `add_generation_prompt`.

        Raises:
            ApiError: 400, there is no template, it refuses these messages, or it was stopped.
        """
        with_tools = bool((values or {}).get("tools"))
        name = "tool_use" if with_tools and "tool_use" in self._renderers else "default"
        renderer = self._renderers.get(name)
        if renderer is None:
            raise ApiError(
                400,
                "This model's tokenizer has no chat template, so messages cannot be turned into a prompt. "
                "Use /v1/completions with a prompt of your own, or give the server one: serving.chat_template=FILE",
                param="messages",
                code="no_chat_template",
            )
        if name not in self._developers:  # the newer name of the system's role, which many templates would leave out
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        try:
            if self._picture is None:
                return RenderedChat(renderer.render(messages, values or {}))
            text = renderer.render([self._with_parts(each, name) for each in messages], values or {})
            return RenderedChat(text) if self._bos and text.startswith(self._bos) else text  # as processors do
        except NoPromptError as fault:
            raise ApiError(
                400,
                f"The model's chat template {fault}{'' if fault.code is None else OF_THE_TEMPLATE}",
                param="messages",
                code=fault.code,
            ) from None

    def _with_parts(self, message: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Write text and pictures as the template takes them: as parts, or a picture's token on its own line."""
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if name in self._seeing:
            return {**message, "content": parts}
        return {**message, "content": "".join(part.get("text", f"{self._picture}\n") for part in parts)}

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do work that renders in a thread of the template's own: `render` waits for another process."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
