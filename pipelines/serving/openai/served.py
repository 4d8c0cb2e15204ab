"""Facts of the served repository that responses depend on."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.checkpoint.tokenizer import chat_templates
from pipelines.serving.openai.errors import ApiError, shortened
from pipelines.serving.openai.fields import Field, read_fields
from pipelines.serving.openai.inputs import ServedEngine
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.openai.tokenizer import ServedTokenizer
from pipelines.serving.repository import ModelRepository
from pipelines.settings.model import BUNDLED

SHIPPED_TEMPLATE = BUNDLED / "chat_template.jinja"
"""Of the bundled models, whose folders have none: their content is in the keys of all that is made from them."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model.

    Attributes:
        label: the model's name for clients.
        created: time of the repository, seconds since 1970.
        max_input_len: maximum of prompt tokens; None if the repository does not state it.
        max_seq_len: maximum of prompt and output tokens; None if the repository does not state it.
        template: the model's chat template.
        engine: what the inputs of a request depend on.
        guided: whether answers can follow a guide.
        skip_special: whether texts leave special tokens out, unless a request says otherwise.
        metrics_url: tritonserver's metrics.
        fields: what its Triton models for clients take: model -> name of the input -> its type.
    """

    label: str
    created: int
    max_input_len: int | None
    max_seq_len: int | None
    template: ChatTemplate
    engine: ServedEngine
    metrics_url: str
    fields: Mapping[str, Mapping[str, Field]]
    guided: bool = False
    skip_special: bool = True

    @property
    def tokens(self) -> ServedTokenizer:
        """The tokenizer."""
        return self.engine.tokenizer

    def check_name(self, model: str) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: 404, as OpenAI does.
        """
        if model != self.label:
            message = f"The model '{shortened(model)}' does not exist. This server has '{self.label}'."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_length(self, prompt: str, param: str) -> None:
        """Refuse a prompt that is far too long, before anything tokenizes the whole of it.

        Raises:
            ApiError: 400, it has more tokens than the model takes.
        """
        limit = self.max_input_len or self.max_seq_len
        if limit is not None and self.tokens.exceeds(prompt, limit):
            message = (
                f"'{param}' has {len(prompt):,} characters, which are more than {limit} tokens; the engine was built "
                f"with {'max_input_len' if self.max_input_len else 'max_seq_len'}={limit}. Shorten it."
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def check_tokens(self, count: int, param: str) -> None:
        """Refuse a prompt of too many tokens.

        Raises:
            ApiError: 400, it has more tokens than the model takes.
        """
        limit = self.max_input_len or self.max_seq_len
        if limit is not None and count > limit:
            message = f"'{param}' has {count:,} tokens; this model takes {limit:,}."
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def room_after(self, prompt: int) -> int:
        """Return how many output tokens fit after the tokens of a chat's prompt.

        Raises:
            ApiError: 400, the prompt leaves no room, or the limit is unknown.
        """
        if self.max_seq_len is None:
            raise ApiError(400, "Give max_completion_tokens: this repository does not state the model's limit.",
                           param="max_completion_tokens")  # fmt: skip
        room = self.max_seq_len - prompt
        if room < 1:
            message = f"The messages take {self.max_seq_len - room} tokens; this model takes {self.max_seq_len} in all."
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return room


def served(repository: ModelRepository, metrics_url: str, chat_template: Path | None = None) -> ServedModel:
    """Collect the facts of the repository that responses depend on."""
    special = repository.adds_special_tokens
    engine = ServedEngine(
        ServedTokenizer(repository.tokenizer, adds_special=special),
        streams=repository.decoupled,
        few_log_probs=repository.few_log_probs,
        draws_anew=repository.draws_anew,
        tokens_per_block=repository.tokens_per_block,
    )
    return ServedModel(
        label=repository.label,
        created=int(repository.path.stat().st_mtime),
        max_input_len=repository.max_input_len,
        max_seq_len=repository.max_seq_len,
        template=ChatTemplate.load(repository.tokenizer, chat_template or _shipped(repository.tokenizer)),
        engine=engine,
        metrics_url=metrics_url,
        fields=read_fields(repository.path),
        guided=repository.guided,
        skip_special=repository.skips_special_tokens,
    )


def _shipped(tokenizer: Path) -> Path | None:
    """Return the template beside the bundled models, for a copy of one of their tokenizers without its own."""
    if "default" in chat_templates(tokenizer)[0]:
        return None
    own, known = tokenizer / "tokenizer.json", BUNDLED.glob("models/*/tokenizer.json")
    bundled = own.is_file() and any(filecmp.cmp(own, each, shallow=False) for each in known)
    return SHIPPED_TEMPLATE if bundled else None
