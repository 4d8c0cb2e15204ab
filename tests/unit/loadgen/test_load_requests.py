"""The message made of a request, and how answers are counted and failures named."""

import struct

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelConfigResponse
from tritonclient.utils import InferenceServerException

from pipelines.domain.errors import UserError
from pipelines.loadgen.plan import PlannedRequest
from pipelines.loadgen.request_stream import classify
from pipelines.loadgen.server import Server, statistics_between
from pipelines.loadgen.triton_stream import TritonInterface

COUNTED = ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens")
ENSEMBLE = frozenset(("text_input", "max_tokens", "stream", "min_tokens", "end_id", *COUNTED))
OUTPUTS = frozenset(("text_output", "num_input_tokens", "num_output_tokens", "sequence_index"))


def inputs(interface: TritonInterface, *, ignore_eos: bool = True) -> dict[str, bytes]:
    """Name -> raw content of the request for 7 tokens."""
    request = interface.build(PlannedRequest("h\u00e9", 3, 7), streaming=True, ignore_eos=ignore_eos)
    assert request.parameters["triton_enable_empty_final_response"].bool_param
    return {item.name: raw for item, raw in zip(request.inputs, request.raw_input_contents, strict=True)}


def test_the_ensemble_is_asked_for_an_exact_length_and_its_counts() -> None:
    """min_tokens = max_tokens; text as length and UTF-8."""
    found = inputs(TritonInterface("ensemble", True, True, ENSEMBLE, OUTPUTS))
    assert found["text_input"] == b"\x03\x00\x00\x00h\xc3\xa9"
    assert found["max_tokens"] == found["min_tokens"] == struct.pack("<i", 7)
    assert found["stream"] == found["return_num_output_tokens"] == found["exclude_input_in_output"] == b"\x01"
    assert found["end_id"] == struct.pack("<i", -1)  # a model may have several ends, and min_tokens forbids one


def test_only_outputs_that_are_read_are_asked_for() -> None:
    """Small answers."""
    ensemble = TritonInterface("m", True, True, ENSEMBLE, OUTPUTS)
    full = ensemble.build(PlannedRequest("x", 1, 1), streaming=True, ignore_eos=True)
    assert [item.name for item in full.outputs] == ["text_output", "num_output_tokens", "num_input_tokens"]
    assert list(full.inputs[0].shape) == [1, 1]
    bare = TritonInterface("m", False, True, frozenset(("text_input", "max_tokens")), frozenset(("text_output",)))
    small = bare.build(PlannedRequest("x", 1, 1), streaming=False, ignore_eos=True)
    assert [item.name for item in small.outputs] == ["text_output"]
    assert [(item.name, list(item.shape)) for item in small.inputs] == [("text_input", [1]), ("max_tokens", [1])]


def test_a_model_without_min_tokens_gets_no_end_token() -> None:
    """end_id = -1 is never generated."""
    assert inputs(TritonInterface("m", True, True, ENSEMBLE - {"min_tokens"}, OUTPUTS))["end_id"] == struct.pack(
        "<i", -1
    )


def test_a_model_may_stop_early_when_asked_to() -> None:
    """ignore_eos=false sends neither."""
    assert not {"min_tokens", "end_id"} & set(
        inputs(TritonInterface("m", True, True, ENSEMBLE, OUTPUTS), ignore_eos=False)
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[request id: 7] Exceeds maximum queue size", "rejected"),
        ("Maximum queue size of 8 has been reached", "rejected"),
        ("Request timeout expired", "timeout"),
        ("Request was cancelled", "cancelled"),
        ("Model 'ensemble' is not ready", "connection"),
        ("Prompt length (2000) exceeds maximum input length (1024)", "invalid"),
    ],
)
def test_errors_are_named_by_what_the_server_says(text: str, kind: str) -> None:
    """Texts of Triton and of TensorRT-LLM."""
    assert classify(text, accepted=False) == kind


def test_the_fault_of_an_accepted_request_is_the_servers() -> None:
    """A stream that breaks off after tokens was no bad request; a timeout stays one."""
    assert classify("Stub process 'tensorrt_llm_0_0' is not healthy.", accepted=True) == "server_error"
    assert classify("Request timeout expired", accepted=True) == "timeout"


def test_server_statistics_are_of_the_window_alone() -> None:
    """Of 30 requests 10 were before; queue 10 ms in all before, 50 ms after: 2 ms each."""
    keys = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    empty = {f"{key}_{unit}": 0 for key in keys for unit in ("count", "ns")} | {"inferences": 0, "executions": 0}
    before = {"m": empty | {"success_count": 10, "queue_count": 10, "queue_ns": 10_000_000}}
    after = {"m": empty | {"success_count": 30, "queue_count": 30, "queue_ns": 50_000_000, "fail_count": 1}}
    found = statistics_between(before, after)["m"]
    assert found == {"inferences": 0, "executions": 0, "succeeded": 20, "failed": 1, "queue_mean_s": 0.002}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("This protocol is restricted, expecting header 'k'", "'a' is not ready on .*, or not a model.$"),
        ("Deadline Exceeded", "says: Deadline Exceeded"),
    ],
)
def test_only_a_refusal_is_a_closed_index_and_an_empty_list_is_not_shown(message: str, said: str) -> None:
    class Client:
        def is_server_live(self, **_: object) -> bool:
            return True

        def is_model_ready(self, name: str, **_: object) -> bool:
            return False

        def get_model_repository_index(self, **_: object) -> None:
            raise InferenceServerException(message)

        get_inference_statistics = get_model_repository_index

    server = Server("127.0.0.1:1")
    server._client = Client()
    with pytest.raises(UserError, match=said):
        server.describe("a", streaming=True)


@pytest.mark.parametrize("name", ["preprocessing", "step"])
def test_a_model_behind_the_ensemble_that_does_not_answer_is_said(name: str) -> None:
    """Only a server without `preprocessing` has its defaults."""

    class Client:
        def is_server_live(self, **_: object) -> bool:
            return True

        def is_model_ready(self, name: str, **_: object) -> bool:
            return True

        def get_model_config(self, asked: str, **_: object) -> ModelConfigResponse:
            if asked == name:
                raise InferenceServerException("Deadline Exceeded")
            config = ModelConfig(name=asked)
            config.ensemble_scheduling.step.add(model_name="step")
            return ModelConfigResponse(config=config)

    server = Server("127.0.0.1:1")
    server._client = Client()
    with pytest.raises(UserError, match="says: Deadline Exceeded"):
        server.describe("a", streaming=True)
