"""The interface of a model on a Triton server, and the request message built for it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from pipelines.loadgen.plan import PlannedRequest

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
