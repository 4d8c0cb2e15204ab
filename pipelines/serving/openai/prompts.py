"""Render messages to the text that the model sees, with the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from pipelines.serving.openai.errors import ApiError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template of a Hugging Face tokenizer folder, run in jinja2's sandbox.

    Templates come with the model, so they are untrusted code: the sandbox limits them to producing text.
    """

    def __init__(self, source: str | None, tokens: Mapping[str, str], *, adds_bos: bool) -> None:
        self._source = source
        self._tokens = dict(tokens)
        self._adds_bos = adds_bos
        self._template = None if source is None else _compile(source)

    @classmethod
    def load(cls, folder: Path, given: Path | None = None, *, tokenizer_adds_special: bool = True) -> ChatTemplate:
        """Load the given file, else chat_template.jinja, else the template in tokenizer_config.json.

        Args:
            folder: of the tokenizer.
            given: the user's own template.
            tokenizer_adds_special: whether the preprocessing model lets the tokenizer add special tokens.
        """
        config = _read_json(folder / "tokenizer_config.json")
        file = given or folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else _default(config.get("chat_template"))
        tokens = {name: _token_text(config.get(name)) for name in SPECIAL if config.get(name) is not None}
        return cls(source, tokens, adds_bos=tokenizer_adds_special and _adds_bos(folder, tokens.get("bos_token")))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render the prompt for the assistant's next answer.

        The tokenizer adds its own first token, so one written by the template is removed again.

        Raises:
            ApiError: 400, there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise ApiError(
                400,
                "This model's tokenizer has no chat template, so messages cannot be turned into a prompt. "
                "Use /v1/completions with a prompt of your own, or give the server one: serving.chat_template=FILE",
                param="messages",
                code="no_chat_template",
            )
        from jinja2 import TemplateError

        try:
            text = str(self._template.render(messages=messages, add_generation_prompt=True, **self._tokens))
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"The model's chat template refuses these messages: {error}", param="messages"
            ) from None
        bos = self._tokens.get("bos_token", "")
        return text.removeprefix(bos) if self._adds_bos else text


def _compile(source: str) -> Any:
    """Compile the template as Transformers does, with its functions and whitespace rules.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _default(given: object) -> str | None:
    """Return the default template; old configurations have several, by name."""
    if isinstance(given, list):
        given = next((entry["template"] for entry in given if entry.get("name") == "default"), None)
    return given if isinstance(given, str) else None


def _token_text(given: object) -> str:
    return str(given["content"]) if isinstance(given, dict) else str(given)


def _adds_bos(folder: Path, bos: str | None) -> bool:
    """Return whether the tokenizer itself begins every text with the BOS token."""
    if bos is None or not (folder / "tokenizer.json").is_file():
        return False
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").tokens
    return bool(tokens) and tokens[0] == bos


def _read_json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
