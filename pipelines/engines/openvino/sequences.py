"""Answers on their way to clients: one `Sequence` per answer, one `Response` per request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipelines.engines.openvino.generation_request import GenerationRequest

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Stamps:
    """When things happened to a sequence; nanoseconds of `time.monotonic_ns`, 0 is not yet."""

    arrival: int = 0
    first_scheduled: int = 0
    first_token: int = 0
    last_token: int = 0


@dataclass(slots=True)
class KvUse:
    """Blocks of the paged KV cache that a sequence needed."""

    new: int = 0
    reused: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.new + self.reused


@dataclass(slots=True)
class DraftUse:
    """Guesses about one sequence.

    openvino_genai tells how many only for its own `generate`, so they are counted from outside: an iteration brings
    the guesses that were right and one token of the model itself. A draft that thinks the text has ended guesses fewer
    than it may, and so does one that waits for a long prompt; `proposed` is therefore an upper bound, and a final
    end_id that was guessed right is not in `accepted`.

    Attributes:
        per_iteration: guesses at most; 0 is no draft model.
        proposed: guesses altogether.
        accepted: of them, those the model agreed with.
        tokens: the sequence has.
    """

    per_iteration: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0

    def iteration(self, new: int, at_most: int) -> None:
        """Count an iteration that brought `new` tokens of a sequence of `at_most`."""
        if not self.per_iteration or not new:
            return
        if self.tokens:  # the first one comes with the prompt
            self.proposed += min(self.per_iteration, at_most - self.tokens - 1)
            self.accepted += new - 1
        self.tokens += new

    @property
    def rate(self) -> float:
        """Share of the guesses that were right; 0 without any."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(slots=True)
class ResponsePart:
    """What one response carries.

    Attributes:
        sequence: whose tokens these are.
        rows: token ids per beam.
        log_probs: per beam and new token; None when not asked for.
        cum_log_probs: per beam, of everything generated so far.
        context_logits: [T, V] or None.
        generation_logits: [beams, N, V] or None.
        last: no more responses to this request follow.
    """

    sequence: Sequence
    rows: list[list[int]]
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    context_logits: Array | None = None
    generation_logits: Array | None = None
    last: bool = False


class Channel(Protocol):
    """The way back to one client."""

    def send(self, part: ResponsePart) -> None:
        """Send a response; `part.last` closes the channel."""
        ...

    def fail(self, message: str, *, unavailable: bool) -> None:
        """Send an error and close the channel."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client is gone or wants no more."""
        ...


class Response:
    """The answer to one request: its sequences share a channel, which closes when all of them have ended."""

    def __init__(self, channel: Channel, request_id: str, batch: int) -> None:
        self.channel, self.request_id, self.batch = channel, request_id, batch
        self.sequences: list[Sequence] = []
        self.open = 0
        self.closed = False

    def fail(self, message: str, *, unavailable: bool = False) -> None:
        """Tell the client, once."""
        if not self.closed:
            self.closed = True
            self.channel.fail(message, unavailable=unavailable)


@dataclass(slots=True)
class StepOutput:
    """What one or more engine steps brought to a sequence since its last response.

    Attributes:
        rows: new token ids per beam.
        log_probs: their log probabilities.
        cum: sums of all log probabilities so far, per beam.
        logits: of the new tokens, each [V].
        context_logits: [T, V], once.
        ended: the sequence is finished.
        error: it failed.
        unavailable: the error is the server's.
    """

    rows: list[list[int]] = field(default_factory=lambda: [[]])
    log_probs: list[list[float]] = field(default_factory=lambda: [[]])
    cum: list[float] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    context_logits: Array | None = None
    ended: bool = False
    error: str = ""
    unavailable: bool = False

    def add(self, later: StepOutput) -> None:
        """Append what happened afterwards."""
        for row, more in zip(self.rows, later.rows, strict=True):
            row.extend(more)
        for values, more_values in zip(self.log_probs, later.log_probs, strict=True):
            values.extend(more_values)
        self.cum = later.cum or self.cum
        self.logits.extend(later.logits)
        if later.context_logits is not None:
            self.context_logits = later.context_logits
        self.ended, self.error, self.unavailable = later.ended, later.error, later.unavailable


class Sequence:
    """One sequence (or one beam search) being generated.

    Attributes:
        request: the prompt and its limits.
        response: what answers it.
        batch_index: which prompt of the request.
        sequence_index: which answer to the prompt.
        deadline_ns: give up waiting for a slot then (`time.monotonic_ns`); 0 is never.
        tokens: generated so far, without a final end_id; of a beam search, those of the best beam at its end.
        log_probs: theirs, when asked for.
        cum: their sum.
        cancelled: somebody wants it to end.
        stamps: when things happened.
        kv: KV blocks.
        draft: guesses of the draft model about it.
        handle: the engine's own handle, while it runs.
    """

    __slots__ = (
        "batch_index",
        "cancelled",
        "cum",
        "deadline_ns",
        "draft",
        "handle",
        "held",
        "kv",
        "log_probs",
        "request",
        "response",
        "sequence_index",
        "stamps",
        "tokens",
    )

    def __init__(
        self,
        request: GenerationRequest,
        response: Response,
        batch_index: int,
        sequence_index: int,
        deadline_ns: int = 0,
    ) -> None:
        self.request, self.response = request, response
        self.batch_index, self.sequence_index = batch_index, sequence_index
        self.deadline_ns = deadline_ns
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.cum = 0.0
        self.cancelled = False
        self.stamps, self.kv, self.draft = Stamps(arrival=time.monotonic_ns()), KvUse(), DraftUse()
        self.handle: Any = None
        self.held: StepOutput | None = None
        response.sequences.append(self)
        response.open += 1

    @property
    def streams_tokens(self) -> bool:
        """Whether every new token is to be sent at once."""
        return self.request.streaming and self.request.beam_width == 1

    def stop_word_end(self, new: int) -> int | None:
        """Return how many tokens there are up to the first stop word that ends within the last `new` ones."""
        words, tokens = self.request.stop_words, self.tokens
        if not words:
            return None
        ends = range(len(tokens) - new + 1, len(tokens) + 1)
        found = (end for end in ends for word in words if tuple(tokens[max(0, end - len(word)) : end]) == word)
        return next(found, None)

    def seed(self) -> int:
        """Return the seed of this answer: further answers to a prompt count up."""
        return self.request.seed + self.sequence_index
