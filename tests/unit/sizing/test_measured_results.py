"""Results of benchmarks are read, whoever measured them; what is missing is named."""

import gzip
import json
from pathlib import Path

import pytest

from pipelines.domain.benchmark import RESULT
from pipelines.domain.errors import UserError
from pipelines.predict.performance.read_measured import read_measured
from tests.support.load_records import RequestTiming, to_columns
from tests.support.report_store import benchmark

FILES = Path(__file__).parents[2] / "reference" / "benchmarks"


def changed(tmp_path, name, change):
    """A copy of a file with a change."""
    data = json.loads((FILES / name).read_text())
    change(data)
    path = tmp_path / name
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("name", "tool", "load", "model"),
    [
        ("aiperf_1_5.json", "aiperf", "concurrency 8, ISL 2000, OSL 200", "meta-llama/Llama-3.1-8B-Instruct"),
        (
            "aiperf_poisson.json",
            "aiperf",
            "3.5 requests/s (poisson), ISL 2000, OSL 200",
            "meta-llama/Llama-3.1-8B-Instruct",
        ),
        ("aiperf_0_4.json", "aiperf", "concurrency 10, ISL 2000, OSL 200", "Qwen/Qwen3-0.6B"),
        ("genai_perf_flat.json", "genai-perf", "concurrency 8, ISL 2000, OSL 200", "ensemble"),
        ("genai_perf_nested.json", "genai-perf", "concurrency 8, ISL 2000, OSL 200", "meta/llama-3.1-8b-instruct"),
        ("trtllm_bench.json", "trtllm-bench", "all at once, ISL 128, OSL 128", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_the_tool_is_recognised_and_its_load_is_read(name, tool, load, model):
    found = read_measured([FILES / name])
    assert (found.tool, found.levels[0].load, found.model) == (tool, load, model)


def test_metrics_come_in_seconds_whatever_unit_the_file_has(tmp_path):
    def in_nanoseconds(data):
        ttft = data["time_to_first_token"]
        data["time_to_first_token"] = {k: v * 1e6 if k != "unit" else "ns" for k, v in ttft.items()}

    for path in (FILES / "aiperf_1_5.json", changed(tmp_path, "aiperf_1_5.json", in_nanoseconds)):
        (level,) = read_measured([path]).levels
        assert level.ttft_s.p95 == pytest.approx(0.2)
        assert level.itl_s.mean == pytest.approx(0.012)
        assert level.e2e_s.p50 == pytest.approx(2.48)
        assert (level.requests_per_s, level.requests, level.isl_stdev) == (3.2, 80, 4.0)


def test_trtllm_bench_starts_all_requests_at_once_and_indexes_its_percentiles():
    found = read_measured([FILES / "trtllm_bench.json"])
    (level,) = found.levels
    assert (found.percentiles, found.gpu, found.served.tp, found.precision) == (
        "index",
        "NVIDIA H100 80GB HBM3",
        1,
        "fp8",
    )
    assert found.limits == {"max_batch_size": 2048, "max_num_tokens": 8192}
    assert (level.arrival, level.requests, level.ttft_s.p50) == ("burst", 1000, 1.05)
    assert any("not interpolated" in note for note in found.notes)


def test_a_trtllm_bench_run_whose_requests_were_held_back_is_a_closed_loop(tmp_path):
    # Submitted over 4 s of a run of 5 s: 4e9 ns / 1000 requests = 4e6 ns each, times 1e9.
    path = changed(tmp_path, "trtllm_bench.json", lambda data: data["world_info"].update(issue_rate=4e15))
    (level,) = read_measured([path]).levels
    assert (level.arrival, level.concurrency) == ("closed", 612)


@pytest.mark.parametrize(
    ("name", "steady"),
    [("aiperf_1_5.json", False), ("genai_perf_flat.json", True), ("genai_perf_nested.json", False)],
)
def test_it_is_kept_whether_the_start_of_the_load_is_inside_the_window(name, steady):
    assert read_measured([FILES / name]).levels[0].steady is steady


def test_a_result_that_was_not_streamed_has_no_ttft_and_says_so(tmp_path):
    path = changed(
        tmp_path, "genai_perf_flat.json", lambda d: [d.pop(k) for k in ("time_to_first_token", "inter_token_latency")]
    )
    found = read_measured([path])
    assert found.levels[0].ttft_s.count == 0
    assert "was not streamed" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("aiperf_1_5.json", ("request_throughput",)),
        ("aiperf_1_5.json", ("request_latency", "p50")),
        ("aiperf_0_4.json", ("output_sequence_length", "avg")),
        ("genai_perf_flat.json", ("input_sequence_length",)),
        ("genai_perf_flat.json", ("input_config", "concurrency")),
        ("trtllm_bench.json", ("performance", "request_throughput_req_s")),
        ("trtllm_bench.json", ("world_info", "tp_size")),
        ("trtllm_bench.json", ("engine", "model")),
    ],
)
def test_a_missing_key_is_named(tmp_path, name, keys):
    def remove(data):
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    path = changed(tmp_path, name, remove)
    with pytest.raises(UserError, match=f"lacks '.*{keys[-1]}"):
        read_measured([path])


def test_an_unknown_unit_is_refused(tmp_path):
    path = changed(tmp_path, "aiperf_1_5.json", lambda data: data["request_latency"].update(unit="fortnights"))
    with pytest.raises(UserError, match=r"request_latency.unit='fortnights'"):
        read_measured([path])


def test_a_cancelled_run_is_refused(tmp_path):
    path = changed(tmp_path, "aiperf_1_5.json", lambda data: data.update(was_cancelled=True))
    with pytest.raises(UserError, match="cancelled"):
        read_measured([path])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "results.json is not a benchmark result of a supported tool"),
        ('{"a": 1}', "results.json is not a benchmark result of a supported tool"),
    ],
)
def test_other_files_are_refused_with_what_is_known(tmp_path, text, words):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_measured([path])
    assert "trtllm-bench" in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"/nowhere/results.json cannot be read"):
        read_measured([Path("/nowhere/results.json")])


def test_files_of_one_deployment_are_levels_of_one_result(tmp_path):
    found = read_measured([FILES / "aiperf_1_5.json", FILES / "aiperf_poisson.json"])
    assert [level.arrival for level in found.levels] == ["closed", "poisson"]
    with pytest.raises(UserError, match="mixes deployments: tool is 'aiperf'"):
        read_measured([FILES / "aiperf_1_5.json", FILES / "genai_perf_flat.json"])


def test_a_folder_is_searched(tmp_path):
    for users in (4, 8):
        place = tmp_path / f"concurrency_{users}"
        place.mkdir()
        path = changed(
            place, "aiperf_0_4.json", lambda data, n=users: data["input_config"]["loadgen"].update(concurrency=n)
        )
        path.rename(place / "profile_export_aiperf.json")
    assert sorted(level.concurrency for level in read_measured([tmp_path]).levels) == [4, 8]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no benchmark result in .*/empty"):
        read_measured([tmp_path / "empty"])


def test_our_own_result_comes_with_the_very_requests(tmp_path):
    result, _ = benchmark("fp8")
    (tmp_path / RESULT).write_text(json.dumps(result.to_json()))
    timings = [RequestTiming(i, i * 10**9, i * 10**9, i * 10**9 + 5, i * 10**9 + 9, 100 + i, 7) for i in range(4)]
    columns = {**to_columns(timings), "window_ns": [10**9, 3 * 10**9]}
    (tmp_path / result.levels[0].requests_file).write_bytes(gzip.compress(json.dumps(columns).encode()))
    found = read_measured([tmp_path / RESULT])
    assert (found.tool, found.precision, len(found.levels)) == ("trtllm-pipelines", "fp8", len(result.levels))
    sent = found.levels[0].sent
    assert sent.isl.tolist() == [100, 101, 102, 103]
    assert sent.due.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sent.window == (1.0, 3.0)
    assert found.levels[1].sent is None


def test_loads_that_say_nothing_of_the_server_are_left_out(tmp_path):
    """At 4 the load generator was the limit, 16 was cut short: neither may carry a fit or a fleet."""
    result, _ = benchmark("fp8", bottleneck=4, cut=16)
    (tmp_path / RESULT).write_text(json.dumps(result.to_json()))
    found = read_measured([tmp_path / RESULT])
    assert [level.concurrency for level in found.levels] == [1]
    limited, cut = found.notes
    rate = f"{result.levels[1].summary.requests_per_s:.3g}"
    assert "Not used: concurrency 4, where the load generator was the limit" in limited
    assert limited.endswith(f"{rate} requests/s are a lower bound.")
    assert cut.startswith("Not used: concurrency 16, cut short")


def test_a_result_without_any_other_load_is_refused_with_the_reason(tmp_path):
    result, _ = benchmark("fp8", (4,), bottleneck=4)
    (tmp_path / RESULT).write_text(json.dumps(result.to_json()))
    with pytest.raises(UserError, match=r"no level that describes the server.*concurrency 4, where the load generator"):
        read_measured([tmp_path / RESULT])


def test_failed_requests_of_our_own_load_are_named(tmp_path):
    """A fleet sized from a server that fails half of its requests must not pass for one that serves them."""
    result, _ = benchmark("fp8", (4,))
    data = result.to_json()
    data["levels"][0]["summary"]["errors"] = {"server_error": 16, "timeout": 4}
    (tmp_path / RESULT).write_text(json.dumps(data))
    total = 20 + data["levels"][0]["summary"]["e2e_s"]["count"]
    (note,) = read_measured([tmp_path / RESULT]).notes
    assert f"concurrency 4: 20 of {total:,} requests failed" in note


@pytest.mark.parametrize(("engine", "known"), [("openvino", True), ("unknown", False)])
def test_the_client_is_not_the_machine_of_a_server_elsewhere(tmp_path, engine, known):
    result, _ = benchmark("fp8", (4,))
    (tmp_path / RESULT).write_text(json.dumps({**result.to_json(), "engine": engine, "machine": {"cpu_count": 2}}))
    assert bool(read_measured([tmp_path / RESULT]).about["machine"]) == known
