"""Requests that need logits: embedding bias, bad words, returned logits.

The paged pipeline neither shows nor changes logits, so these run beside it, on a thread of their own: one token per
sequence and round, each sequence with a KV state of its own. Slower per token, and the others are not held up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.response_sender import Outbox
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.sampling import TokenChooser
from pipelines.engines.openvino.sequences import News, Stream
from pipelines.engines.openvino.stateful import StatefulModel, StatefulSequence

log = logging.getLogger(__name__)

MAX_TOGETHER = 8
"""Sequences that run at the same time; each holds its KV state outside of the paged cache."""

MAX_LOGITS_BYTES = GIB
"""Logits one request may ask back."""


class _Run:
    """One sequence under way."""

    def __init__(self, stream: Stream, model: StatefulModel) -> None:
        self.stream = stream
        self._sequence = StatefulSequence(model)
        self._chooser = TokenChooser(stream.asked, stream.seed())
        self._next: Sequence[int] = stream.asked.prompt.tolist()
        self._gathered = News()

    def advance(self) -> News | None:
        """Generate one token; return what is to be sent."""
        stream, asked = self.stream, self.stream.asked
        stream.stamps.first_scheduled = stream.stamps.first_scheduled or time.monotonic_ns()
        first = not stream.stamps.first_token
        logits = self._sequence.feed(self._next, all_logits=first and asked.context_logits)
        token, log_prob = self._chooser.choose(logits[-1])
        self._next = [token]
        stream.stamps.last_token = time.monotonic_ns()
        stream.stamps.first_token = stream.stamps.first_token or stream.stamps.last_token
        news = self._gathered
        if first and asked.context_logits:
            news.context_logits = logits
        self._take(news, token, log_prob, logits[-1] if asked.generation_logits else None)
        if news.ended or stream.pieces:
            self._gathered = News()
            return news
        return None

    def stop(self) -> News:
        """End it with what there is."""
        self._gathered.ended = True
        return self._gathered

    def _take(self, news: News, token: int, log_prob: float, logits: object) -> None:
        stream, asked = self.stream, self.stream.asked
        if token == asked.end_id:
            news.ended = True
            return
        stream.tokens.append(token)
        stream.cum += log_prob
        news.rows[0].append(token)
        if asked.log_probs:
            news.log_probs[0].append(log_prob)
            news.cum = [stream.cum]
        if logits is not None:
            news.logits.append(logits)  # type: ignore[arg-type]
        news.ended = len(stream.tokens) >= asked.max_tokens or stream.stop_word_end(1) is not None


class OwnLoop:
    """A thread that runs such requests; it starts, and the graph is compiled, with the first of them."""

    def __init__(
        self,
        folder: EngineFolder,
        options: OpenVinoOptions,
        adapters: Mapping[int, LoraAdapter],
        outbox: Outbox,
        ended: Callable[[Stream], None],
    ) -> None:
        """Take what it works with.

        Args:
            folder: the engine.
            options: as for the pipeline.
            adapters: LoRA task id -> adapter.
            outbox: takes the news.
            ended: called with every stream that has ended.
        """
        self._folder, self._options, self._outbox, self._finished = folder, options, outbox, ended
        self._adapters = adapters
        self._queue: deque[Stream] = deque()
        self._runs: list[_Run] = []
        self._models: dict[int | None, StatefulModel] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences under way."""
        return len(self._runs)

    def submit(self, streams: Sequence[Stream]) -> None:
        """Queue sequences."""
        if not streams:
            return
        with self._changed:
            self._queue.extend(streams)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="own loop", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; sequences are left as they are."""
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
            for stream in starting:
                self._start(stream)
            self._runs = [run for run in self._runs if self._advance(run)]

    def _start(self, stream: Stream) -> None:
        error = self._too_much(stream)
        if stream.deadline_ns and time.monotonic_ns() > stream.deadline_ns:
            error = "The request waited longer than its timeout."
        if error:
            self._send(stream, News(ended=True, error=error))
            return
        try:
            self._runs.append(_Run(stream, self._model_for(stream.asked.lora_task_id)))
        except RuntimeError as error_of_engine:
            log.exception("a sequence could not be started")
            self._send(stream, News(ended=True, error=f"The engine has failed: {error_of_engine}", unavailable=True))

    def _model_for(self, task: int | None) -> StatefulModel:
        if task not in self._models:
            adapter = self._adapters.get(task) if task is not None else None
            self._models[task] = StatefulModel(replace(self._folder, adapter=adapter), self._options)
        return self._models[task]

    def _advance(self, run: _Run) -> bool:
        """Run one token; return whether the sequence goes on."""
        try:
            news = run.stop() if run.stream.cancelled else run.advance()
        except (RuntimeError, ValueError) as error:  # of this sequence only
            news = News(ended=True, error=f"The request failed: {error}")
        if news is not None:
            self._send(run.stream, news)
        return news is None or not news.ended

    def _send(self, stream: Stream, news: News) -> None:
        if news.ended:
            self._finished(stream)
        self._outbox.send(stream, news)

    def _too_much(self, stream: Stream) -> str:
        """Return an error for a request whose logits would not fit into a response."""
        asked = stream.asked
        rows = len(asked.prompt) * asked.context_logits + asked.max_tokens * asked.generation_logits
        size = rows * self._folder.config.vocab_size * 4
        if size <= MAX_LOGITS_BYTES:
            return ""
        return (
            f"return_context_logits and return_generation_logits would take {show_bytes(size)}; at most"
            f" {show_bytes(MAX_LOGITS_BYTES)} are possible. Ask for fewer tokens."
        )
