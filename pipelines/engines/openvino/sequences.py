"""State of requests in progress: one `Sequence` per generated output, one `Response` per request."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipelines.engines.openvino.generation_request import GenerationRequest

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Stamps:
    """Time stamps of a sequence's events; nanoseconds of `time.monotonic_ns`, 0 means not yet."""

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
        """Number of all blocks."""
        return self.new + self.reused


@dataclass(slots=True)
class DraftUse:
    """Draft tokens proposed and accepted for one sequence.

    openvino_genai reports the counts only for its own `generate`, so they are counted from outside: an iteration
    yields the accepted draft tokens and one token of the model itself. A draft model that predicts the end of the text
    proposes fewer than it may, and so does one that waits for a long prompt; `proposed` is therefore an upper bound,
    and a final end_id that was proposed correctly is not in `accepted`.

    Attributes:
        per_iteration: most draft tokens per iteration; 0 means no draft model.
        proposed: all draft tokens.
        accepted: draft tokens that the model confirmed.
        tokens: tokens of the sequence so far.
    """

    per_iteration: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0

    def iteration(self, new: int, at_most: int) -> None:
        """Count an iteration that yielded `new` tokens of a sequence of `at_most`."""
        if not self.per_iteration or not new:
            return
        if self.tokens:  # the first one results from the prompt
            self.proposed += min(self.per_iteration, at_most - self.tokens - 1)
            self.accepted += new - 1
        self.tokens += new

    @property
    def rate(self) -> float:
        """Fraction of draft tokens that were accepted; 0 if there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The likeliest tokens at N places, the likeliest first, and their log probabilities; both [N, top]."""

    tokens: Array
    log_probs: Array

    @classmethod
    def joined(cls, parts: list[Likeliest]) -> Likeliest:
        """Return all places of several."""
        return cls(np.concatenate([each.tokens for each in parts]), np.concatenate([each.log_probs for each in parts]))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of a prompt of T tokens.

    Attributes:
        log_probs: of its tokens after the first [T - 1].
        best: after each of its tokens [T, top].
    """

    log_probs: Array
    best: Likeliest

    @classmethod
    def joined(cls, parts: list[PromptScores]) -> PromptScores:
        """Return those of the whole prompt."""
        return cls(np.concatenate([each.log_probs for each in parts]), Likeliest.joined([each.best for each in parts]))


@dataclass(slots=True)
class ResponsePart:
    """Content of one response.

    Attributes:
        rows: token ids per beam.
        log_probs: per beam and token, of a stream those of all tokens so far; None if not requested.
        cum_log_probs: per beam, the sum over everything generated so far.
        context_logits: [T, V], of a stream in every response; None if not requested.
        generation_logits: [beams, N, V] or None.
        best: likeliest tokens at the places of the new tokens; None if not requested.
        prompt: log probabilities of the prompt, once; None if not requested.
    """

    sequence: Sequence
    rows: list[list[int]]
    log_probs: list[list[float]] | None = None
    cum_log_probs: list[float] | None = None
    context_logits: Array | None = None
    generation_logits: Array | None = None
    best: Likeliest | None = None
    prompt: PromptScores | None = None
    last: bool = False


class Channel(Protocol):
    """Connection for the responses to one client.

    Attributes:
        waits: whether sending waits for another process.
    """

    @property
    def waits(self) -> bool: ...  # noqa: D102

    def send(self, part: ResponsePart) -> None:
        """Send a response; `part.last` closes the channel."""
        ...

    def fail(self, message: str, *, unavailable: bool) -> None:
        """Send an error and close the channel."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected or cancelled."""
        ...


class Response:
    """The responses to one request: its sequences share a channel, which closes when all of them have ended."""

    def __init__(self, channel: Channel, request_id: str, batch: int) -> None:
        self.channel, self.request_id, self.batch = channel, request_id, batch
        self.sequences: list[Sequence] = []
        self.open = 0
        self.closed = False

    def fail(self, message: str, *, unavailable: bool = False) -> None:
        """Report the error to the client, once."""
        if not self.closed:
            self.closed = True
            self.channel.fail(message, unavailable=unavailable)


@dataclass(slots=True)
class StepOutput:
    """Output of one or more engine steps for a sequence since its last response.

    Attributes:
        rows: new token ids per beam.
        log_probs: their log probabilities.
        cum: sums of all log probabilities so far, per beam.
        logits: logits of the new tokens, each [V].
        context_logits: logits of the prompt [T, V], once.
        best: likeliest tokens at the place of each new token.
        prompt: log probabilities of the prompt, once.
        error: why it failed, if it did.
        unavailable: whether the error is the server's fault.
    """

    rows: list[list[int]] = field(default_factory=lambda: [[]])
    log_probs: list[list[float]] = field(default_factory=lambda: [[]])
    cum: list[float] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    context_logits: Array | None = None
    best: list[Likeliest] = field(default_factory=list)
    prompt: PromptScores | None = None
    ended: bool = False
    error: str = ""
    unavailable: bool = False

    def add(self, later: StepOutput) -> None:
        """Append the output of later steps."""
        for row, more in zip(self.rows, later.rows, strict=True):
            row.extend(more)
        for values, more_values in zip(self.log_probs, later.log_probs, strict=True):
            values.extend(more_values)
        self.cum = later.cum or self.cum
        self.logits.extend(later.logits)
        self.best.extend(later.best)
        if later.context_logits is not None:
            self.context_logits = later.context_logits
        self.prompt = later.prompt or self.prompt
        self.ended, self.error, self.unavailable = later.ended, later.error, later.unavailable


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence (or one beam search) being generated.

    Attributes:
        batch_index: index of the prompt in the request.
        sequence_index: index of the output for the prompt.
        deadline_ns: when to stop waiting for a slot (`time.monotonic_ns`); 0 means never.
        tokens: tokens generated so far, without a final end_id; for a beam search, the best beam's tokens at its end.
        log_probs: log probabilities of the tokens, if requested.
        cum: sum of the log probabilities.
        draft: counts of the draft model's tokens.
        engine_prompt: the prompt as the engine gets it: rows of a table have its ids there.
        handle: the engine's own handle, while it runs.
        held: tokens that wait for the rest of their character.
        sent_log_probs: log probabilities that were sent; a stream repeats them in every response.
        cum_sent: their sum.
        context_logits: logits of the prompt, likewise.
    """

    request: GenerationRequest
    response: Response
    batch_index: int
    sequence_index: int
    deadline_ns: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cum: float = 0.0
    cancelled: bool = False
    stamps: Stamps = field(default_factory=lambda: Stamps(arrival=time.monotonic_ns()))
    kv: KvUse = field(default_factory=KvUse)
    draft: DraftUse = field(default_factory=DraftUse)
    engine_prompt: Array = field(init=False)
    handle: Any = None
    held: StepOutput | None = None
    sent_log_probs: list[float] = field(default_factory=list)
    cum_sent: float = 0.0
    context_logits: Array | None = None

    def __post_init__(self) -> None:
        self.engine_prompt = self.request.prompt
        self.response.sequences.append(self)
        self.response.open += 1

    @property
    def streams_tokens(self) -> bool:
        """Whether to send every new token immediately."""
        return self.request.streaming and self.request.beam_width == 1

    def stop_word_end(self, new: int) -> int | None:
        """Return the number of tokens up to the first stop word that ends within the last `new` ones."""
        words, tokens = self.request.stop_words, self.tokens
        if not words:
            return None
        ends = range(len(tokens) - new + 1, len(tokens) + 1)
        matches = (end for end in ends for word in words if tuple(tokens[max(0, end - len(word)) : end]) == word)
        return next(matches, None)

    def seed(self) -> int:
        """Return the seed of this output: it increases with each further output for a prompt."""
        if self.request.seed is None:
            return secrets.randbits(63)
        return self.request.seed + self.sequence_index


LATE = "The request waited longer than its timeout."


def nothing_more(sequence: Sequence, error: str = "") -> StepOutput:
    """Return the final output of a sequence, without further tokens."""
    beams = sequence.request.beam_width
    return StepOutput([[] for _ in range(beams)], [[] for _ in range(beams)], ended=True, error=error)


def take_given_up(queue: deque[Sequence]) -> list[tuple[Sequence, StepOutput]]:
    """Remove the sequences that are cancelled or past their deadline, wherever they wait.

    Returns:
        each with its final output.
    """
    now = time.monotonic_ns()
    gone = [each for each in queue if each.cancelled or (each.deadline_ns and now > each.deadline_ns)]
    for sequence in gone:
        queue.remove(sequence)
    return [(each, nothing_more(each, "" if each.cancelled else LATE)) for each in gone]
