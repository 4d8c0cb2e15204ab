"""The dashboard asks for nothing that a server does not report, and its panels do not lie on each other."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

import triton_repo
from pipelines.serving.openai.errors import ApiError
from pipelines.serving.openai.metrics import ServiceMetrics

DASHBOARD = Path(triton_repo.__file__).parent / "grafana" / "tensorrt_llm.json"
LABELS = {
    "nv_trt_llm_request_metrics": ("request_type", {"active", "max", "scheduled", "context", "waiting"}),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {"cpu", "gpu", "pinned"}),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {"max", "free", "used", "tokens_per", "reused", "fraction"},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
    ),
    "nv_trt_llm_general_metrics": ("general_type", {"timestamp", "iteration_counter"}),
    "nv_llm_input_token_len": ("response_metric_type", {"total_input_tokens"}),
    "nv_llm_output_token_len": ("response_metric_type", {"total_output_tokens"}),
}
"""Families of TensorRT-LLM's `custom_metrics_reporter.cc`, with their label and its values."""
TRITON = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_pending_request_count",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_cpu_memory_total_bytes",
}
"""Of Triton's `docs/user_guide/metrics.md`."""
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def queries(dashboard):
    """Every PromQL expression."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def family(name):
    """A metric without the suffix of a histogram's series."""
    return HISTOGRAM.sub("", name) if name.startswith("nv_llm_") else name


def test_every_family_is_one_that_servers_report(queries):
    used = {family(name) for query in queries for name in re.findall(r"\bnv_\w+", query)}
    assert used - TRITON - set(LABELS) == set()
    assert set(LABELS) <= used  # and none of the engine's is forgotten


def test_every_series_of_the_service_is_one_that_it_has(queries):
    metrics = ServiceMetrics("m")
    metrics.failed(ApiError(503, "x"))
    metrics.answered({"method": "GET"}, 200)
    series = set(re.findall(r"^(?:# TYPE )?(\w+)", metrics.page(None), re.MULTILINE))
    used = {name for query in queries for name in re.findall(r"\b(?:trtllm|http)_\w+", query)}
    assert used - series == set()
    assert {"trtllm_time_to_first_token_seconds_bucket", "http_requests_total"} <= used


def test_every_label_value_is_one_that_servers_report(queries):
    for query in queries:
        for name, selector in re.findall(r"\b(nv_(?:trt_)?llm_\w+)\{([^}]*)\}", query):
            label, values = LABELS[family(name)]
            for found, value in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                if found != "model":
                    assert found == label, query
                    assert set(value.split("|")) <= values, query


def test_quotes_and_brackets_are_closed(queries):
    for query in queries:
        assert query.count("(") == query.count(")"), query
        assert query.count("{") == query.count("}"), query
        assert query.count('"') % 2 == 0, query


def test_panels_have_ids_and_places_of_their_own(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, two in combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert apart_x or apart_y, (one, two)


def test_datasource_and_models_are_chosen_by_the_viewer(dashboard):
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model": "query", "engine": "query"}
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"]
    assert dashboard["schemaVersion"] == 39
