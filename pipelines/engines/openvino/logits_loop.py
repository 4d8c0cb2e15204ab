"""Serve requests that need logits of their own: guides, embedding bias, bad words, returned logits, seeds.

The paged pipeline neither exposes nor changes logits, and their last bits depend on what it computes together, so these
run beside it in their own thread: one token per sequence and round, each sequence with its own KV state and generator.
This is slower per token but does not delay other requests.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.runtime import EngineFolder, OpenVinoOptions
from pipelines.engines.openvino.sequences import (
    Array,
    Likeliest,
    PromptScores,
    Response,
    ResponsePart,
    Sequence,
    StepOutput,
    take_given_up,
)
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence, TokenChooser
from pipelines.host.log_probs import likeliest, norms_of

# Send responses: one for every token of a stream, in whole characters.

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
        # a repository of an earlier version has a model.py without `waits`
        waits = {response: getattr(response.channel, "waits", True) for response in requests}
        first, *others = [steps for response, steps in requests.items() if waits[response]] or [[]]
        at_work = [self._threads.submit(self._send_in_order, each) for each in others]
        for response, steps in requests.items():
            if not waits[response]:
                self._send_in_order(steps)
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


MAX_TOGETHER = 8
"""Most sequences that run at the same time; each holds its KV state outside the paged cache."""

MAX_LOGITS_BYTES = GIB
"""Most logits that one request may have returned, bytes."""


class _RunningSequence:
    def __init__(self, sequence: Sequence, model: StatefulModel) -> None:
        self.sequence = sequence
        self._state = StatefulSequence(model, sequence.request.table)
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
                norms, tokens = norms_of(piece), following[: len(piece)]  # none follows the last row of all
                own = piece[np.arange(len(tokens)), tokens].astype(np.float64) - norms[: len(tokens)]
                scores.append(PromptScores(own.astype(np.float32), _likeliest(piece, norms, top)))
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
                given_up = take_given_up(self._queue)
                starting = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_TOGETHER - len(self._runs)))]
            for sequence, output in given_up:
                self._send(sequence, output)
            for sequence in starting:
                self._start(sequence)
            self._runs = [run for run in self._runs if self._advance(run)]

    def _start(self, sequence: Sequence) -> None:
        request, error = sequence.request, ""
        rows = len(request.prompt) * request.context_logits + request.max_tokens * request.generation_logits
        if (size := rows * self._folder.config.vocab_size * 4) > MAX_LOGITS_BYTES:  # too large for a response
            error = (
                f"return_context_logits and return_generation_logits would take {show_bytes(size)}; the limit is"
                f" {show_bytes(MAX_LOGITS_BYTES)}. Request fewer tokens."
            )
        if error:
            self._send(sequence, StepOutput(ended=True, error=error))
            return
        try:
            task = request.lora_task_id
            if task not in self._models:
                adapter = self._adapters.get(task) if task is not None else None
                self._models[task] = StatefulModel(replace(self._folder, adapter=adapter), self._options)
            self._runs.append(_RunningSequence(sequence, self._models[task]))
        except RuntimeError as error_of_engine:
            log.exception("a sequence could not be started")
            self._send(
                sequence, StepOutput(ended=True, error=f"The engine has failed: {error_of_engine}", unavailable=True)
            )

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
