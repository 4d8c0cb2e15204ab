"""Triton model `tensorrt_llm_bls`: the ensemble's interface, with the steps called one by one.

Business logic scripting costs a round trip more than the ensemble and can do what an ensemble cannot: with the
parameter `accumulate_tokens` every streamed response holds the whole text so far; with `tensorrt_llm_draft_model_name`
a request's `num_draft_tokens` decodes speculatively; with `retention_tokens` the blocks of every prompt's beginning are
kept in the KV cache with the priority given. The same file serves the GPU and the CPU repository.

An instance answers one request at a time: with several, two threads of a process would make nested calls at once, which
Triton's python backend cannot do without a deadlock sooner or later. As many requests are answered at a time as the
model has instances (`triton.bls_instance_count`); the others wait in Triton's queue.
"""

from __future__ import annotations

import gc
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# these three lie beside this file
from bls_inputs import (  # type: ignore[import-not-found]
    FROM_ENCODER,
    FROM_PREPROCESSING,
    IMAGE,
    PASSED_ON,
    TO_ENCODER,
    TO_MODEL,
    TO_PREPROCESSING,
    RefusedError,
    Retention,
    parameter,
    refuse,
)
from nested import NestedCalls, as_request, ask_once  # type: ignore[import-not-found]
from speculation import Speculation, as_output  # type: ignore[import-not-found]

Array = np.ndarray[Any, Any]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
REPLACEMENT = "\ufffd"
CANCELLATION_PERIOD_S = 0.1


class TritonPythonModel:
    """Python-backend entry point."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters `tensorrt_llm_model_name`, `accumulate_tokens`, of draft and vision model, retention."""
        config = json.loads(args["model_config"])
        self._model = parameter(config, "tensorrt_llm_model_name") or "tensorrt_llm"
        self._accumulate = parameter(config, "accumulate_tokens").lower() in ("true", "1")
        self._draft = parameter(config, "tensorrt_llm_draft_model_name")
        self._excludes_input = parameter(config, "exclude_input_in_output").lower() in ("true", "1")
        self._retention = Retention.of(config)
        self._encoders = parameter(config, "multimodal_encoders_name")
        decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self._nested = NestedCalls(decoupled=decoupled)
        gc.freeze()  # a full collection would walk through all that is imported, while requests wait

    def execute(self, requests: list[Any]) -> None:
        """Answer the requests, one after the other."""
        for request in requests:
            self._answer(Call(request))

    def _answer(self, call: Call) -> None:
        try:
            if call.streaming:
                for tensors in self._responses(call):
                    call.send(tensors)
                call.finish(None)
            else:
                self._answer_whole(call)
        except RefusedError as fault:
            call.fail(str(fault), pb_utils.TritonError.INVALID_ARG)
        except Exception as error:  # noqa: BLE001 - every request must get its end, or its client waits for ever
            pb_utils.Logger.log_error(f"tensorrt_llm_bls: {error}")
            call.fail(str(error), pb_utils.TritonError.INTERNAL)

    def _answer_whole(self, call: Call) -> None:
        """One response per sequence; the end rides on the last, as models without streaming need it."""
        responses = list(self._responses(call))
        for tensors in responses[:-1]:
            call.send(tensors)
        call.finish(responses[-1] if responses else None)

    def _responses(self, call: Call) -> Iterator[list[Any]]:
        """Run the three steps; yield the tensors of a response for each one of the model."""
        refuse(call.inputs, has_draft=bool(self._draft), has_encoder=bool(self._encoders))
        prepared = self._prepare(call)
        texts = _Accumulator() if self._accumulate and call.streaming else None
        for outputs in self._generate(call, prepared):
            ids, lengths = outputs["output_ids"], outputs["sequence_length"]
            if texts is not None:
                ids, lengths = texts.extend(outputs)
            text = ask_once("postprocessing", {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}, ["OUTPUT"])["OUTPUT"]
            if texts is not None:
                text = _without_partial_characters(text)
            extras = [pb_utils.Tensor(name, values) for name, values in outputs.items() if name in PASSED_ON]
            yield [pb_utils.Tensor("text_output", text), *extras]

    def _prepare(self, call: Call) -> dict[str, Array]:
        inputs = {inner: call.inputs[name] for name, inner in TO_PREPROCESSING.items() if name in call.inputs}
        images = {"IMAGE_BYTES": call.inputs[IMAGE]} if IMAGE in call.inputs else {}
        outputs = [*FROM_PREPROCESSING, *(TO_ENCODER if images else ())]
        found = ask_once("preprocessing", {**inputs, **images}, outputs)
        prepared = {FROM_PREPROCESSING[name]: values for name, values in found.items() if name in FROM_PREPROCESSING}
        if images:
            pixels = {inner: found[name] for name, inner in TO_ENCODER.items()}
            rows = ask_once(self._encoders, pixels, list(FROM_ENCODER))
            prepared |= {FROM_ENCODER[name]: values for name, values in rows.items()}
        prepared |= {inner: call.inputs[name] for name, inner in TO_MODEL.items() if name in call.inputs}
        return prepared

    def _generate(self, call: Call, inputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
        if call.draft_tokens:
            with self._watched(call):
                yield from self._speculate(call, inputs)
            return
        several = call.streaming or len(call.inputs["text_input"]) > 1 or call.sequences > 1
        watched: AbstractContextManager[None] = nullcontext() if several else self._watched(call)
        with watched:
            for outputs in self._ask(self._model, call, {**inputs, **self._retention.inputs(inputs)}):
                yield outputs
                if several:
                    self._stop_if_left(call)

    def _speculate(self, call: Call, inputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
        """Let the draft model guess; one response per round when streaming, else one for all."""
        work = Speculation(inputs, call.draft_tokens, call.uses_draft_logits)

        def draft(asked: dict[str, Array]) -> dict[str, Array]:
            return self._ask_once(self._draft, call, asked)

        def target(asked: dict[str, Array]) -> dict[str, Array]:
            return self._ask_once(self._model, call, {**asked, **self._retention.inputs(inputs)})

        for new in work.rounds(draft, target, lambda: call.stopped):
            if call.streaming:
                yield {**as_output(new), **work.statistics()}
        if not call.streaming:
            keep = [] if call.excludes_input(default=self._excludes_input) else inputs["input_ids"][0].tolist()
            yield {**as_output(keep + work.made), **work.statistics()}

    def _ask_once(self, model: str, call: Call, inputs: dict[str, Array]) -> dict[str, Array]:
        """The one response of a request that does not stream; empty when it was stopped."""
        responses = list(self._ask(model, call, inputs))
        return responses[-1] if responses else {}

    def _ask(self, model: str, call: Call, inputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
        outputs = ["output_ids", "sequence_length", *sorted(PASSED_ON)]
        asked = as_request(model, inputs, outputs, call.inner_id, call.timeout_us())
        yield from self._nested.ask(asked, call.pass_queue)

    @contextmanager
    def _watched(self, call: Call) -> Iterator[None]:
        """Stop the generation from another thread when the client leaves.

        Only while each nested call has one response (both engines send the end with the last one): a second one,
        arriving while the main thread takes the first and this one makes a call, would be the deadlock.
        """
        done = threading.Event()

        def watch() -> None:
            while not (call.stopped or done.wait(CANCELLATION_PERIOD_S)):
                self._stop_if_left(call)

        watcher = threading.Thread(target=watch, name="cancellation", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _stop_if_left(self, call: Call) -> None:
        """Stop the generation if the client is gone; asks at most every `CANCELLATION_PERIOD_S`."""
        now = time.monotonic()
        if not call.stopped and now >= call.ask_again:
            call.ask_again = now + CANCELLATION_PERIOD_S
            if call.is_cancelled():
                call.stopped = True
                self._stop(call)

    def _stop(self, call: Call) -> None:
        one = np.array([[1]], dtype=np.int32)
        inputs = {"input_ids": one, "input_lengths": one, "request_output_len": one, "stop": np.array([[True]])}
        for _ in self._nested.ask(as_request(self._model, inputs, ["output_ids"], call.inner_id), call.pass_queue):
            pass


class Call:
    """One request being answered.

    Asking whether a request is cancelled after, or while, its final response goes out crashes python backend 2.51;
    both happen under one lock.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._until = time.monotonic_ns() + request.timeout() * 1000 if request.timeout() else 0
        self.inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        batch = len(self.inputs["text_input"])
        # flags that the server strips of their last dimension get it back, for the same server to strip it again
        self.inputs = {
            name: values.reshape(batch, -1) if values.ndim == 1 else values for name, values in self.inputs.items()
        }
        self.inner_id = f"bls-{uuid.uuid4().hex}"
        self.stopped = False
        self.ask_again = 0.0
        self._lock = threading.Lock()
        self._finished = False

    def timeout_us(self) -> int:
        """Return how long the model may let this request wait, in microseconds; 0 is any time.

        Raises:
            RefusedError: the client's time is over.
        """
        if not self._until:
            return 0
        left = (self._until - time.monotonic_ns()) // 1000
        if left <= 0:
            raise RefusedError("The request waited longer than its timeout.")
        return int(left)

    @property
    def streaming(self) -> bool:
        """Whether the client wants pieces."""
        return "stream" in self.inputs and bool(self.inputs["stream"].any())

    @property
    def sequences(self) -> int:
        """How many answers to each prompt are asked for."""
        return int(self.inputs["num_return_sequences"].max()) if "num_return_sequences" in self.inputs else 1

    @property
    def draft_tokens(self) -> int:
        """How many tokens are to be guessed at a time; 0 is no speculation."""
        return int(self.inputs["num_draft_tokens"].max()) if "num_draft_tokens" in self.inputs else 0

    @property
    def uses_draft_logits(self) -> bool:
        """Whether the draft's logits go to the target as well."""
        return "use_draft_logits" in self.inputs and bool(self.inputs["use_draft_logits"].any())

    def excludes_input(self, *, default: bool) -> bool:
        """Whether the answer comes without the prompt."""
        given = self.inputs.get("exclude_input_in_output")
        return default if given is None else bool(given.any())

    def is_cancelled(self) -> bool:
        """Whether the client is gone."""
        with self._lock:
            return not self._finished and bool(self._sender.is_cancelled())

    def pass_queue(self) -> bool:
        """Ask the same for the way the question takes; False when it was not asked because the answer is known."""
        with self._lock:
            return not self._finished and not self._sender.is_cancelled()

    def send(self, tensors: list[Any]) -> None:
        """Send a response that is not the last.

        The list lives until it is sent: of outputs that the client did not ask for, python backend before 24.12 would
        else drop the last reference without the interpreter's lock (its pull request 390).
        """
        self._sender.send(pb_utils.InferenceResponse(tensors))

    def finish(self, tensors: list[Any] | None) -> None:
        """End the request, with a last response if there is one."""
        self._finish(None if tensors is None else pb_utils.InferenceResponse(tensors))

    def fail(self, message: str, kind: Any) -> None:
        """End the request with an error."""
        self._finish(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, kind)))

    def _finish(self, response: Any) -> None:
        with self._lock:
            if self._finished:
                return
            self._finished = True
            if response is None:
                self._sender.send(flags=FINAL)
            else:
                self._sender.send(response, flags=FINAL)


class _Accumulator:
    """All tokens so far of every sequence of a request."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], list[list[int]]] = {}

    def extend(self, outputs: dict[str, Array]) -> tuple[Array, Array]:
        """Append the new tokens of a response; return (ids [1, beams, n], lengths [1, beams]) of all."""
        key = (_index(outputs, "batch_index"), _index(outputs, "sequence_index"))
        new = [
            row[:length]
            for row, length in zip(
                outputs["output_ids"][0].tolist(), outputs["sequence_length"][0].tolist(), strict=True
            )
        ]
        rows = self._tokens.setdefault(key, [[] for _ in new])
        for row, more in zip(rows, new, strict=True):
            row.extend(more)
        longest = max(len(row) for row in rows)
        ids = np.array([[row + [0] * (longest - len(row)) for row in rows]], dtype=np.int32)
        return ids, np.array([[len(row) for row in rows]], dtype=np.int32)


def _index(outputs: dict[str, Array], name: str) -> int:
    return int(outputs[name].reshape(-1)[0]) if name in outputs else 0


def _without_partial_characters(texts: Array) -> Array:
    """Cut what a decoder writes for a character that is not complete yet."""
    kept = [text.decode("utf-8").rstrip(REPLACEMENT).encode("utf-8") for text in texts]
    return np.array(kept, dtype=object)
