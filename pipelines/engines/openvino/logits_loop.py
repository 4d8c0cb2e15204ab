"""Serve requests that need logits of their own: guides, embedding bias, bad words, returned logits, seeds.

The paged pipeline neither exposes nor changes logits, and their last bits depend on what it computes together, so these
run beside it in their own thread: one token per sequence and round, each sequence with its own KV state and generator.
This is slower per token but does not delay other requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.response_sender import ResponseSender
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.sampling import TokenChooser
from pipelines.engines.openvino.sequences import Array, Likeliest, PromptScores, Sequence, StepOutput
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence
from pipelines.host.log_probs import likeliest, norms_of

log = logging.getLogger(__name__)

MAX_TOGETHER = 8
"""Most sequences that run at the same time; each holds its KV state outside the paged cache."""

MAX_LOGITS_BYTES = GIB
"""Most logits that one request may have returned, bytes."""


class _RunningSequence:
    """One running sequence."""

    def __init__(self, sequence: Sequence, model: StatefulModel) -> None:
        self.sequence = sequence
        self._state = StatefulSequence(model)
        self._chooser = TokenChooser(sequence.request, sequence.seed())
        self._next: list[int] = []
        self._gathered = StepOutput()

    def advance(self) -> StepOutput | None:
        """Generate one token; return the output to send."""
        sequence = self.sequence
        sequence.stamps.first_scheduled = sequence.stamps.first_scheduled or time.monotonic_ns()
        first = not sequence.stamps.first_token
        step = self._gathered
        last = self._read_prompt(step) if first else self._state.feed(self._next)
        token, log_prob = self._chooser.choose(last)
        self._next = [token]
        sequence.stamps.last_token = time.monotonic_ns()
        sequence.stamps.first_token = sequence.stamps.first_token or sequence.stamps.last_token
        self._take(step, token, log_prob, last)
        if step.ended or sequence.streams_tokens:
            self._gathered = StepOutput()
            return step
        return None

    def stop(self) -> StepOutput:
        """End the sequence with the tokens so far."""
        self._gathered.ended = True
        return self._gathered

    def _read_prompt(self, step: StepOutput) -> Array:
        """Read the prompt; return the logits after it [V]. Its log probabilities are taken piece by piece."""
        request, top = self.sequence.request, self.sequence.request.context_log_probs
        logits: list[Array] = []
        scores: list[PromptScores] = []
        following = request.prompt[1:]
        for piece in self._state.pieces(request.prompt, all_logits=request.context_logits or top > 0):
            if top:
                scores.append(_scores(piece, following[: len(piece)], top))
                following = following[len(piece) :]
            if request.context_logits:
                logits.append(piece)
        if scores:
            step.prompt = PromptScores.joined(scores)
        if logits:
            step.context_logits = np.concatenate(logits)
        return np.array(piece[-1])

    def _take(self, step: StepOutput, token: int, log_prob: float, logits: Array) -> None:
        sequence, request = self.sequence, self.sequence.request
        if token == request.end_id:
            step.ended = True
            return
        sequence.tokens.append(token)
        sequence.cum += log_prob
        step.rows[0].append(token)
        if request.log_probs:
            step.log_probs[0].append(log_prob)
            step.cum = [sequence.cum]
        if request.generation_logits:
            step.logits.append(logits)
        if request.top_log_probs:
            step.best.append(_likeliest(logits[None], norms_of(logits[None]), request.top_log_probs))
        full = len(sequence.tokens) >= request.max_tokens
        step.ended = full or self._chooser.complete or sequence.stop_word_end(1) is not None


def _scores(logits: Array, following: Array, top: int) -> PromptScores:
    """Return log probabilities of the tokens that follow, of which the last row may have none, and the likeliest."""
    norms = norms_of(logits)
    own = logits[np.arange(len(following)), following].astype(np.float64) - norms[: len(following)]
    return PromptScores(own.astype(np.float32), _likeliest(logits, norms, top))


def _likeliest(logits: Array, norms: Array, top: int) -> Likeliest:
    tokens, log_probs = likeliest(logits, norms, top)
    return Likeliest(tokens, log_probs.astype(np.float32))


class LogitsLoop:
    """A thread for requests that need logits; it starts, and compiles the graph, with the first of them."""

    def __init__(
        self,
        folder: EngineFolder,
        options: OpenVinoOptions,
        adapters: Mapping[int, LoraAdapter],
        sender: ResponseSender,
        ended: Callable[[Sequence], None],
    ) -> None:
        """Take the engine and where to report.

        Args:
            folder: the engine.
            options: the same as for the pipeline.
            adapters: LoRA task id -> adapter.
            sender: receives the output of each step.
            ended: called with every sequence that has ended.
        """
        self._folder, self._options, self._sender, self._finished = folder, options, sender, ended
        self._adapters = adapters
        self._queue: deque[Sequence] = deque()
        self._runs: list[_RunningSequence] = []
        self._models: dict[int | None, StatefulModel] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Number of sequences without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._runs)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        if not sequences:
            return
        with self._changed:
            self._queue.extend(sequences)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="logits loop", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread; sequences are left as they are."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._runs or self._closing)
                if self._closing:
                    return
                starting = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_TOGETHER - len(self._runs)))]
            for sequence in starting:
                self._start(sequence)
            self._runs = [run for run in self._runs if self._advance(run)]

    def _start(self, sequence: Sequence) -> None:
        error = self._too_much(sequence)
        if sequence.deadline_ns and time.monotonic_ns() > sequence.deadline_ns:
            error = "The request waited longer than its timeout."
        if error:
            self._send(sequence, StepOutput(ended=True, error=error))
            return
        try:
            self._runs.append(_RunningSequence(sequence, self._model_for(sequence.request.lora_task_id)))
        except RuntimeError as error_of_engine:
            log.exception("a sequence could not be started")
            self._send(
                sequence, StepOutput(ended=True, error=f"The engine has failed: {error_of_engine}", unavailable=True)
            )

    def _model_for(self, task: int | None) -> StatefulModel:
        if task not in self._models:
            adapter = self._adapters.get(task) if task is not None else None
            self._models[task] = StatefulModel(replace(self._folder, adapter=adapter), self._options)
        return self._models[task]

    def _advance(self, run: _RunningSequence) -> bool:
        """Generate one token; return whether the sequence continues."""
        try:
            step = run.stop() if run.sequence.cancelled else run.advance()
        except (RuntimeError, ValueError) as error:  # fails this sequence only
            step = StepOutput(ended=True, error=f"The request failed: {error}")
        if step is not None:
            self._send(run.sequence, step)
        return step is None or not step.ended

    def _send(self, sequence: Sequence, step: StepOutput) -> None:
        if step.ended:
            self._finished(sequence)
        self._sender.send(sequence, step)

    def _too_much(self, sequence: Sequence) -> str:
        """Return an error for a request whose logits would be too large for a response."""
        request = sequence.request
        rows = len(request.prompt) * request.context_logits + request.max_tokens * request.generation_logits
        size = rows * self._folder.config.vocab_size * 4
        if size <= MAX_LOGITS_BYTES:
            return ""
        return (
            f"return_context_logits and return_generation_logits would take {show_bytes(size)}; the limit is"
            f" {show_bytes(MAX_LOGITS_BYTES)}. Request fewer tokens."
        )
