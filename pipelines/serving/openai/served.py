"""Facts of the served repository that responses depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.serving.openai.errors import ApiError, shortened
from pipelines.serving.openai.fields import Field, read_fields
from pipelines.serving.openai.limits import TokenCounter
from pipelines.serving.openai.prompts import ChatTemplate
from pipelines.serving.repository import ModelRepository


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model.

    Attributes:
        label: the model's name for clients.
        created: time of the repository, seconds since 1970.
        max_input_len: maximum of prompt tokens; None if the repository does not state it.
        max_seq_len: maximum of prompt and output tokens; None if the repository does not state it.
        template: the model's chat template.
        tokens: counts the tokens of a prompt; None without a tokenizer.
        metrics_url: tritonserver's metrics.
        draws_anew: whether a request without a seed is sampled differently each time.
        fields: what its Triton models for clients take: model -> name of the input -> its type.
    """

    label: str
    created: int
    max_input_len: int | None
    max_seq_len: int | None
    template: ChatTemplate
    tokens: TokenCounter | None
    metrics_url: str
    fields: Mapping[str, Mapping[str, Field]]
    draws_anew: bool = False

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
        if limit is None or self.tokens is None:
            return
        if self.tokens.exceeds(prompt, limit):
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

    def room_after(self, prompt: str) -> int:
        """Return how many output tokens fit after the prompt of a chat.

        Raises:
            ApiError: 400, the prompt leaves no room, or the limit is unknown.
        """
        if self.max_seq_len is None or self.tokens is None:
            raise ApiError(400, "Give max_completion_tokens: this repository does not state the model's limit.",
                           param="max_completion_tokens")  # fmt: skip
        room = self.max_seq_len - self.tokens.count(prompt)
        if room < 1:
            message = f"The messages take {self.max_seq_len - room} tokens; this model takes {self.max_seq_len} in all."
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        return room


def served(repository: ModelRepository, metrics_url: str, chat_template: Path | None = None) -> ServedModel:
    """Collect the facts of the repository that responses depend on."""
    tokenizer = repository.tokenizer / "tokenizer.json"
    special = repository.adds_special_tokens
    return ServedModel(
        label=repository.label,
        created=int(repository.path.stat().st_mtime),
        max_input_len=repository.max_input_len,
        max_seq_len=repository.max_seq_len,
        template=ChatTemplate.load(repository.tokenizer, chat_template, tokenizer_adds_special=special),
        tokens=TokenCounter(tokenizer, adds_special=special) if tokenizer.is_file() else None,
        metrics_url=metrics_url,
        fields=read_fields(repository.path),
        draws_anew=repository.draws_anew,
    )
