"""In-flight batching for a server: requests arrive at any time, one thread runs the engine, responses stream out.

openvino_genai's pipeline does batching and paging; this adds what a server needs around it: a bounded queue with
deadlines, stop sequences, cancellation by request id or when a client disconnects, statistics, and a shutdown that
reaches every client. Requests that need logits, which the pipeline does not expose, go to `LogitsLoop` beside it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.adapter_pipelines import AdapterPipelines, abandon, read
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import GenerationRequest
from pipelines.engines.openvino.logits_loop import LogitsLoop, ResponseSender
from pipelines.engines.openvino.lora import LoraAdapter
from pipelines.engines.openvino.runtime import EngineFolder, check_request
from pipelines.engines.openvino.sequences import Channel, Response, Sequence, StepOutput, nothing_more, take_given_up
from pipelines.engines.openvino.serving_options import ServingOptions
from pipelines.engines.openvino.serving_stats import EngineCounters, EngineSnapshot

log = logging.getLogger(__name__)

STOPPED = "The engine is stopping; no new requests are accepted."


class QueueFullError(UserError):
    """The queue is full."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"Exceeds maximum queue size: the request was not taken, Maximum queue size of {limit} reached.",
            todo="Send fewer concurrent requests, or raise max_queue_size.",
        )


class Scheduler:
    """Owns and runs the pipelines. All methods may be called from any thread."""

    def __init__(
        self,
        folder: EngineFolder,
        options: ServingOptions,
        characters: PartialCharacters,
        adapters: Mapping[int, LoraAdapter] | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the engine and start the threads.

        Args:
            folder: the engine.
            options: run-time options.
            characters: which tokens to hold back.
            adapters: LoRA task id -> adapter; the engine is loaded once more for each.
            failed: called when the engine has failed, which it does for good, and every client was told.

        Raises:
            UserError: the KV cache is too small for one request, or an adapter or the draft model does not match.
        """
        self.folder, self._options = folder, options.fitted(folder)
        options = self._options
        adapters = adapters or {}
        self._pipelines = AdapterPipelines(folder, options.engine, adapters)
        self._counters = EngineCounters(self._pipelines.max_blocks, folder.limits.max_batch_size)
        self._sender = ResponseSender(characters, self._sent)
        self._logits_loop = LogitsLoop(folder, options.engine, adapters, self._sender, self._counters.finished)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, set[Response]] = {}
        self._responses: set[Response] = set()
        self._failed = failed
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

    def submit(
        self, prompts: list[GenerationRequest], channel: Channel, request_id: str = "", timeout_us: int = 0
    ) -> None:
        """Queue the prompts of one request.

        Args:
            prompts: the batch.
            channel: receives all responses, including errors of the engine.
            request_id: id for `cancel`; empty means none.
            timeout_us: time after which a request that has not started fails; 0 means never.

        Raises:
            UserError: a prompt is too long, or the queue is full (`QueueFullError`); nothing was queued.
        """
        for request in prompts:
            check_request(self.folder, self._options.engine, len(request.prompt), request.max_tokens)
        response = Response(channel, request_id, len(prompts))
        deadline = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
        for index, request in enumerate(prompts):
            answers = request.num_return_sequences or 1 if request.beam_width == 1 else 1
            for answer in range(answers):
                Sequence(request, response, index, answer, deadline)
        with self._changed:
            self._check_queue(len(response.sequences))
            self._responses.add(response)
            if request_id:
                self._by_id.setdefault(request_id, set()).add(response)
            needing_logits = [sequence for sequence in response.sequences if sequence.request.needs_logits]
            self._waiting.extend(sequence for sequence in response.sequences if not sequence.request.needs_logits)
            self._changed.notify_all()
        self._logits_loop.submit(needing_logits)

    def cancel(self, request_id: str) -> bool:
        """End the requests with this id; each gets a last response with its tokens so far.

        Returns:
            whether there were any.
        """
        with self._changed:
            responses = self._by_id.get(request_id, set())
            for response in responses:
                _cancel(response)
            self._changed.notify_all()
        return bool(responses)

    def snapshot(self) -> EngineSnapshot:
        """Return the current statistics."""
        with self._changed:
            waiting, running = len(self._waiting), list(self._running)
        context = sum(1 for sequence in running if not sequence.stamps.first_token)
        cache = self._pipelines.cache_percent(running)
        return self._counters.snapshot(
            waiting + self._logits_loop.waiting, len(running) + self._logits_loop.running, context, cache
        )

    def close(self) -> None:
        """Cancel running requests, notify every client, and join the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._logits_loop.close()
        self._sender.close()
        self._fail_all(STOPPED)

    def _check_queue(self, new: int) -> None:
        if self._closing:
            raise UserError(STOPPED)
        if self._failure:
            raise UserError(f"The engine has failed: {self._failure}", todo="Load the model again.")
        limit, batch = self._options.max_queue_size, self.folder.limits.max_batch_size
        if limit and new > limit + batch:  # waiting would not help
            raise UserError(
                f"The request asks for {new} answers; this engine runs up to {batch} at a time and lets {limit} wait.",
                todo="Send several requests, or raise max_queue_size.",
            )
        if limit and len(self._waiting) + self._logits_loop.waiting + new > limit + self._free_slots():
            raise QueueFullError(limit)

    def _free_slots(self) -> int:
        return max(0, self.folder.limits.max_batch_size - len(self._running))

    def _guarded(self) -> None:
        """Run until closed; a failure inside is reported to every client."""
        try:
            self._run()
        except Exception as error:  # the engine's own errors are plain RuntimeErrors
            log.exception("the engine failed")
            with self._changed:
                self._failure = str(error) or type(error).__name__
            self._fail_all(f"The engine has failed: {self._failure}", unavailable=True)
            self._failed()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._closing)
                if self._closing:
                    for sequence in self._running:
                        sequence.handle.cancel()
                    for pipeline in self._pipelines.busy(self._running):
                        pipeline.step()
                    return
                admitted = self._admit()
            for sequence in admitted:
                self._start(sequence)
            if self._running:
                self._iterate()

    def _admit(self) -> list[Sequence]:
        """Take from the queue what may start now, in order of arrival."""
        admitted: list[Sequence] = []
        free = self._free_slots()
        for sequence, output in take_given_up(self._waiting):
            self._sender.send(sequence, output)
        while self._waiting:
            sequence = self._waiting[0]
            pipeline = self._pipelines.of(sequence.request)
            # under guaranteed_no_evict, a request starts only when all the blocks it may need are free
            if free <= len(admitted) or (self._options.guaranteed_no_evict and not pipeline.fits(sequence.request)):
                break
            if not pipeline.has_rows(sequence.request):
                break
            self._waiting.popleft()
            pipeline.reserve(sequence.request)
            admitted.append(sequence)
        return admitted

    def _start(self, sequence: Sequence) -> None:
        try:
            self._pipelines.of(sequence.request).start(sequence, self._next_handle)
        except RuntimeError as error:  # the engine itself rejects some combinations, e.g. a broken grammar
            self._pipelines.of(sequence.request).forget(sequence.request)
            self._sender.send(sequence, nothing_more(sequence, f"The engine rejected the request: {error}"))
            return
        self._next_handle += 1
        sequence.stamps.first_scheduled = time.monotonic_ns()
        with self._changed:
            self._running.append(sequence)

    def _iterate(self) -> None:
        """Run one iteration of the engine and process its output."""
        cancelled = [sequence for sequence in self._running if sequence.cancelled]
        if cancelled:
            self._conclude([(sequence, abandon(sequence)) for sequence in cancelled])
        for pipeline in self._pipelines.busy(self._running):
            pipeline.step()
        now = time.monotonic_ns()
        steps = ((sequence, read(sequence, now)) for sequence in self._running)
        outputs = [(sequence, step) for sequence, step in steps if step is not None]
        ended = [(sequence, step) for sequence, step in outputs if step.ended]
        self._sender.send_all((sequence, step) for sequence, step in outputs if not step.ended)
        if ended:
            self._conclude(ended)
        self._counters.iteration()

    def _conclude(self, ended: list[tuple[Sequence, StepOutput]]) -> None:
        """Free the slots first, then notify the clients."""
        gone = {sequence for sequence, _ in ended}
        with self._changed:
            self._running = [sequence for sequence in self._running if sequence not in gone]
        for sequence, _ in ended:
            self._pipelines.of(sequence.request).release(sequence)
            self._counters.finished(sequence)
            sequence.handle = None
        self._sender.send_all(ended)

    def _sent(self, sequence: Sequence) -> None:
        """Forget a request after its last response was sent."""
        response = sequence.response
        if response.closed:
            with self._changed:
                self._responses.discard(response)
                same = self._by_id.get(response.request_id)
                if same is not None:
                    same.discard(response)
                    if not same:
                        del self._by_id[response.request_id]

    def _watch(self) -> None:
        """Check for disconnected clients; a check costs a round trip to the server, so not in the engine's thread."""
        period = self._options.cancellation_check_period_ms / 1000
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or bool(self._failure), period):
                    return
                responses = [response for response in self._responses if not response.closed]
            for response in responses:
                if not response.closed and response.channel.is_cancelled():
                    with self._changed:
                        _cancel(response)
                        self._changed.notify_all()

    def _fail_all(self, message: str, *, unavailable: bool = False) -> None:
        with self._changed:
            responses, self._responses = self._responses, set()
            self._waiting.clear()
            self._running = []
        for response in responses:
            _cancel(response)
            response.fail(message, unavailable=unavailable)


def _cancel(response: Response) -> None:
    for sequence in response.sequences:
        sequence.cancelled = True
