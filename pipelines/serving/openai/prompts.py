"""Render messages to the text that the model sees, with the model's own chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pipelines.host.files import optional_object
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.rendering import WORKERS, NoPromptError, Renderer
from pipelines.serving.openai.tools import form_of

Result = TypeVar("Result")
OF_THE_TEMPLATE = (
    ". Use /v1/completions with a prompt of your own, or give the server another template: serving.chat_template=FILE"
)
"""What to do about a template that gives no prompt whatever the messages."""
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template of a Hugging Face tokenizer folder, run in jinja2's sandbox.

    Templates come with the model, so they are untrusted code: the sandbox limits them to producing text, and a process
    of their own to a share of time and memory.
    """

    def __init__(self, source: str | None, tokens: Mapping[str, str], *, adds_bos: bool) -> None:
        self._bos = tokens.get("bos_token", "") if adds_bos else ""
        self._renderer = None if source is None else Renderer(source, tokens)
        self.tools = form_of(source)
        self._threads = ThreadPoolExecutor(WORKERS, "chat-template")  # they start when they are needed

    @classmethod
    def load(cls, folder: Path, given: Path | None = None, *, tokenizer_adds_special: bool = True) -> ChatTemplate:
        """Load the given file, else chat_template.jinja, else the template in tokenizer_config.json.

        Args:
            folder: of the tokenizer.
            given: the user's own template.
            tokenizer_adds_special: whether the preprocessing model lets the tokenizer add special tokens.
        """
        config, source = optional_object(folder / "tokenizer_config.json"), template_source(folder, given)
        tokens = {name: _token_text(config.get(name)) for name in SPECIAL if config.get(name) is not None}
        return cls(source, tokens, adds_bos=tokenizer_adds_special and _adds_bos(folder, tokens.get("bos_token")))

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None) -> str:
        """Render the prompt for the assistant's next answer.

        Args:
            messages: as the template takes them.
            values: others that the template may use, such as `tools` and `add_generation_prompt`.

        The tokenizer adds its own first token, so one written by the template is removed again.

        Raises:
            ApiError: 400, there is no template, it refuses these messages, or it was stopped.
        """
        if self._renderer is None:
            raise ApiError(
                400,
                "This model's tokenizer has no chat template, so messages cannot be turned into a prompt. "
                "Use /v1/completions with a prompt of your own, or give the server one: serving.chat_template=FILE",
                param="messages",
                code="no_chat_template",
            )
        try:
            return self._renderer.render(messages, values or {}).removeprefix(self._bos)
        except NoPromptError as fault:
            raise ApiError(
                400,
                f"The model's chat template {fault}{'' if fault.code is None else OF_THE_TEMPLATE}",
                param="messages",
                code=fault.code,
            ) from None

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do work that renders in a thread of the template's own: `render` waits for another process."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def template_source(folder: Path, given: Path | None = None) -> str | None:
    """Return the given file, else chat_template.jinja, else the template in tokenizer_config.json; None without one.

    Raises:
        UserError: tokenizer_config.json is not JSON.
    """
    file = given or folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return _default(optional_object(folder / "tokenizer_config.json").get("chat_template"))


def _default(given: object) -> str | None:
    """Return the default template; old configurations have several, by name."""
    if isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict)]
        given = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return given if isinstance(given, str) else None


def _token_text(given: object) -> str:
    return str(given.get("content", "")) if isinstance(given, dict) else str(given)


def _adds_bos(folder: Path, bos: str | None) -> bool:
    """Return whether the tokenizer itself begins every text with the BOS token."""
    if bos is None or not (folder / "tokenizer.json").is_file():
        return False
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").tokens
    return bool(tokens) and tokens[0] == bos
