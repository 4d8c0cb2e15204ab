"""How much of a prompt was there already, as every way of asking shows it."""

import json
import urllib.request
from typing import Any

import pytest

from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from tests.support.served_gemma import Client

PROMPT = list(range(300, 400))
"""Three whole blocks of 32 tokens."""


@pytest.fixture(scope="module", autouse=True)
def asked_before(served: TritonServer, openai_service: OpenAiFrontend) -> None:
    """The prompt's blocks are in the pool."""
    post(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})


def post(served: TritonServer, path: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.ports['openai_port']}{path}",
        json.dumps({"model": "tiny_gemma", "temperature": 0} | body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_whole_answer_counts_them(served: TritonServer) -> None:
    usage = json.loads(post(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_stream_with_usage_counts_them_and_one_without_has_the_same_text(served: TritonServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "stream": True}
    with_usage = events(post(served, "/v1/completions", asked | {"stream_options": {"include_usage": True}}))
    without = events(post(served, "/v1/completions", asked))
    assert with_usage[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert [each["choices"] for each in with_usage[:-1]] == [each["choices"] for each in without]


def test_a_grpc_client_that_names_no_outputs_gets_all_of_them(client: Client) -> None:
    """The bundled client names none; the service above named three."""
    part = client.ask(
        "tensorrt_llm", input_ids=PROMPT, input_lengths=100, request_output_len=2, return_perf_metrics=True
    ).parts[0]
    assert {"output_ids", "kv_cache_reused_blocks", "arrival_time_ns"} <= part.keys()
    assert part["kv_cache_reused_blocks"].tolist() == [[3]]
