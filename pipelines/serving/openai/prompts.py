"""Render messages to the text that the model sees, with the model's own chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pipelines.checkpoint.tokenizer import RenderedChat, chat_templates
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.rendering import WORKERS, NoPromptError, Renderer
from pipelines.serving.openai.tools import form_of

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

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """Start the processes that render.

        Args:
            templates: by name: "default", and "tool_use" where chats with tools have one of their own.
            tokens: the special tokens by their names in templates.
        """
        self._renderers = {name: Renderer(templates[name], tokens) for name in USED if name in templates}
        self._developers = {name for name in self._renderers if "developer" in templates[name]}
        self.tools = form_of(templates.get("tool_use") or templates.get("default"))
        self._threads = ThreadPoolExecutor(WORKERS, "chat-template")  # they start when they are needed

    @classmethod
    def load(cls, folder: Path, given: Path | None = None) -> ChatTemplate:
        """Load the given file, else the templates of the folder.

        Args:
            folder: of the tokenizer.
            given: the user's own template.

        Raises:
            UserError: a file of the folder cannot be used.
        """
        return cls(*chat_templates(folder, given))

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] | None = None) -> RenderedChat:
        """Render the prompt for the assistant's next answer.

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
            return RenderedChat(renderer.render(messages, values or {}))
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
