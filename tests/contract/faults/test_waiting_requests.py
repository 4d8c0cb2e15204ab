"""The queue of a real engine, as its service shows it to Prometheus."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from pipelines.serving.frontend import OpenAiFrontend
from pipelines.serving.process import TritonServer
from tests.contract.faults.well_behaved import PROMPT
from tests.contract.serving.test_service_metrics import Growth, Samples, scraped
from tests.support.eventually import eventually

REQUESTS, TOKENS = 24, 900
RUNNING, WAITING = ("trtllm_num_requests_running",), ("trtllm_num_requests_waiting",)


def test_requests_beyond_the_batch_wait_and_the_engine_says_how_long(
    openai_service: OpenAiFrontend, served: TritonServer
) -> None:
    """24 at once on a batch of 8: most wait, none longer than its answer took in all."""
    port = served.ports["openai_port"]
    growth = Growth(port)
    body = {"model": "tiny_gemma", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}

    def ask(_: int) -> int:
        request = urllib.request.Request(
            f"{served.openai_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(json.loads(answer.read())["usage"]["completion_tokens"])

    def is_full(page: Samples) -> bool:
        return page[RUNNING] >= 1 and page[WAITING] >= 1

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = pool.map(ask, range(REQUESTS))
        assert eventually(lambda: is_full(scraped(port)), 30)
        assert list(answers) == [TOKENS] * REQUESTS
    assert growth("trtllm_request_queue_time_seconds_count") == REQUESTS
    waited, in_all = (growth(f"trtllm_{name}_seconds_sum") for name in ("request_queue_time", "e2e_request_latency"))
    assert 0 < waited < in_all
    assert growth("trtllm_generation_tokens_total") == REQUESTS * TOKENS
    assert eventually(lambda: (scraped(port)[RUNNING], scraped(port)[WAITING]) == (0, 0))
