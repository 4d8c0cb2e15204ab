"""Send responses, immediately or when the engine leaves time for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.sequences import ResponsePart, Sequence, StepOutput

log = logging.getLogger(__name__)


class ResponseSender:
    """Sends the output of steps, immediately or when the budget allows.

    The engine's step holds Python's interpreter lock (openvino_genai 2026.4), so a separate thread could only send in
    the gaps between steps; instead the engine's thread sends in these gaps itself. First and last parts are always
    sent immediately. The others share a budget, a fraction of the time the steps take. On any model whose step takes
    much longer than its responses (about 50 microseconds each) this gives a response for every token; with shorter
    steps, the tokens that a sequence accumulates are sent together, the sequence that has waited longest first.
    """

    SHARE = 0.12
    """Seconds spent sending per second of engine time."""
    FEW = 4
    """Up to this many sequences, every token is sent on its own if sending takes no longer than the engine."""

    def __init__(self, characters: PartialCharacters, after: Callable[[Sequence], None]) -> None:
        """Start empty.

        Args:
            characters: which tokens to hold back.
            after: called with every sequence after its last part was sent.
        """
        self._characters, self._after = characters, after
        self._waiting: dict[Sequence, StepOutput] = {}
        self._budget = 0.0
        self._closing_responses = threading.Lock()

    def put(self, sequence: Sequence, step: StepOutput, *, urgent: bool) -> None:
        """Take the output of a step; for the engine's thread only.

        Args:
            sequence: the sequence of the step.
            step: its output; owned from now on, not copied.
            urgent: send it immediately.
        """
        before = self._waiting.get(sequence)
        if before is not None:
            before.add(step)
            step = before
        if urgent:
            self._waiting.pop(sequence, None)
            self.send(sequence, step)
        elif before is None:
            self._waiting[sequence] = step

    def spend(self, step_seconds: float, running: int) -> None:
        """Send what the budget allows after a step of some sequences; for the engine's thread only."""
        if not self._waiting:
            return
        share = 1.0 if running <= self.FEW else self.SHARE
        self._budget = min(self._budget + step_seconds * share, 2 * step_seconds)
        started = time.perf_counter()
        while self._waiting and time.perf_counter() - started < self._budget:
            sequence = next(iter(self._waiting))
            self.send(sequence, self._waiting.pop(sequence))
        self._budget -= time.perf_counter() - started

    def send(self, sequence: Sequence, step: StepOutput) -> None:
        """Send now, from any thread."""
        try:
            self._deliver(sequence, step)
        except Exception:  # a client's channel may break at any time; the others must continue
            log.exception("a response could not be sent")
            sequence.cancelled = True
        if step.ended:
            self._after(sequence)

    def _deliver(self, sequence: Sequence, step: StepOutput) -> None:
        response = sequence.response
        if response.closed:
            return
        if step.error:
            response.fail(step.error, unavailable=step.unavailable)
            return
        if sequence.held is not None:
            sequence.held.add(step)
            step, sequence.held = sequence.held, None
        if sequence.streams_tokens and not step.ended and not self._cut(sequence, step):
            return
        if step.ended:
            with self._closing_responses:
                response.open -= 1
                response.closed = response.open == 0
        response.channel.send(_part(sequence, step, last=response.closed))

    def _cut(self, sequence: Sequence, step: StepOutput) -> bool:
        """Hold back tokens that end inside a character; return whether anything is left to send."""
        tokens = step.rows[0]
        whole = self._characters.whole(tokens)
        if whole == len(tokens):
            return bool(tokens)
        held = StepOutput([tokens[whole:]], [step.log_probs[0][whole:]], step.cum, step.logits[whole:])
        if whole == 0:
            held.context_logits = step.context_logits
        step.rows, step.log_probs, step.logits = [tokens[:whole]], [step.log_probs[0][:whole]], step.logits[:whole]
        if step.log_probs[0]:
            step.cum = [step.cum[0] - sum(held.log_probs[0])]
        sequence.held = held
        return whole > 0


def _part(sequence: Sequence, step: StepOutput, *, last: bool) -> ResponsePart:
    request = sequence.request
    rows = step.rows
    if not request.streaming and not request.exclude_input:
        prompt = request.prompt.tolist()
        rows = [prompt + row for row in rows]
    part = ResponsePart(sequence, rows, last=last)
    if request.log_probs:
        part.log_probs, part.cum_log_probs = step.log_probs, step.cum or [0.0] * len(rows)
    part.context_logits = step.context_logits
    if sequence.streams_tokens:  # as TensorRT-LLM: cpp/tensorrt_llm/batch_manager/llmRequest.cpp, createResult
        if request.log_probs:
            sequence.sent_log_probs += step.log_probs[0]
            sequence.cum_sent = step.cum[0] if step.cum else sequence.cum_sent
            part.log_probs, part.cum_log_probs = [sequence.sent_log_probs[:]], [sequence.cum_sent]
        if step.context_logits is not None:
            sequence.context_logits = step.context_logits
        part.context_logits = sequence.context_logits
    if request.generation_logits and step.logits:
        part.generation_logits = np.stack(step.logits)[None]
    return part
