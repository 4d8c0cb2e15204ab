"""Query the server through Triton's gRPC interface: its models, statistics and versions."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.loadgen.plan import PlannedRequest

# The interface of a model on a Triton server, and the request message built for it.

TEXT, OUTPUT_TOKENS, INPUT_TOKENS = "text_output", "num_output_tokens", "num_input_tokens"
NO_END = "end_id"
_STOP_INPUTS = ("min_tokens", "min_length", NO_END)
"""Inputs that enforce the output length even if the model would stop earlier, best first: forbid the end token until
then (the ensemble's name, then genai-perf's), or have no end token."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A model as the server describes it.

    Attributes:
        model_name: its name.
        batched: whether it takes a batch dimension (max_batch_size > 0).
        decoupled: whether it can send several responses per request, which streaming needs.
        inputs: names.
        outputs: names.
        add_special_tokens: whether the preprocessing adds special tokens.
    """

    model_name: str
    batched: bool
    decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    add_special_tokens: bool = True

    @property
    def stop_input(self) -> str | None:
        """The input that makes output lengths exact, or None."""
        return next((name for name in _STOP_INPUTS if name in self.inputs), None)

    @property
    def counts_output(self) -> bool:
        """Whether the server counts output tokens itself."""
        return OUTPUT_TOKENS in self.outputs and "return_num_output_tokens" in self.inputs

    @property
    def counts_input(self) -> bool:
        """Whether the server counts input tokens itself."""
        return INPUT_TOKENS in self.outputs and "return_num_input_tokens" in self.inputs


def build_request(interface: Interface, ask: PlannedRequest, *, streaming: bool, ignore_eos: bool) -> Any:
    """Build the protobuf message of one request (`ModelInferRequest`), without its id.

    Only the outputs that are read are requested, so that the responses stay small.
    """
    request = service_pb2.ModelInferRequest(model_name=interface.model_name)
    text = ask.text.encode()
    add = _Adder(request, [1, 1] if interface.batched else [1])
    add("text_input", "BYTES", struct.pack("<I", len(text)) + text)
    add("max_tokens", "INT32", struct.pack("<i", ask.osl))
    if "stream" in interface.inputs:
        add("stream", "BOOL", struct.pack("?", streaming))
    if ignore_eos and interface.stop_input:
        if interface.stop_input != NO_END:
            add(interface.stop_input, "INT32", struct.pack("<i", ask.osl))
        if NO_END in interface.inputs:  # a model may have several ends, of which the other input forbids one
            add(NO_END, "INT32", struct.pack("<i", -1))
    for name in ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
        wanted = interface.counts_input if "input_tokens" in name else interface.counts_output
        if name in interface.inputs and (wanted or name.startswith("exclude")):
            add(name, "BOOL", b"\x01")
    for name in _outputs(interface):
        request.outputs.add(name=name)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def _outputs(interface: Interface) -> Sequence[str]:
    counted = [(OUTPUT_TOKENS, interface.counts_output), (INPUT_TOKENS, interface.counts_input)]
    return [TEXT, *(name for name, wanted in counted if wanted)]


class _Adder:
    """Appends inputs with one element."""

    def __init__(self, request: Any, shape: Sequence[int]) -> None:
        self._request, self._shape = request, shape

    def __call__(self, name: str, datatype: str, raw: bytes) -> None:
        self._request.inputs.add(name=name, datatype=datatype, shape=self._shape)
        self._request.raw_input_contents.append(raw)


_NEEDED = ("text_input", "max_tokens")
_TIMEOUT_S = 10.0
_COUNTERS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


class Server:
    """One Triton server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = triton.InferenceServerClient(url)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def is_live(self) -> bool:
        """Return whether the server responds."""
        try:
            return bool(self._client.is_server_live(client_timeout=_TIMEOUT_S))
        except InferenceServerException:
            return False

    def describe(self, model_name: str, *, streaming: bool) -> Interface:
        """Check that a model can be benchmarked, and return its interface.

        Raises:
            UserError: no server responds, or the model is missing, not ready, has another interface or cannot stream.
        """
        if not self.is_live():
            raise UserError(
                f"No Triton server responds at {self.url} (gRPC).",
                todo="Check benchmark.url: it must name the gRPC port, usually 8001, not HTTP's 8000.",
            )
        with self._faults():
            self._check_model(model_name)
            config = self._client.get_model_config(model_name, client_timeout=_TIMEOUT_S).config
        interface = Interface(
            model_name=model_name,
            batched=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled or self._any_step_decoupled(config),
            inputs=frozenset(item.name for item in config.input),
            outputs=frozenset(item.name for item in config.output),
            add_special_tokens=self._adds_special_tokens(),
        )
        _check_interface(interface, streaming, [item.name for item in config.input if not item.optional])
        return interface

    def facts(self, model_name: str) -> dict[str, Any]:
        """Return versions and names, for the result."""
        with self._faults():
            about = self._client.get_server_metadata(client_timeout=_TIMEOUT_S)
            models = self._client.get_model_repository_index(client_timeout=_TIMEOUT_S).models
        versions = {model.name: model.version for model in models if model.state == "READY"}
        return {
            "url": self.url,
            "model_name": model_name,
            "name": about.name,
            "version": about.version,
            "model_versions": versions,
        }

    def counters(self) -> dict[str, dict[str, int]]:
        """Return cumulative statistics per model: counts and ns; empty if the server does not respond."""
        try:
            answer = self._client.get_inference_statistics(client_timeout=_TIMEOUT_S)
        except InferenceServerException:
            return {}
        return {model.name: _row(model) for model in answer.model_stats}

    def _check_model(self, name: str) -> None:
        if self._client.is_model_ready(name, client_timeout=_TIMEOUT_S):
            return
        index = {m.name: m for m in self._client.get_model_repository_index(client_timeout=_TIMEOUT_S).models}
        if name in index:
            state = index[name].state or "not loaded"
            why = f" ({index[name].reason})" if index[name].reason else ""
            raise UserError(f"Model '{name}' on {self.url} is not ready: {state}{why}.", todo="See the server's log.")
        known = ", ".join(sorted(index)) or "none"
        raise UserError(
            f"benchmark.model_name='{name}' is not a model on the server at {self.url}.",
            allowed=f"It has {known}.",
            todo=did_you_mean(name, index),
        )

    def _any_step_decoupled(self, config: Any) -> bool:
        """Return whether any model of an ensemble is decoupled, which its own configuration does not state."""
        for step in config.ensemble_scheduling.step:
            inner = self._client.get_model_config(step.model_name, client_timeout=_TIMEOUT_S).config
            if inner.model_transaction_policy.decoupled:
                return True
        return False

    def _adds_special_tokens(self) -> bool:
        """Return whether the model `preprocessing` adds special tokens; by default it does."""
        try:
            config = self._client.get_model_config("preprocessing", client_timeout=_TIMEOUT_S).config
        except InferenceServerException:
            return True
        value = str(config.parameters["add_special_tokens"].string_value).strip().lower()
        return value not in ("false", "0", "no", "n", "off")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as error:
            raise UserError(f"The server at {self.url} says: {error.message()}.") from None


def _check_interface(interface: Interface, streaming: bool, required: list[str]) -> None:
    name = interface.model_name
    if missing := [key for key in _NEEDED if key not in interface.inputs]:
        raise UserError(
            f"Model '{name}' has no input '{missing[0]}'.",
            allowed=f"The load generator needs the inputs {' and '.join(_NEEDED)}; this model has "
            f"{', '.join(sorted(interface.inputs)) or 'no inputs'}.",
            todo="Set benchmark.model_name to ensemble or tensorrt_llm_bls.",
        )
    if extra := [key for key in required if key not in _NEEDED]:
        raise UserError(f"Model '{name}' needs the input '{extra[0]}', which the load generator does not send.")
    if TEXT not in interface.outputs:
        raise UserError(f"Model '{name}' has no output '{TEXT}'.", allowed=", ".join(sorted(interface.outputs)))
    if streaming and "stream" not in interface.inputs:
        raise UserError(f"Model '{name}' has no input 'stream'.", todo="Add benchmark.streaming=false.")
    if streaming and not interface.decoupled:
        raise UserError(
            f"Model '{name}' is not decoupled, so it sends one response per request and cannot stream.",
            todo="Add benchmark.streaming=false, or write the repository with decoupled mode.",
        )


def _row(model: Any) -> dict[str, int]:
    stats = model.inference_stats
    row = {"inferences": int(model.inference_count), "executions": int(model.execution_count)}
    for name in _COUNTERS:
        part = getattr(stats, name)
        row |= {f"{name}_count": int(part.count), f"{name}_ns": int(part.ns)}
    return row


def statistics_between(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, float]]:
    """Return each model's statistics between two readings: counts, mean seconds per request in queue and compute."""
    found = {}
    for name, late in after.items():
        early = before.get(name, {})
        delta = {key: value - early.get(key, 0) for key, value in late.items()}
        row: dict[str, float] = {key: delta[key] for key in ("inferences", "executions")}
        row |= {"succeeded": delta["success_count"], "failed": delta["fail_count"]}
        for part in _COUNTERS[2:]:
            count = delta[f"{part}_count"]
            if count:
                row[f"{part}_mean_s"] = delta[f"{part}_ns"] / count / 1e9
        found[name] = row
    return found
