"""What the OpenAI service counts and measures, read from the page that Prometheus reads."""

import http.client
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipelines.domain.benchmark import Slo
from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.openai.metrics import ITL_S, REQUEST_S, TTFT_S, ServiceMetrics
from pipelines.serving.process import TritonServer
from tests.contract.serving.test_front_limits import another_front, ask, post
from tests.support.eventually import eventually

COMPLETIONS = "/v1/completions"
SLO = Slo("given", ttft_ms=450, itl_ms=33.3, e2e_ms=2000)
Samples = dict[tuple[str, ...], float]


def samples(page: str) -> Samples:
    """Sample -> value; a sample is its name and the values of its labels, by the labels' names."""
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def scraped(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        return samples(answer.read().decode())


@pytest.fixture(scope="module")
def port(echo_server: TritonServer) -> Iterator[int]:
    with another_front(echo_server, slo=SLO) as (_, own):
        yield own


class Growth:
    """What has grown since the test began."""

    def __init__(self, port: int) -> None:
        self._port, self._before = port, scraped(port)

    def __call__(self, name: str, *labels: str) -> float:
        key = (name, *labels)
        return scraped(self._port).get(key, 0) - self._before.get(key, 0)


@pytest.fixture
def growth(port: int) -> Growth:
    return Growth(port)


def stream(port: int, **more: object) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps(ask(stream=True) | more)
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    return [event.removeprefix("data: ") for event in events if event]


def test_a_streamed_answer_is_measured_token_by_token(growth: Growth, port: int) -> None:
    """<bos> and three words; `sleep` takes 100 ms, here for the second and third token of four."""
    stream(port, prompt="a sleep sleep", max_tokens=4)
    assert growth("trtllm_time_to_first_token_seconds_count") == 1
    assert growth("trtllm_inter_token_latency_seconds_count") == 3
    assert 0.15 <= growth("trtllm_inter_token_latency_seconds_sum") < 2
    assert growth("trtllm_time_per_output_token_seconds_count") == 1
    assert 0.15 / 3 <= growth("trtllm_time_per_output_token_seconds_sum") < 0.7
    assert growth("trtllm_e2e_request_latency_seconds_sum") >= 0.15
    assert growth("trtllm_prompt_tokens_total") == 4
    assert growth("trtllm_generation_tokens_total") == 4
    assert growth("trtllm_request_success_total", "length") == 1
    assert growth("http_requests_total", COMPLETIONS, "POST", "200") == 1


def test_a_whole_answer_has_no_first_token_that_anyone_saw(growth: Growth, port: int) -> None:
    assert post(port, COMPLETIONS, ask(prompt="a end", max_tokens=4))[0] == 200
    assert growth("trtllm_time_to_first_token_seconds_count") == 0
    assert growth("trtllm_time_per_output_token_seconds_count") == 0
    assert growth("trtllm_e2e_request_latency_seconds_count") == 1
    assert growth("trtllm_request_success_total", "stop") == 1


def test_two_answers_are_two_and_their_prompt_counts_once(growth: Growth, port: int) -> None:
    assert post(port, COMPLETIONS, ask(n=2, max_tokens=3, temperature=1))[0] == 200
    assert growth("trtllm_request_success_total", "length") == 2
    assert (growth("trtllm_prompt_tokens_total"), growth("trtllm_generation_tokens_total")) == (3, 6)
    assert growth("http_requests_total", COMPLETIONS, "POST", "200") == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "reason", "handler"),
    [
        (COMPLETIONS, ask(model="other"), 404, "model_not_found", COMPLETIONS),
        (COMPLETIONS, ask(prompt="a " * 99), 400, "context_length_exceeded", COMPLETIONS),
        (COMPLETIONS, ask(prompt="full"), 429, "rate_limit_exceeded", COMPLETIONS),
        (COMPLETIONS, b" " * 5_000_000, 413, "body_too_large", "none"),
        ("/v1/embeddings", {}, 404, "invalid_request_error", "none"),
    ],
)
def test_refusals_are_counted_by_status_and_reason(
    growth: Growth, port: int, path: str, body: object, status: int, reason: str, handler: str
) -> None:
    """Paths that clients think up are one series."""
    assert post(port, path, body)[0] == status
    assert growth("trtllm_request_error_total", reason, str(status)) == 1
    assert growth("http_requests_total", handler, "POST", str(status)) == 1
    assert growth("trtllm_e2e_request_latency_seconds_count") == 0


def test_an_error_in_the_middle_of_a_stream_counts_though_its_status_was_200(echo_server: TritonServer) -> None:
    with another_front(echo_server, request_timeout_s=1) as (_, port):
        last = stream(port, prompt="a" + " sleep" * 30, max_tokens=30)[-1]
        assert json.loads(last)["error"]["code"] == "timeout"
        grown = scraped(port)
        assert grown["trtllm_request_error_total", "timeout", "504"] == 1
        assert grown["http_requests_total", COMPLETIONS, "POST", "200"] == 1
        assert grown["trtllm_e2e_request_latency_seconds_count",] == 0
        assert grown["trtllm_generation_tokens_total",] > 5


def test_a_client_that_leaves_is_no_success(growth: Growth, port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps(ask(stream=True, prompt="a" + " sleep" * 20, max_tokens=20))
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    assert connection.getresponse().read(10)
    connection.sock.close()
    connection.close()
    assert eventually(lambda: growth("trtllm_generation_tokens_total") > 0)
    assert growth("trtllm_request_success_total", "length") == 0


@pytest.mark.parametrize(
    ("name", "edge"),
    [
        ("trtllm_time_to_first_token_seconds_bucket", "0.45"),
        ("trtllm_time_per_output_token_seconds_bucket", "0.0333"),
        ("trtllm_e2e_request_latency_seconds_bucket", "2.0"),
    ],
)
def test_the_limits_of_an_slo_are_edges_of_buckets(port: int, name: str, edge: str) -> None:
    assert (name, edge) in scraped(port)


def test_prometheus_own_judge_accepts_the_page(port: int) -> None:
    """It names faults in what tritonserver itself writes, but none in ours."""
    if (tool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/metrics", timeout=10) as answer:
        judged = subprocess.run([tool, "check", "metrics"], input=answer.read(), capture_output=True, timeout=30)
    faults = (judged.stdout + judged.stderr).decode().splitlines()
    assert [line for line in faults if not line.startswith("nv_")] == []


ENGINE = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3.000000
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 8.000000
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 11.000000
nv_trt_llm_request_metrics{model="tensorrt_llm_draft",request_type="waiting",version="1"} 5.000000
"""


def test_what_runs_and_waits_is_what_the_engine_says() -> None:
    """Not what its draft says; and while it says nothing, nothing is known."""
    metrics = ServiceMetrics("m")
    running, waiting = ("trtllm_num_requests_running",), ("trtllm_num_requests_waiting",)
    page = samples(metrics.page(ENGINE))
    assert (page[running], page[waiting], page["trtllm_backend_up",]) == (8, 3, 1)
    page = samples(metrics.page(None))
    assert (page.keys() & {running, waiting}, page["trtllm_backend_up",]) == (set(), 0)


def test_names_and_buckets_are_those_of_trtllm_serve_and_finer_ones() -> None:
    """As its tensorrt_llm/metrics/collector.py has them; gaps between tokens as vLLM.

    Failed before: an answer of 20 ms, or a request that did not wait, was in the bucket up to 0.3 s.
    """
    page = samples(ServiceMetrics("m").page(None))
    for name, edges in (
        ("time_to_first_token", TTFT_S),
        ("time_per_output_token", ITL_S),
        ("inter_token_latency", ITL_S),
        ("e2e_request_latency", REQUEST_S),
        ("request_queue_time", REQUEST_S),
    ):
        found = [float(key[1]) for key in page if key[0] == f"trtllm_{name}_seconds_bucket"]
        assert found == [*edges, float("inf")]
    theirs = (TTFT_S, ITL_S[3:], REQUEST_S[7:])
    assert [(len(edges), edges[0]) for edges in theirs] == [(22, 0.001), (19, 0.01), (21, 0.3)]
    assert TTFT_S[0] == ITL_S[0] == REQUEST_S[0] == 0.001


def test_the_service_of_a_frontend_without_limits_has_the_usual_buckets(
    frontend: OpenAiFrontend, echo_server: TritonServer
) -> None:
    assert ("trtllm_time_to_first_token_seconds_bucket", "0.45") not in scraped(echo_server.ports["openai_port"])
