"""An engine in a server that is drained: a request that runs gets its drain time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.serving.locate import why_no_server
from pipelines.serving.process import TritonServer
from tests.contract.models.conftest import SERVING, Client

TOKENS = 900
PATIENT = SERVING.model_copy(update={"drain_timeout_s": 60})  # 900 tokens take 3 s, and longer on a busy machine


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
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
