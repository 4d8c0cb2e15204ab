"""Results of vLLM, SGLang, GuideLLM, inference-perf and llm-d mean the same as ours once they are read."""

import json
from pathlib import Path

import pytest
import yaml

from pipelines.domain.errors import UserError
from pipelines.predict.performance.read_measured import read_measured

FILES = Path(__file__).parents[2] / "reference" / "benchmarks"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
STAGE = "inference_perf/stage_0_lifecycle_metrics.json"


def changed(tmp_path, name, change):
    """A copy of a JSON file with a change."""
    data = json.loads((FILES / name).read_text())
    change(data)
    path = tmp_path / Path(name).name
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("name", "tool", "loads", "gpus"),
    [
        ("vllm_bench_serve.json", "vllm bench serve", ["concurrency 8"], None),
        ("sglang_bench_serving.jsonl", "sglang bench_serving", ["concurrency 8", "concurrency 16"], 2),
        ("guidellm.json", "guidellm", ["concurrency 1", "concurrency 8", "3.5 requests/s (constant)"], None),
        (STAGE, "inference-perf", ["3.5 requests/s (poisson)"], None),
        ("llm_d.yaml", "llm-d (inference-perf)", ["3.5 requests/s (poisson)"], 8),
    ],
)
def test_the_same_measurement_reads_the_same(name, tool, loads, gpus):
    """Each file: TTFT P95 200 ms, ITL mean 12 ms and P99 13 ms, E2E median 2.48 s, 2000 tokens in, 200 out."""
    found = read_measured([FILES / name])
    assert (found.tool, found.model, found.served.gpus) == (tool, LLAMA, gpus)
    assert [level.load for level in found.levels] == [f"{load}, ISL 2000, OSL 200" for load in loads]
    level = found.levels[0]
    assert level.ttft_s.p95 == pytest.approx(0.2)
    assert (level.itl_s.mean, level.itl_s.p99) == pytest.approx((0.012, 0.013))
    assert level.e2e_s.p50 == pytest.approx(2.48)
    assert level.requests == 80


def test_a_rate_that_was_kept_up_is_open_and_one_that_was_not_is_a_closed_loop(tmp_path):
    """vLLM: a request that waits in the client, because as many as allowed are running, is not in any latency."""
    open_ = changed(tmp_path, "vllm_bench_serve.json", lambda d: d.update(request_rate=3.3, burstiness=4.0))
    (level,) = read_measured([open_]).levels
    assert (level.arrival, level.request_rate, level.cv, level.concurrency) == ("gamma", 3.3, 0.5, None)
    held = changed(tmp_path, "vllm_bench_serve.json", lambda d: d.update(request_rate=20.0))
    found = read_measured([held])
    assert (found.levels[0].arrival, found.levels[0].concurrency) == ("closed", 8)
    assert "20 requests/s were asked for, but never more than 8 ran at once" in found.notes[0]


def test_without_a_limit_all_requests_of_vllm_start_at_once(tmp_path):
    path = changed(tmp_path, "vllm_bench_serve.json", lambda d: d.update(max_concurrency=None))
    assert read_measured([path]).levels[0].arrival == "burst"


def test_percentiles_that_vllm_was_not_asked_for_are_none(tmp_path):
    def usual(data):  # --metric-percentiles 99, --percentile-metrics ttft,tpot,itl
        for key in [key for key in data if key.startswith(("p90", "p95")) or "e2el" in key]:
            del data[key]

    (level,) = read_measured([changed(tmp_path, "vllm_bench_serve.json", usual)]).levels
    assert (level.ttft_s.p95, level.ttft_s.p99, level.e2e_s.count) == (None, 0.25, 0)


@pytest.mark.parametrize(
    ("metadata", "gpus"),
    [
        ({"tp": "8"}, (8, 8, 1)),
        ({"tensor_parallel_size": 4, "pipeline-parallel-size": 2}, (8, 4, 2)),
        ({"tp": "2", "dp": "4"}, (8, 2, 1)),
    ],
)
def test_metadata_of_vllm_names_the_gpus(tmp_path, metadata, gpus):
    served = read_measured([changed(tmp_path, "vllm_bench_serve.json", lambda d: d.update(metadata))]).served
    assert (served.gpus, served.tp, served.pp) == gpus


@pytest.mark.parametrize(("attention", "gpus"), [(False, 16), (True, 8)])
def test_sglang_shares_ranks_among_groups_of_attention(tmp_path, attention, gpus):
    line = json.loads((FILES / "sglang_bench_serving.jsonl").read_text().splitlines()[0])
    line["server_info"].update(tp_size=8, dp_size=2, enable_dp_attention=attention)
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert read_measured([path]).served.gpus == gpus


def sglang_with(folder, **values):
    line = json.loads((FILES / "sglang_bench_serving.jsonl").read_text().splitlines()[0])
    (path := folder / "one.jsonl").write_text(json.dumps({**line, **values}) + "\n")
    return path


def test_sglang_draws_lengths_from_a_ratio_to_the_longest(tmp_path):
    """Its default ratio of 0 means 1 to 2,000 tokens; vLLM's means 2,000 each, and the file does not have it."""
    (fixed,) = read_measured([sglang_with(tmp_path)]).levels
    assert (fixed.isl_stdev, fixed.osl_stdev) == (0, 0)
    (drawn,) = read_measured([sglang_with(tmp_path, random_range_ratio=0.0)]).levels
    assert (drawn.isl_stdev, drawn.osl_stdev) == pytest.approx((2000 / 12**0.5, 200 / 12**0.5))
    (other,) = read_measured([sglang_with(tmp_path, random_range_ratio=0.0, dataset_name="sharegpt")]).levels
    assert other.isl_stdev == 0


def test_lengths_that_a_file_lists_give_their_deviation_without_failed_requests(tmp_path):
    listed = {"input_lens": [100, 900, 300], "output_lens": [10, 0, 30]}
    for path in (
        sglang_with(tmp_path, **listed),
        changed(tmp_path, "vllm_bench_serve.json", lambda data: data.update(listed)),
    ):
        (level,) = read_measured([path]).levels
        assert (level.isl_stdev, level.osl_stdev) == (100, 10)
    with pytest.raises(UserError, match=r"input_lens\.1='x' is not a number"):
        read_measured([sglang_with(tmp_path, input_lens=[1, "x"], output_lens=[1, 1])])


def test_inference_perf_states_lengths_by_percentiles(tmp_path):
    spread = {"mean": 2000, "median": 2000, "p95": 2329}
    path = changed(tmp_path, STAGE, lambda data: data["successes"].update(prompt_len=spread))
    assert read_measured([path]).levels[0].isl_stdev == pytest.approx(200)


def test_guidellm_is_steady_only_with_a_warm_up():
    assert [level.steady for level in read_measured([FILES / "guidellm.json"]).levels] == [False, True, True]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vllm_bench_serve.json", lambda d: d.pop("total_output_tokens"), r"lacks 'total_output_tokens'"),
        ("vllm_bench_serve.json", lambda d: d.update(ramp_up_strategy="linear"), r"measured with 'ramp-up linear'"),
        ("vllm_bench_serve.json", lambda d: d.update(completed=0), r"has no finished request"),
        ("guidellm.json", lambda d: d["benchmarks"][0]["config"]["strategy"].update(type_="trace"), "with 'trace'"),
        ("guidellm.json", lambda d: d["benchmarks"][0]["metrics"].pop("request_latency"), r"lacks '.*request_latency"),
        (STAGE, lambda d: d["load_summary"].pop("requested_rate"), r"lacks 'load_summary.requested_rate'.*stage_N"),
        (STAGE, lambda d: d["successes"].update(count=0), r"has no finished request"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, change, message):
    with pytest.raises(UserError, match=message):
        read_measured([changed(tmp_path, name, change)])


def test_failed_requests_and_a_rate_that_was_not_sent_are_noted(tmp_path):
    path = changed(tmp_path, STAGE, lambda d: d["load_summary"].update(achieved_rate=2.0))
    found = read_measured([path])
    assert found.levels[0].request_rate == 2.0
    notes = " ".join(found.notes)
    assert "there is no config.yaml beside it: constant" in notes
    assert "3.5 requests/s were asked for, 2 were sent" in notes
    assert "1 of 81 requests failed" in notes


@pytest.mark.parametrize(
    ("where", "value", "gpus"),
    [
        ("count", 0, None),  # llm-d-benchmark does not know the stack of an endpoint that it did not start
        ("workers", 2, None),  # an instance of several pods
    ],
)
def test_llm_d_counts_gpus_only_where_it_knows_them(tmp_path, where, value, gpus):
    data = yaml.safe_load((FILES / "llm_d.yaml").read_text())
    accelerator = data["scenario"]["stack"][0]["standardized"]["accelerator"]
    (accelerator if where == "count" else accelerator["parallelism"])[where] = value
    path = tmp_path / "report.yaml"
    path.write_text(yaml.safe_dump(data))
    assert read_measured([path]).served.gpus is gpus


def test_the_first_version_of_llm_ds_report_is_refused(tmp_path):
    path = tmp_path / "report.yaml"
    path.write_text("version: '0.1'\nscenario: {}\nmetrics: {}\n")
    with pytest.raises(UserError, match=r"version 0\.1\. Supported: 0\.2, 0\.2\.1"):
        read_measured([path])


def test_a_folder_of_llm_d_gives_its_reports_and_not_what_they_are_made_from(tmp_path):
    (tmp_path / "stage_0_lifecycle_metrics.json").write_text((FILES / STAGE).read_text())
    report = tmp_path / "benchmark_report_v0.2,_stage_0_lifecycle_metrics.json.yaml"
    report.write_text((FILES / "llm_d.yaml").read_text())
    assert read_measured([tmp_path]).sources == (str(report),)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(UserError, match=r"empty\.json is not JSON"):
        read_measured([tmp_path / "empty.json"])


def test_a_file_that_is_no_yaml_says_where(tmp_path):
    (tmp_path / "results.yaml").write_text("a: 1\nb: [")
    with pytest.raises(UserError, match=r'results\.yaml is not YAML: line 2, column 5: [^"]*Supported'):
        read_measured([tmp_path / "results.yaml"])


def test_failed_requests_and_an_incomplete_run_of_aiperf_are_noted(tmp_path):
    path = changed(
        tmp_path,
        "aiperf_0_13_0_capped.json",
        lambda d: d.update(error_request_count={"unit": "requests", "avg": 5.0}, is_complete=False),
    )
    said = " ".join(read_measured([path]).notes)
    assert "5 of 45 requests failed" in said
    assert "is_complete=false" in said


def test_a_cap_that_held_a_rate_back_is_read_from_what_aiperf_wrote():
    """200 requests/s with at most 2 at once were asked for; 10.8 were served, 1.25 of them in flight."""
    found = read_measured([FILES / "aiperf_0_13_0_capped.json"])
    (level,) = found.levels
    assert (level.arrival, level.concurrency, level.request_rate, level.requests) == ("closed", 2, None, 40)
    assert (level.requests_per_s, level.osl) == pytest.approx((10.8008, 23.9))
    assert level.e2e_s.mean == pytest.approx(0.115531)
    assert ["200 requests/s were asked for, but never more than 2 ran at once" in note for note in found.notes] == [
        True
    ]


def test_a_cap_that_held_a_rate_back_is_read_from_what_guidellm_wrote():
    """100 requests/s with at most 2 at once were asked for; 14 were served, 1.5 of them in flight."""
    found = read_measured([FILES / "guidellm_0_8_1_capped.json"])
    (level,) = found.levels
    assert (level.arrival, level.concurrency, level.request_rate, level.requests) == ("closed", 2, None, 40)
    assert (level.requests_per_s, level.isl, level.osl) == pytest.approx((14.0605, 40, 24))
    assert level.e2e_s.mean == pytest.approx(0.107264)
    assert "100 requests/s were asked for, but never more than 2 ran at once" in " ".join(found.notes)


def test_one_failed_level_does_not_lose_a_report_of_guidellm(tmp_path):
    def failed(data):
        data["benchmarks"][1]["metrics"]["request_totals"] = {"successful": 0, "errored": 9, "total": 9}

    found = read_measured([changed(tmp_path, "guidellm.json", failed)])
    assert len(found.levels) == 2
    assert "benchmark 2, no request of which finished" in found.notes[0]


def test_a_closed_loop_with_too_few_requests_in_flight_is_not_used(tmp_path):
    """3.2 requests/s of 2.5 s are 8 in flight."""
    path = changed(tmp_path, "vllm_bench_serve.json", lambda d: d.update(max_concurrency=32))
    with pytest.raises(UserError, match="in flight, not 32"):
        read_measured([path])


def test_an_itl_that_leaves_half_of_the_e2e_unexplained_is_not_used(tmp_path):
    """inference-perf up to 0.4 divided by events; with two a token, an ITL of 12 ms read as 6."""
    path = changed(tmp_path, STAGE, lambda d: d["successes"]["latency"]["time_per_output_token"].update(mean=0.006))
    with pytest.raises(UserError, match=r"TTFT and 199 ITL of 6 ms are 1\.31 s, not the E2E of 2\.5 s"):
        read_measured([path])


@pytest.mark.parametrize(("server", "noted"), [({}, True), ({"output_tokens": {"mean": 200.0}}, False)])
def test_lengths_that_inference_perf_counted_otherwise_than_the_server_are_noted(tmp_path, server, noted):
    path = changed(tmp_path, STAGE, lambda d: d["successes"].update(token_count_mismatches=80, **server))
    assert (
        any("of 80 answers, tool and server count other tokens" in each for each in read_measured([path]).notes)
        is noted
    )


def test_benchmark_serving_and_a_sweep_of_vllm_are_read_as_vllm(tmp_path):
    """TensorRT-LLM's benchmark_serving.py writes no endpoint_type, and infinity as text; a sweep names files by run."""
    old = changed(tmp_path, "vllm_bench_serve.json", lambda d: (d.pop("endpoint_type"), d.update(request_rate="inf")))
    old.rename(tmp_path / "run=0.json")
    (tmp_path / "run=1.failure.json").write_text("{}")
    found = read_measured([tmp_path])
    assert [level.load for level in found.levels] == ["concurrency 8, ISL 2000, OSL 200"]


def test_an_aggregate_of_aiperf_is_refused_as_one(tmp_path):
    path = tmp_path / "profile_export_aiperf_aggregate.json"
    path.write_text(
        json.dumps({"schema_version": "1.0", "metadata": {"aggregation_type": "confidence"}, "metrics": {}})
    )
    with pytest.raises(UserError, match=r"an aggregate over several runs \(confidence\)"):
        read_measured([path])


def test_a_folder_of_aiperf_is_one_load_beside_the_files_of_its_phases(tmp_path):
    """AIPerf 0.13 writes warm-up and measurement by themselves as well, each under the name of the whole."""

    def phased(data):
        data["input_config"]["phases"] = [
            {"name": "warmup", "kind": "warmup", "type": "concurrency", "concurrency": 4},
            {"name": "profiling", "kind": "profiling", "type": "concurrency", "concurrency": 16},
        ]

    text = changed(tmp_path, "aiperf_1_5.json", phased).read_text()
    files = [tmp_path / place / "profile_export_aiperf.json" for place in (".", "phases/warmup", "phases/profiling")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (level,) = read_measured([tmp_path]).levels
    assert [level] == [*read_measured(files[2:]).levels]
    with pytest.raises(UserError, match=r"phases/warmup/profile_export_aiperf\.json .* is of the warm-up"):
        read_measured(files[1:2])


def test_each_phase_of_aiperf_is_a_load_by_its_own_file(tmp_path):
    def phased(data):
        names = (("low", 8), ("high", 16))
        data["input_config"]["phases"] = [
            {"name": name, "kind": "profiling", "type": "concurrency", "concurrency": users} for name, users in names
        ]

    whole = changed(tmp_path, "aiperf_1_5.json", phased)
    with pytest.raises(UserError, match=r"phases/NAME/aiperf_1_5\.json"):
        read_measured([whole])
    high = tmp_path / "phases" / "high" / "profile_export_aiperf.json"
    high.parent.mkdir(parents=True)
    high.write_text(whole.read_text())
    assert read_measured([high]).levels[0].concurrency == 16


def test_conversations_of_sglang_have_no_input_tokens_and_are_refused(tmp_path):
    """Its bench_serving counts no prompts of conversations: a fit would take them for free."""
    with pytest.raises(UserError, match="total_input_tokens=0"):
        read_measured([sglang_with(tmp_path, total_input_tokens=0)])
