"""Send responses: one for every token of a stream, in whole characters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.sequences import Likeliest, Response, ResponsePart, Sequence, StepOutput

log = logging.getLogger(__name__)


class ResponseSender:
    """Sends the output of a step as one response, as TensorRT-LLM does.

    The engine's step holds Python's interpreter lock (openvino_genai 2026.4), so responses are sent in the gaps between
    steps. Most of such a gap is spent waiting: the server acknowledges every response. A few threads wait together.
    """

    THREADS = 4

    def __init__(self, characters: PartialCharacters, after: Callable[[Sequence], None]) -> None:
        """Start empty.

        Args:
            characters: which tokens to hold back.
            after: called with every sequence after its last part was sent.
        """
        self._characters, self._after = characters, after
        self._closing_responses = threading.Lock()
        self._threads = ThreadPoolExecutor(self.THREADS, "responses")

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def send_all(self, outputs: Iterable[tuple[Sequence, StepOutput]]) -> None:
        """Send the outputs of a step, those of one request in order; return when all are sent."""
        requests: dict[Response, list[tuple[Sequence, StepOutput]]] = {}
        for sequence, step in outputs:
            requests.setdefault(sequence.response, []).append((sequence, step))
        first, *others = requests.values() or [[]]
        at_work = [self._threads.submit(self._send_in_order, each) for each in others]
        self._send_in_order(first)
        for each in at_work:
            each.result()

    def _send_in_order(self, outputs: Iterable[tuple[Sequence, StepOutput]]) -> None:
        for sequence, step in outputs:
            self.send(sequence, step)

    def send(self, sequence: Sequence, step: StepOutput) -> None:
        """Send the output of a step, which is owned from now on; from any thread."""
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
        held = StepOutput(
            [tokens[whole:]], [step.log_probs[0][whole:]], step.cum, step.logits[whole:], best=step.best[whole:]
        )
        if whole == 0:
            held.context_logits, held.prompt = step.context_logits, step.prompt
        step.rows, step.log_probs, step.logits = [tokens[:whole]], [step.log_probs[0][:whole]], step.logits[:whole]
        step.best = step.best[:whole]
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
    part.prompt, part.best = step.prompt, Likeliest.joined(step.best) if step.best else None
    if request.generation_logits and step.logits:
        part.generation_logits = np.stack(step.logits)[None]
    return part
