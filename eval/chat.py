"""Prompts as chats: the model's own chat template around lm-eval's messages, as lm-eval's `hf` model renders them.

A template comes with the model and is code: it runs in the bounded process that the server has for it, not in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.serving.openai.prompts import NoPromptError, Renderer

Message = dict[str, str]

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in the rendered text; the space shows whether the template strips it."""


class ChatPrompts:
    """Renders the messages of a prompt with the chat template of a model's folder."""

    def __init__(self, folder: Path, progress: Progress, *, system_instruction: str | None = None) -> None:
        """Start the process that renders.

        Args:
            folder: of the tokenizer, with its template.
            progress: is told if the template has no place for what a task says to the system.
            system_instruction: the user's own, which must not be lost.

        Raises:
            UserError: the folder has no chat template, or it cannot be read.
        """
        templates, tokens = chat_templates(folder)
        if "default" not in templates:
            others = f", only {', '.join(templates)}" if templates else ""
            raise UserError(
                f"eval.apply_chat_template=true, but the tokenizer at '{folder}' has no chat template{others}.",
                todo="Set eval.apply_chat_template=false, or use the instruction-tuned model.",
            )
        self._renderer = Renderer(templates["default"], tokens)
        self._instruction, self._progress, self._noted = system_instruction, progress, False

    def render(self, messages: Sequence[Message], *, answers: bool = True) -> str:
        """Return the prompt.

        A template that refuses the messages gets them again without the one to the system, as in lm-eval: Gemma's has
        no place for it.

        Args:
            messages: as lm-eval makes them.
            answers: the assistant's answer follows; else the last message is the beginning of it.

        Raises:
            UserError: the template refuses the messages, has no place for the system instruction, or was stopped.
        """
        try:
            return self._rendered(messages, answers=answers)
        except NoPromptError as fault:
            asked = [message for message in messages if message["role"] != "system"]
            if fault.code is not None or len(asked) == len(messages):
                raise _unusable(fault) from None
            why = str(fault)
        if self._instruction is not None:
            raise UserError(
                f"eval.system_instruction has no effect: the model's chat template {why}.",
                todo="Leave it out, or use a model whose template has a place for it.",
            )
        if not self._noted:
            self._progress.note(f"The chat template {why}; what the task says to the system is left out, as in lm-eval")
            self._noted = True
        try:
            return self._rendered(asked, answers=answers)
        except NoPromptError as fault:
            raise _unusable(fault) from None

    def _rendered(self, messages: Sequence[Message], *, answers: bool) -> str:
        # Transformers gives every template these two, so that "is not none" means the same
        values = {"tools": None, "documents": None, "add_generation_prompt": answers}
        if answers:
            return self._renderer.render(messages, values)
        *before, last = messages
        text = self._renderer.render([*before, {**last, "content": last["content"] + TAG}], values)
        start, tag, _ = text.rpartition(TAG.strip())
        if not tag or last["content"].strip() not in text:
            raise NoPromptError("leaves out parts of the last message, which the model is to continue")
        return start if text.startswith(TAG, len(start)) else start.rstrip()


def _unusable(fault: NoPromptError) -> UserError:
    return UserError(
        f"The model's chat template {fault}.",
        todo="Set eval.apply_chat_template=false, or correct the template in the model's folder.",
    )
