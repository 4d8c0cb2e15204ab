"""Nonsense through every public door: the sender reads what is wrong with it, and nobody else notices."""

import http.client
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pipelines.host.supervisor import STACK_BYTES
from pipelines.serving.process import TritonServer
from tests.contract.faults.well_behaved import PROMPT, References, core
from tests.support.served_gemma import Client

pytestmark = pytest.mark.thorough

grpc_core = pytest.importorskip("grpc")

DOORS = [(model, way) for model in ("ensemble", "tensorrt_llm_bls") for way in ("generate", "generate_stream")]
MILLION = 1_000_000
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


@pytest.fixture(autouse=True, scope="module")
def _others_get_the_same(references: References) -> Any:
    """After all of this module, as before."""
    yield
    references.check()


def post(port: int, path: str, body: bytes, kind: str = "application/json") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    status, text = answer.status, answer.read().decode()
    connection.close()
    return status, text


def generate(server: TritonServer, model: str, way: str, body: bytes, kind: str = "application/json") -> str:
    """The error of a request that must fail."""
    status, text = post(server.ports["http_port"], f"/v2/models/{model}/{way}", body, kind)
    assert status >= 400
    return str(json.loads(text.removeprefix("data: "))["error"])


@pytest.mark.parametrize(("model", "way"), DOORS)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "document is empty"),
        (b'{"text_input": ', "failed to parse the request JSON"),
        (b"[1, 2]", "non-object"),
        (b"{}", "missing required input(s) ['text_input','max_tokens']"),
        (b'{"text_input": "a"}', "missing required input(s) ['max_tokens']"),
        (b'{"text_input": 5, "max_tokens": 4}', "non-string as string"),
        (b'{"text_input": "a", "max_tokens": "4"}', "non-signed-integer"),
        (b'{"text_input": "", "max_tokens": 4}', "QUERY (text_input) is empty"),
        (b'{"text_input": "a\xff\xfe", "max_tokens": 4}', "QUERY (text_input) is not valid UTF-8"),
        (b'{"text_input": "\xe2\x82", "max_tokens": 4}', "QUERY (text_input) is not valid UTF-8"),
        (b'{"text_input": "\\ud800", "max_tokens": 4}', "surrogate pair"),
        (b'{"text_input": "a", "max_tokens": 4, "stop_words": "\xc3"}', "STOP_WORDS_DICT (stop_words) is not"),
        (b'{"text_input": "a", "max_tokens": 4, "bad_words": "\xff"}', "BAD_WORDS_DICT (bad_words) is not valid"),
        (b'{"text_input": "a", "max_tokens": 0}', "request_output_len=0 is not valid. It must be at least 1"),
        (b'{"text_input": "a", "max_tokens": -7}', "request_output_len=-7"),
        (b'{"text_input": "a", "max_tokens": 1000000}', "max_seq_len=1024"),
        (b'{"text_input": "a", "max_tokens": 4, "temperature": -1}', "temperature=-1.0 is not valid"),
        (b'{"text_input": "a", "max_tokens": 4, "temperature": NaN}', "temperature=nan"),
        (b'{"text_input": "a", "max_tokens": 4, "temperature": 1e99}', "temperature=inf"),
        (b'{"text_input": "a", "max_tokens": 4, "top_p": 1e9}', "top_p=1000000000.0 is not valid"),
        (b'{"text_input": "a", "max_tokens": 4, "top_k": -2147483648}', "top_k=-2147483648"),
        (b'{"text_input": "a", "max_tokens": 4, "repetition_penalty": 0}', "repetition_penalty=0.0"),
        (b'{"text_input": "a", "max_tokens": 4, "presence_penalty": 1e30}', "presence_penalty="),
        (b'{"text_input": "a", "max_tokens": 4, "length_penalty": -1e30}', "len_penalty="),
        (b'{"text_input": "a", "max_tokens": 4, "beam_width": 1000}', "max_beam_width=3"),
        (b'{"text_input": "a", "max_tokens": 4, "num_return_sequences": 2000000000}', "It must be from 1 to 64"),
        (
            b'{"text_input": "a", "max_tokens": 4, "embedding_bias_words": ["a"], "embedding_bias_weights": [1e99]}',
            "embedding_bias (embedding_bias_weights) is inf",
        ),
    ],
)
def test_a_bad_body_is_explained(served: TritonServer, model: str, way: str, body: bytes, said: str) -> None:
    """Curl shows what was given, and what is allowed."""
    assert said in generate(served, model, way, body)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-38, "top_k": 50},
        {"temperature": 3e38, "top_k": 50},
        {"top_p": 1e-30, "temperature": 2.0},
        {"top_k": 2**31 - 1},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e-30},
        {"seed": 2**64 - 1, "top_k": 5},
        {"end_id": 2**31 - 1},
        {"end_id": -7},
        {"pad_id": -7},
        {"stop_words": ["", ""]},
        {"embedding_bias_words": ["a"], "embedding_bias_weights": [-3e38]},
    ],
)
def test_extreme_values_that_are_allowed_are_answered(served: TritonServer, extreme: dict[str, Any]) -> None:
    body = json.dumps({"text_input": PROMPT, "max_tokens": 4, **extreme}).encode()
    status, text = post(served.ports["http_port"], "/v2/models/ensemble/generate", body)
    assert (status, "text_output" in json.loads(text)) == (200, True)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ensembel/generate", "unknown model: 'ensembel' is not found"),
        ("ensemble/versions/7/generate", "unknown model: 'ensemble' version 7 is not found"),
    ],
)
def test_a_wrong_model_is_named(served: TritonServer, path: str, said: str) -> None:
    status, text = post(served.ports["http_port"], f"/v2/models/{path}", b'{"text_input": "a", "max_tokens": 4}')
    assert (status, said in text) == (404, True)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(
    ("kind", "count"), [("application/json", MILLION), ("application/x-www-form-urlencoded", 9000)]
)
def test_a_prompt_of_a_million_tokens_is_refused(served: TritonServer, model: str, kind: str, count: int) -> None:
    """6 MB; as curl's default form, which the HTTP library copies onto a stack, less, and the stack is large."""
    body = json.dumps({"text_input": "a the " * count, "max_tokens": 4}).encode()
    error = generate(served, model, "generate", body, kind)
    assert f"{6 * count} characters" in error
    assert "max_input_len=256" in error
    stack = re.search(r"Max stack size +(\S+)", Path(f"/proc/{served._running.pid}/limits").read_text())[1]
    assert stack == "unlimited" or int(stack) >= STACK_BYTES


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        ("ensemble", {"text_input": "a the " * MILLION, "max_tokens": 4}, "max_input_len=256"),
        ("ensemble", {"text_input": PROMPT, "max_tokens": 4, "stop_words": "the " * MILLION}, "STOP_WORDS_DICT"),
        ("tensorrt_llm", core([5] * MILLION), "max_input_len=256"),
        ("tensorrt_llm", core(tokens=MILLION), "max_seq_len=1024"),
        ("tensorrt_llm", core(np.array([[-1, 2]], np.int32)), "token id -1"),
        ("tensorrt_llm", core(stop_words_list=np.array([[[5, 5], [9, -1]]], np.int32)), "offset 9"),
        ("tensorrt_llm", core(bad_words_list=np.array([[[5, 5], [2, 1]]], np.int32)), "offset 1 after 2"),
        ("nothing", {"text_input": PROMPT}, "unknown model: 'nothing'"),
        ("ensemble", {"text_input": PROMPT, "max_tokens": 4, "nothing": 5}, "unexpected inference input 'nothing'"),
        ("ensemble", {"text_input": PROMPT, "max_tokens": 4.0}, "data-type is 'FP32'"),
        ("ensemble", {"text_input": PROMPT, "max_tokens": [4, 4]}, "unexpected shape for input 'max_tokens'"),
        ("ensemble", {"text_input": b"\xed\xa0\x80", "max_tokens": 4}, "not valid UTF-8"),
        ("ensemble", {"text_input": np.zeros((1, 0), object), "max_tokens": 4}, "text_input"),
        ("tensorrt_llm_bls", {"text_input": b"ok \xf0\x9f\x98", "max_tokens": 4}, "not valid UTF-8"),
    ],
)
def test_a_bad_tensor_is_explained(client: Client, model: str, inputs: dict[str, Any], said: str) -> None:
    """Over the stream that every benchmark client uses; the stream itself stays usable."""
    assert said in client.ask(model, **inputs).error
    assert len(client.ask("tensorrt_llm", **core()).tokens) == 8


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(struct.pack("<I", 100) + b"short", id="longer than it is"),
        pytest.param(struct.pack("<I", 0xFFFFFFFF), id="four gigabytes"),
        pytest.param(b"\x01", id="half a length"),
        pytest.param(struct.pack("<I", 1) + b"a" + struct.pack("<I", 1) + b"b", id="two texts in one"),
    ],
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_with_a_wrong_length_is_refused(served: TritonServer, model: str, raw: bytes) -> None:
    """A client that writes the wire format itself, and wrongly."""
    text = service_pb2.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    count = service_pb2.ModelInferRequest.InferInputTensor(name="max_tokens", datatype="INT32", shape=[1, 1])
    request = service_pb2.ModelInferRequest(
        model_name=model, inputs=[text, count], raw_input_contents=[raw, struct.pack("<i", 4)]
    )
    with grpc_core.insecure_channel(served.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request]), timeout=20))
    assert answers[0].error_message


def test_a_stream_cannot_be_asked_for_without_one(served: TritonServer) -> None:
    """The unary call of a decoupled model says which call to use."""
    with grpc.InferenceServerClient(served.grpc_url) as one:
        inputs = [grpc.InferInput("text_input", [1, 1], "BYTES"), grpc.InferInput("max_tokens", [1, 1], "INT32")]
        inputs[0].set_data_from_numpy(np.array([[b"a"]], dtype=object))
        inputs[1].set_data_from_numpy(np.array([[4]], dtype=np.int32))
        with pytest.raises(grpc.InferenceServerException, match="decoupled"):
            one.infer("ensemble", inputs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (b'{"model": "tiny_gemma", "prompt": "", "max_tokens": 4}', 400, "is empty"),
        (
            b'{"model": "tiny_gemma", "prompt": "a", "max_tokens": 0}',
            400,
            "'max_tokens' = 0 needs echo and logprobs",
        ),
        (b'{"model": "tiny_gemma", "prompt": "a", "max_tokens": 1000000}', 400, "max_seq_len=1024"),
        (b'{"model": "tiny_gemma", "prompt": "a", "temperature": -1}', 400, "temperature"),
        (b'{"model": "tiny_gemma", "prompt": "a", "temperature": NaN}', 400, "NaN is not JSON"),
        (b'{"model": "tiny_gemma", "prompt": "a", "seed": 1e40}', 400, "seed"),
        (b'{"model": "tiny_gemma", "prompt": "a", "n": 100000}', 400, "less than or equal to 128"),
        (b'{"model": "tiny_gemma", "prompt": "\\ud800"}', 400, "half of a surrogate pair"),
        (b'{"model": "tiny_gemma", "prompt": "\xff"}', 400, "parsing the body"),
        (b'{"model": "other", "prompt": "a"}', 404, "This server has 'tiny_gemma'"),
        (json.dumps({"model": "tiny_gemma", "prompt": "a the " * (MILLION // 2)}).encode(), 400, "max_input_len=256"),
        (json.dumps({"model": "tiny_gemma", "prompt": "a the " * MILLION}).encode(), 413, "takes up to 4,000,000"),
    ],
)
def test_openai_clients_read_what_is_wrong(
    served: TritonServer, openai_service: object, asked: bytes, status: int, said: str, stream: bool
) -> None:
    body = asked[:-1] + (b', "stream": true}' if stream else b"}")
    found, text = post(served.ports["openai_port"], "/v1/completions", body)
    assert (found, said in json.loads(text)["error"]["message"]) == (status, True), text[:500]
