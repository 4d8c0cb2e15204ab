"""Triton model `tensorrt_llm` of the CPU repository: the OpenVINO engine behind TensorRT-LLM's interface.

Thin: it turns Triton's requests into the scheduler's and the scheduler's response parts into Triton's responses.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.characters import PartialCharacters
from pipelines.engines.openvino.generation_request import Guides, ModelLimits
from pipelines.engines.openvino.lora import read_adapters
from pipelines.engines.openvino.request_inputs import read_requests
from pipelines.engines.openvino.runtime import EngineFolder
from pipelines.engines.openvino.scheduler import QueueFullError, Scheduler
from pipelines.engines.openvino.sequences import ResponsePart
from pipelines.engines.openvino.serving_options import ServingOptions
from pipelines.engines.openvino.serving_stats import GAUGES, HISTOGRAMS, LENGTH_BUCKETS
from pipelines.host.token_socket import PARAMETER, TokenConnections, parsed

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
SWITCH_SECONDS = 0.0002
"""Switch interval of the interpreter: the engine's step holds the lock, and no thread should wait for it twice."""
SUPERVISED = "TRTLLM_PIPELINES_RESTARTS"
"""Variable that pipelines/serving/process.py sets."""
PLAIN = {"output_ids", "sequence_length", "kv_cache_reused_blocks"}
"""Outputs whose last values are all that is needed besides the tokens."""
KEY_BYTES = 8
KEY_PERIOD_S = 0.1
"""How often a streamed answer shows its key; each costs a tensor, and a look by the next step of the ensemble."""
ERRORS_OUT_S = 0.5
"""How long the errors of running requests may take to reach their clients."""


class TritonPythonModel:
    """Python-backend entry point."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine that config.pbtxt names."""
        sys.setswitchinterval(SWITCH_SECONDS)
        config = json.loads(args["model_config"])
        try:
            options = ServingOptions.from_model_config(config, Path(args["model_repository"]).parent)
            folder = EngineFolder.load(options.engine_dir)
            adapters = read_adapters(options.lora_dir) if options.lora_dir is not None else {}
            self._limits = _limits(options, folder, adapters)
            self._scheduler = Scheduler(folder, options, _characters(options), adapters, _end_if_supervised)
        except UserError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._logits_type = _logits_type(config)
        self._keys = Keys()
        self._connections = TokenConnections()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = Metrics(self._scheduler, labels, options.stats_check_period_ms / 1000)
        gc.freeze()  # no later collection walks through the modules and the model, while all answers wait for it

    def execute(self, requests: list[Any]) -> None:
        """Queue requests; answers come from the scheduler's threads."""
        for request in requests:
            channel = TritonChannel(request, self._logits_type, self._connections)
            try:
                self._take(request, channel)
            except UserError as error:
                channel.fail(str(error), unavailable=isinstance(error, QueueFullError))
            except Exception as error:  # noqa: BLE001 - of this request only; the others of the batch must go on
                pb_utils.Logger.log_error(f"tensorrt_llm: {traceback.format_exc()}")
                channel.fail(f"The request could not be read: {error}", unavailable=False)

    def finalize(self) -> None:
        """Cancel what runs and join all threads."""
        self._metrics.close()
        self._keys.close()
        self._scheduler.close()
        self._connections.close()

    def _take(self, request: Any, channel: TritonChannel) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        stop = inputs.get("stop")
        if stop is not None and stop.any():
            if not request.request_id():
                raise UserError("stop=true came without a request id.", todo="Send the id of the request to stop.")
            self._scheduler.cancel(request.request_id())
            channel.close()
            return
        prompts = read_requests(inputs, self._limits)
        if prompts[0].streaming and "cancellation_key" in inputs:
            self._keys.give(inputs["cancellation_key"].flat[0], channel)
        self._scheduler.submit(prompts, channel, request.request_id(), request.timeout())


class TritonChannel:
    """Answers one Triton request.

    Asking whether a request is cancelled after, or while, its final response goes out crashes this server version
    (python backend 2.51: the response factory is gone by then). Both therefore happen under one lock.
    """

    def __init__(self, request: Any, logits_type: Any, connections: TokenConnections) -> None:
        self._connections = connections
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        parameter = json.loads(request.parameters() or "{}").get(PARAMETER, "")
        self._target = parsed(str(parameter)) if self._wanted <= PLAIN else None
        self._logits_type = logits_type
        self._lock = threading.Lock()
        self._closed = False
        self.key: np.ndarray[Any, Any] | None = None
        """[1, 2], shown in responses, so that a later step of an ensemble can say whose client is gone."""
        self.left = False
        """The client is gone, as that step was told."""
        self._show_key_at = 0.0

    def send(self, part: ResponsePart) -> None:
        """Send a response: all parts of one answer but the last to the token socket, where the request names one."""
        several = part.sequence.response.batch > 1 or part.sequence.request.num_return_sequences > 1
        if self._target is not None and not (part.last or several):
            if self._connections.send(self._target, part.rows[0]):
                return
            self._target = None
        self._send(part)

    @property
    def waits(self) -> bool:
        """Whether sending waits for tritonserver."""
        return self._target is None

    def _send(self, part: ResponsePart) -> None:
        # Python backend drops outputs that nobody asked for, but there are up to twelve with every token, and before
        # 24.12 it dropped their last reference without the interpreter's lock (its pull request 390).
        tensors = [pb_utils.Tensor(*entry) for entry in self._tensors(part) if entry[0] in self._wanted]
        response = pb_utils.InferenceResponse(tensors)
        if part.last:
            self._finish(response)
        else:
            self._sender.send(response)

    def fail(self, message: str, *, unavailable: bool) -> None:
        """Send an error."""
        kind = pb_utils.TritonError.UNAVAILABLE if unavailable else pb_utils.TritonError.INVALID_ARG
        self._finish(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, kind)))

    def close(self) -> None:
        """End without content."""
        self._finish(pb_utils.InferenceResponse([]))

    def is_cancelled(self) -> bool:
        """Whether the client is gone."""
        with self._lock:
            return not self._closed and (self.left or bool(self._sender.is_cancelled()))

    def _finish(self, response: Any) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sender.send(response, flags=FINAL)

    def _tensors(self, part: ResponsePart) -> list[tuple[str, np.ndarray[Any, Any]]]:
        """Name the parts of a response; clients rely on output_ids coming first."""
        request, response = part.sequence.request, part.sequence.response
        lengths = [len(row) for row in part.rows]
        tensors = [
            ("output_ids", _padded(part.rows, max(lengths), request.pad_id, np.int32)),
            ("sequence_length", np.array([lengths], dtype=np.int32)),
        ]
        if response.batch > 1:
            tensors.append(("batch_index", np.array([[part.sequence.batch_index]], dtype=np.int32)))
        if request.num_return_sequences > 1:
            tensors.append(("sequence_index", np.array([[part.sequence.sequence_index]], dtype=np.int32)))
        if part.log_probs is not None:
            longest = max(len(row) for row in part.log_probs)
            tensors.append(("cum_log_probs", np.array([part.cum_log_probs], dtype=np.float32)))
            tensors.append(("output_log_probs", _padded(part.log_probs, longest, 0, np.float32)))
        if part.context_logits is not None:
            tensors.append(("context_logits", part.context_logits[None].astype(self._logits_type)))
        if part.generation_logits is not None:
            tensors.append(("generation_logits", part.generation_logits[None].astype(self._logits_type)))
        if part.best is not None:
            tensors += [("top_token_ids", part.best.tokens[None]), ("top_log_probs", part.best.log_probs[None])]
        if part.prompt is not None:
            best = part.prompt.best
            tensors.append(("context_log_probs", part.prompt.log_probs[None]))
            tensors += [("context_top_token_ids", best.tokens[None]), ("context_top_log_probs", best.log_probs[None])]
        if self.key is not None and time.monotonic() >= self._show_key_at:
            self._show_key_at = time.monotonic() + KEY_PERIOD_S
            tensors.append(("cancellation_key", self.key))
        return tensors + _extras(part, self._wanted)


class Keys:
    """Requests by the key that came with them; hears from `postprocessing` which clients of the ensemble are gone.

    It listens on an abstract socket. The kernel gives that a number, because names would clash where servers in several
    containers share a network.
    """

    def __init__(self) -> None:
        self._channels: weakref.WeakValueDictionary[int, TritonChannel] = weakref.WeakValueDictionary()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")
        self._number = int(self._socket.getsockname()[1:], 16)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="left", daemon=True)
        self._thread.start()

    def give(self, key: np.uint64, channel: TritonChannel) -> None:
        """Let the channel show its key, after the number of the socket to send it to."""
        channel.key = np.array([[self._number, key]], dtype=np.uint64)
        self._channels[int(key)] = channel

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed:
            channel = self._channels.get(int.from_bytes(self._socket.recv(KEY_BYTES), sys.byteorder))
            if channel is not None:
                channel.left = True


class Metrics:
    """Prometheus families under the names TensorRT-LLM's backend uses, updated by a thread of their own."""

    def __init__(self, scheduler: Scheduler, labels: dict[str, str], period_s: float) -> None:
        self._scheduler, self._labels, self._period = scheduler, labels, period_s
        families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)
            for name, (_, text) in GAUGES.items()
        }
        lengths = {
            name: pb_utils.MetricFamily(
                name=name, description=f"Tokens of a request: {kind}", kind=pb_utils.MetricFamily.HISTOGRAM
            )
            for name, kind in HISTOGRAMS.items()
        }
        self._families = families | lengths  # a family must outlive its metrics
        self._gauges: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], float] = {}
        self._histograms = [
            lengths[name].Metric(labels={**labels, "response_metric_type": kind}, buckets=list(LENGTH_BUCKETS))
            for name, kind in HISTOGRAMS.items()
        ]
        self._update()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            self._update()

    def _update(self) -> None:
        """Set what has changed: each costs a round trip to the server."""
        snapshot = self._scheduler.snapshot()
        for family, values in snapshot.gauges.items():
            for kind, value in values.items():
                if self._shown.get((family, kind)) != value:
                    self._gauge(family, kind).set(value)
                    self._shown[family, kind] = value
        for lengths in snapshot.lengths:
            for histogram, tokens in zip(self._histograms, lengths, strict=True):
                histogram.observe(tokens)

    def _gauge(self, family: str, kind: str) -> Any:
        if (family, kind) not in self._gauges:
            self._gauges[family, kind] = self._families[family].Metric(labels={**self._labels, GAUGES[family][0]: kind})
        return self._gauges[family, kind]


def _end_if_supervised() -> None:
    """End this process after its engine has failed, where `make serve` then starts the server again.

    Elsewhere it stays: tritonserver itself would leave further requests without an answer, here they get an error.
    """
    if SUPERVISED in os.environ:
        time.sleep(ERRORS_OUT_S)
        os._exit(1)


def _extras(part: ResponsePart, wanted: Set[str]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    sequence, request = part.sequence, part.sequence.request
    extras: list[tuple[str, Any, Any]] = []
    if request.num_input_tokens:
        extras.append(("num_input_tokens", len(request.prompt), np.int32))
    if request.num_output_tokens:
        # Of this response, as TensorRT-LLM's backend counts (model_instance_state.cc): clients add them up.
        new = sum(len(row) for row in part.rows) if request.streaming else len(sequence.tokens)
        extras.append(("num_output_tokens", new, np.int32))
    if request.perf_metrics:
        stamps, kv, draft = sequence.stamps, sequence.kv, sequence.draft
        extras += [
            ("kv_cache_alloc_new_blocks", kv.new, np.int32),
            ("kv_cache_reused_blocks", kv.reused, np.int32),
            ("kv_cache_alloc_total_blocks", kv.total, np.int32),
            ("arrival_time_ns", stamps.arrival, np.int64),
            ("first_scheduled_time_ns", stamps.first_scheduled, np.int64),
            ("first_token_time_ns", stamps.first_token, np.int64),
            ("last_token_time_ns", stamps.last_token, np.int64),
            ("acceptance_rate", draft.rate, np.float32),
            ("total_accepted_draft_tokens", draft.accepted, np.int32),
            ("total_draft_tokens", draft.proposed, np.int32),
        ]
    return [(name, np.array([[value]], dtype=kind)) for name, value, kind in extras if name in wanted]


def _padded(rows: list[list[Any]], longest: int, fill: int, kind: Any) -> np.ndarray[Any, Any]:
    """Return [1, beams, longest]."""
    if len(rows) == 1:
        return np.array([rows], dtype=kind)
    return np.array([[row + [fill] * (longest - len(row)) for row in rows]], dtype=kind)


def _limits(options: ServingOptions, folder: EngineFolder, lora_tasks: Iterable[int]) -> ModelLimits:
    width = folder.limits.max_beam_width
    if options.max_beam_width is not None and options.max_beam_width > width:
        raise UserError(
            f"Parameter max_beam_width={options.max_beam_width} is more than the engine's {width}.",
            todo=f"Build the engine with max_beam_width={options.max_beam_width} or more.",
        )
    return ModelLimits(
        vocab_size=folder.config.vocab_size,
        max_beam_width=options.max_beam_width or width,
        exclude_input=options.exclude_input,
        decoupled=options.decoupled,
        lora_tasks=frozenset(lora_tasks),
        draft_model=options.engine.draft_dir is not None,
        table_rows=folder.limits.max_prompt_embedding_table_size,
        hidden_size=folder.config.hidden_size,
        fold_ids=options.fold_token_ids,
        guides=_guides(options, folder),
    )


def _guides(options: ServingOptions, folder: EngineFolder) -> Guides | None:
    if not options.guided:
        return None
    if options.tokenizer_dir is None:
        raise UserError(
            "guided_decoding_backend=llguidance needs the tokenizer, and the parameter tokenizer_dir names no folder."
        )
    return Guides(options.tokenizer_dir, folder.config.vocab_size)


def _characters(options: ServingOptions) -> PartialCharacters:
    folder = options.tokenizer_dir
    if folder is None or not (folder / "tokenizer.json").is_file():
        pb_utils.Logger.log_warn(
            "tensorrt_llm: no tokenizer.json was found (parameter tokenizer_dir), so characters that span tokens are"
            " streamed in parts."
        )
        return PartialCharacters.none()
    return PartialCharacters.load(folder)


def _logits_type(config: dict[str, Any]) -> Any:
    output = next(entry for entry in config["output"] if entry["name"] == "generation_logits")
    return pb_utils.triton_string_to_numpy(output["data_type"])
