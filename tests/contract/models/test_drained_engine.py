"""An engine in a server that is drained: a request that runs gets its drain time, an idle connection does not."""

import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.contract.models.conftest import SERVING, Client

TOKENS = 400
PATIENT = SERVING.model_copy(update={"drain_timeout_s": 60})  # 400 tokens take a second, and longer on a busy machine


@pytest.mark.parametrize("model", [pytest.param("tensorrt_llm", marks=pytest.mark.thorough), "ensemble"])
def test_a_stream_over_grpc_gets_all_its_tokens(repository: Path, model: str) -> None:
    """Once asked to end, tritonserver would unload the models of such requests at once."""
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    inputs: dict[str, object] = {"text_input": "The", "max_tokens": TOKENS, "stream": True}
    if model == "tensorrt_llm":
        inputs = {"input_ids": [2, 388], "input_lengths": 2, "request_output_len": TOKENS, "streaming": True}
    with TritonServer(repository, PATIENT) as server, ThreadPoolExecutor(1) as pool:
        client = Client(server.grpc_url)
        client.send(model, "long", **inputs, end_id=-1, return_num_output_tokens=True)
        first = client.first()
        stopped = pool.submit(server.stop)
        answer = client.take("long")["long"]
        stopped.result()
        client.close()
    assert answer.error == ""
    assert sum(int(part["num_output_tokens"].item()) for part in [first, *answer.parts]) == TOKENS


@pytest.mark.parametrize("keep_alive", ["HTTP", pytest.param("gRPC", marks=pytest.mark.thorough)])
def test_a_client_that_keeps_a_connection_open_does_not_hold_up_the_end(repository: Path, keep_alive: str) -> None:
    """By itself, tritonserver waits for it for the whole drain timeout."""
    if fault := why_no_server(SERVING):
        pytest.skip(str(fault))
    kept: Any
    with TritonServer(repository, PATIENT) as server:
        if keep_alive == "HTTP":
            kept = http.client.HTTPConnection("127.0.0.1", server.ports["http_port"], timeout=10)
            kept.request("GET", "/v2/health/ready")
            assert kept.getresponse().read() == b""
        else:
            kept = Client(server.grpc_url)
            kept.send("ensemble", "short", text_input="The", max_tokens=2, stream=True)
            assert kept.take("short")["short"].error == ""
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < PATIENT.drain_timeout_s / 2
        assert server.poll() == 0
        kept.close()
