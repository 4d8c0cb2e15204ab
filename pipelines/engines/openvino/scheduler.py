"""In-flight batching for a server: requests come at any time, one thread runs the engine, answers stream out.

openvino_genai's pipeline batches and pages; this adds what a server needs around it: a bounded queue with deadlines,
stop sequences, cancellation by request id or by a vanished client, statistics, and an end that reaches every client.
Requests that need logits the pipeline does not show go to `OwnLoop`, beside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.adapter_pipelines import Lanes
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import Asked
from pipelines.engines.openvino.handles import Reader, nothing_more
from pipelines.engines.openvino.logits_loop import OwnLoop
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.response_sender import Outbox
from pipelines.engines.openvino.runtime import EngineFolder, check_request
from pipelines.engines.openvino.sequences import Channel, News, Reply, Stream
from pipelines.engines.openvino.serving_options import ServingOptions
from pipelines.engines.openvino.serving_stats import Counters, Snapshot

log = logging.getLogger(__name__)

STOPPED = "The engine is stopping; no new requests are taken."
_READER = Reader()


class QueueFullError(UserError):
    """The queue has its configured length."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"Exceeds maximum queue size: the request was not taken, Maximum queue size of {limit} reached.",
            todo="Send fewer requests at a time, or raise max_queue_size.",
        )


class Scheduler:
    """Owns the pipelines. All methods may be called from any thread."""

    def __init__(
        self,
        folder: EngineFolder,
        options: ServingOptions,
        characters: PartialCharacters,
        adapters: Mapping[int, LoraAdapter] | None = None,
    ) -> None:
        """Load the engine and start the threads.

        Args:
            folder: the engine.
            options: how to run it.
            characters: which tokens to hold back.
            adapters: LoRA task id -> adapter; the engine is loaded once more for each.

        Raises:
            UserError: the KV cache is too small for one request, or an adapter or the draft model does not fit.
        """
        self.folder, self._options = folder, options.fitted(folder)
        options = self._options
        adapters = adapters or {}
        self._lanes = Lanes(folder, options.engine, adapters)
        self._counters = Counters(self._lanes.max_blocks, folder.limits.max_batch_size)
        self._outbox = Outbox(characters, self._sent)
        self._own = OwnLoop(folder, options.engine, adapters, self._outbox, self._ended)
        self._waiting: deque[Stream] = deque()
        self._running: list[Stream] = []
        self._by_id: dict[str, set[Reply]] = {}
        self._replies: set[Reply] = set()
        self._next_handle = 0
        self._failure = ""
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._guarded, name="engine", daemon=True),
            threading.Thread(target=self._watch, name="cancellation", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, prompts: Sequence[Asked], channel: Channel, request_id: str = "", timeout_us: int = 0) -> None:
        """Queue the prompts of one request.

        Args:
            prompts: the batch.
            channel: gets all answers, also errors of the engine.
            request_id: for `cancel`; empty is none.
            timeout_us: give up when it has not started by then; 0 is never.

        Raises:
            UserError: a prompt is too long, or the queue is full (`QueueFullError`); nothing was queued.
        """
        for asked in prompts:
            check_request(self.folder, self._options.engine, len(asked.prompt), asked.max_tokens)
        reply = Reply(channel, request_id, len(prompts))
        deadline = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
        for index, asked in enumerate(prompts):
            answers = asked.num_return_sequences or 1 if asked.beam_width == 1 else 1
            for sequence in range(answers):
                Stream(asked, reply, index, sequence, deadline)
        with self._changed:
            self._check_queue(len(reply.streams))
            self._replies.add(reply)
            if request_id:
                self._by_id.setdefault(request_id, set()).add(reply)
            own = [stream for stream in reply.streams if stream.asked.needs_logits]
            self._waiting.extend(stream for stream in reply.streams if not stream.asked.needs_logits)
            self._changed.notify_all()
        self._own.submit(own)

    def cancel(self, request_id: str) -> bool:
        """End the requests with this id; each gets a last response with what it has.

        Returns:
            whether there was one.
        """
        with self._changed:
            found = self._by_id.get(request_id, set())
            for reply in found:
                _cancel(reply)
            self._changed.notify_all()
        return bool(found)

    def snapshot(self) -> Snapshot:
        """Return the statistics of this moment."""
        with self._changed:
            waiting, running = len(self._waiting), list(self._running)
        context = sum(1 for stream in running if not stream.stamps.first_token)
        cache = self._lanes.cache_percent(running)
        return self._counters.snapshot(waiting + self._own.waiting, len(running) + self._own.running, context, cache)

    def close(self) -> None:
        """Cancel what runs, tell every client, and join the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._own.close()
        self._fail_all(STOPPED)

    def _check_queue(self, new: int) -> None:
        if self._closing:
            raise UserError(STOPPED)
        if self._failure:
            raise UserError(f"The engine has failed: {self._failure}", todo="Load the model again.")
        limit = self._options.max_queue_size
        if limit and len(self._waiting) + self._own.waiting + new > limit + self._free_slots():
            raise QueueFullError(limit)

    def _free_slots(self) -> int:
        return max(0, self.folder.limits.max_batch_size - len(self._running))

    def _guarded(self) -> None:
        """Run until closed; what goes wrong inside reaches every client."""
        try:
            self._run()
        except Exception as error:  # the engine's own errors are RuntimeErrors without further kind
            log.exception("the engine failed")
            with self._changed:
                self._failure = str(error) or type(error).__name__
            self._fail_all(f"The engine has failed: {self._failure}", unavailable=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._closing)
                if self._closing:
                    self._stop_handles()
                    return
                admitted = self._admit()
            for stream in admitted:
                self._start(stream)
            if self._running:
                self._iterate()

    def _admit(self) -> list[Stream]:
        """Take from the queue what may start now; the order is that of arrival."""
        admitted: list[Stream] = []
        now = time.monotonic_ns()
        free = self._free_slots()
        while self._waiting:
            stream = self._waiting[0]
            if stream.cancelled or (stream.deadline_ns and now > stream.deadline_ns):
                self._waiting.popleft()
                self._give_up(stream)
                continue
            lane = self._lanes.of(stream.asked)
            # under guaranteed_no_evict, a request starts only when all it may come to need is free
            if free <= len(admitted) or (self._options.guaranteed_no_evict and not lane.fits(stream.asked)):
                break
            self._waiting.popleft()
            lane.reserve(stream.asked)
            admitted.append(stream)
        return admitted

    def _give_up(self, stream: Stream) -> None:
        error = "" if stream.cancelled else "The request waited longer than its timeout."
        self._outbox.send(stream, nothing_more(stream, error))

    def _start(self, stream: Stream) -> None:
        try:
            self._lanes.of(stream.asked).start(stream, self._next_handle)
        except RuntimeError as error:  # the engine judges some combinations itself, e.g. a broken grammar
            self._lanes.of(stream.asked).forget(stream.asked)
            self._outbox.send(stream, nothing_more(stream, f"The engine refuses the request: {error}"))
            return
        self._next_handle += 1
        stream.stamps.first_scheduled = time.monotonic_ns()
        with self._changed:
            self._running.append(stream)

    def _iterate(self) -> None:
        """One iteration of the engine, and what came of it."""
        cancelled = [stream for stream in self._running if stream.cancelled]
        if cancelled:
            self._conclude([(stream, _READER.abandon(stream)) for stream in cancelled])
        started = time.monotonic_ns()
        for lane in self._lanes.busy(self._running):
            lane.step()
        now = time.monotonic_ns()
        ended: list[tuple[Stream, News]] = []
        for stream in self._running:
            first = not stream.stamps.first_token
            happened = _READER.read(stream, now)
            if happened is None:
                continue
            if happened.ended:
                ended.append((stream, happened))
            else:
                self._outbox.put(stream, happened, urgent=first)
        if ended:
            self._conclude(ended)
        self._outbox.spend((now - started) / 1e9, len(self._running))
        self._counters.iteration(len(self._running))

    def _conclude(self, ended: list[tuple[Stream, News]]) -> None:
        """Free the slots first, then tell the clients."""
        self._release([stream for stream, _ in ended])
        for stream, happened in ended:
            self._outbox.put(stream, happened, urgent=True)

    def _release(self, ended: list[Stream]) -> None:
        gone = set(ended)
        with self._changed:
            self._running = [stream for stream in self._running if stream not in gone]
        for stream in ended:
            self._lanes.of(stream.asked).release(stream)
            self._ended(stream)
            stream.handle = None

    def _ended(self, stream: Stream) -> None:
        self._counters.finished(stream)

    def _sent(self, stream: Stream) -> None:
        """Forget a request whose last response went out."""
        reply = stream.reply
        if reply.closed:
            with self._changed:
                self._replies.discard(reply)
                same = self._by_id.get(reply.request_id)
                if same is not None:
                    same.discard(reply)
                    if not same:
                        del self._by_id[reply.request_id]

    def _watch(self) -> None:
        """Look for vanished clients: asking costs a round trip to the server, so not in the engine's thread."""
        period = self._options.cancellation_check_period_ms / 1000
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or bool(self._failure), period):
                    return
                replies = [reply for reply in self._replies if not reply.closed]
            for reply in replies:
                if not reply.closed and reply.channel.is_cancelled():
                    with self._changed:
                        _cancel(reply)
                        self._changed.notify_all()

    def _stop_handles(self) -> None:
        for stream in self._running:
            stream.handle.cancel()
        for lane in self._lanes.busy(self._running):
            lane.step()

    def _fail_all(self, message: str, *, unavailable: bool = False) -> None:
        with self._changed:
            replies, self._replies = self._replies, set()
            self._waiting.clear()
            self._running = []
        for reply in replies:
            _cancel(reply)
            reply.fail(message, unavailable=unavailable)


def _cancel(reply: Reply) -> None:
    for stream in reply.streams:
        stream.cancelled = True
