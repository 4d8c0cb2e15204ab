"""A measured rate belongs to the GPUs that served it: as the result or the user says, never assumed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.host.machine import gather
from pipelines.plan.plan import make_plan
from pipelines.predict.performance.gpus import ranks, with_gpus
from pipelines.predict.performance.read_measured import read_measured
from pipelines.predict.sizing.measured import answer_of
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.report_store import benchmark
from tests.unit.core.test_machine import MACHINE

BIG = replace(MACHINE, memory_bytes=2**40)
FILES = Path(__file__).parents[2] / "reference" / "benchmarks"
SILENT = FILES / "genai_perf_nested.json"
"""A result that does not say its GPUs."""


@pytest.fixture
def server(tmp_path):
    """2.4 requests/s, measured by genai-perf on a server of 8 GPUs that the file does not mention."""
    data = json.loads(SILENT.read_text())
    data["request_throughput"]["avg"] = 2.4
    path = tmp_path / "profile_export_genai_perf.json"
    path.write_text(json.dumps(data))
    return path


def told_of(*words):
    return load(["sizing.measured=a_file.json", *words])


def size(tmp_path, capsys, *words):
    assert main(["size", "sizing.peak_rate=31", f"report.folder={tmp_path}", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("told", ["sizing.measured_gpus=8", "sizing.tp=8", "build.tp_size=8", "parallel=tp8"])
def test_a_rate_of_8_gpus_is_not_taken_for_that_of_one(tmp_path, capsys, server, told):
    """31 / 2.4 = 12.92: 13 servers of 8 GPUs, 104 GPUs. Before, TP was taken for 1: 13 GPUs."""
    said = size(tmp_path, capsys, f"sizing.measured={server}", told)
    assert "13 instances on 13 servers, 104 of 104 GPUs" in said
    (answer,) = tmp_path.glob("size-measured-*/answer.json")
    found = json.loads(answer.read_text())
    assert (found["fleet"]["servers"], found["fleet"]["gpus"], found["measured"]["gpus"]) == (13, 104, 8)


def test_gpus_that_nobody_names_are_asked_for(tmp_path, capsys, server):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["size", "sizing.peak_rate=31", f"sizing.measured={server}"]))
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "(genai-perf) does not say how many GPUs served the load" in said
    assert "Add sizing.measured_gpus=8" in said


def test_a_known_rate_needs_no_file(tmp_path, capsys):
    said = size(tmp_path, capsys, "sizing.rate=2.4", "sizing.measured_gpus=8")
    assert "13 instances on 13 servers, 104 of 104 GPUs; before rounding 12.92 instances" in said
    assert "nothing is measured or simulated" in said
    (file,) = tmp_path.glob("size-rate-*/answer.json")
    found = json.loads(file.read_text())
    assert (found["origin"], found["fleet"]["gpus"]) == ("given", 104)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sizing.rate=2.4"], r"sizing\.rate=2\.4 does not say how many GPUs serve it.*sizing\.measured_gpus=8"),
        (["sizing.rate=2.4", "sizing.tp=[4,8]"], r"sizing\.tp=\[4, 8\] names several sizes, but one was measured"),
        (["sizing.rate=2.4", "sizing.tp=8", "sizing.measured_gpus=12"], r"measured_gpus=12 is not a whole number"),
        (
            ["sizing.rate=2.4", "sizing.tp=8", "sizing=autoscaled", "sizing.autoscaling.cold_start_s=60"],
            "only one rate",
        ),
        (["sizing.rate=2.4", "sizing.measured=x.json"], r"has rate=2\.4 and measured=x\.json"),
        (["sizing.rate=2.4", "sizing.slo.ttft_ms=3000"], r"has rate=2\.4 and slo\.ttft_ms=3000, which a rate alone"),
        (["sizing.measured_gpus=8"], r"has measured_gpus=8 without anything measured"),
    ],
)
def test_a_rate_that_means_nothing_is_refused(capsys, words, message):
    assert main(["size", "sizing.peak_rate=31", *words]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_what_the_result_says_is_not_overridden():
    measured = read_measured([FILES / "trtllm_bench.json"])
    assert with_gpus(measured, load([])).served.gpus == 1
    with pytest.raises(UserError, match=r"GPUs is 8 by the ranks in the settings, but 1 by its world_info"):
        with_gpus(measured, told_of("sizing.tp=8"))


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA-A100-SXM4-80GB"])
def test_a_result_of_another_gpu_is_not_taken_for_the_named_one(gpu):
    """Its servers, its power and the start of a fit would be those of the wrong GPU."""
    measured = replace(read_measured([FILES / "trtllm_bench.json"]), gpu=gpu)
    assert with_gpus(measured, load(["hardware=a100_sxm_80gb"])) == measured
    with pytest.raises(
        UserError, match=rf"hardware=h100_sxm, but .* was measured on {gpu}. Set hardware=a100_sxm_80gb"
    ):
        with_gpus(measured, load(["hardware=h100_sxm"]))


def test_telemetry_counts_the_gpus_that_worked(tmp_path):
    """Two exporters of a machine show the same GPUs, and GPUs that serve nothing."""

    def gpu(number, utilization):
        metrics = {"nvidia_gpu_utilization": {"unit": "%", "avg": utilization, "max": utilization}}
        return {"gpu_index": number, "gpu_name": "NVIDIA H100", "gpu_uuid": f"GPU-{number}", "metrics": metrics}

    data = json.loads((FILES / "aiperf_1_5.json").read_text())
    seen = {"gpus": {f"gpu_{i}": gpu(i, 90.0 if i < 2 else 0.0) for i in range(8)}}
    data["telemetry_data"]["endpoints"] = {"localhost:9400": seen, "localhost:9401": seen}
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps(data))
    found = read_measured([path])
    assert (found.served.gpus, found.served.tp, found.served.certain) == (2, None, False)
    assert "telemetry shows 2 GPUs at work; 6 more were idle" in found.notes[0]
    told = with_gpus(found, told_of("sizing.measured_gpus=4"))
    assert told.served.gpus == 4  # a second node that nobody watched
    assert "sizing.measured_gpus=4 counts, not the 2 that telemetry shows" in told.notes[-1]


@pytest.mark.parametrize(("run", "gpus"), [("abc123def456", (8, 4, 2)), ("another", (1, 1, 1))])
def test_the_servers_own_words_come_before_telemetry(tmp_path, run, gpus):
    """TensorRT-LLM publishes its ranks; AIPerf keeps them beside the result of the same run."""
    (tmp_path / "profile_export_aiperf.json").write_text((FILES / "aiperf_1_5.json").read_text())
    server = json.loads((FILES / "aiperf_server_metrics.json").read_text()) | {"benchmark_id": run}
    (tmp_path / "server_metrics_export.json").write_text(json.dumps(server))
    served = read_measured([tmp_path]).served
    assert (served.gpus, served.tp, served.pp) == gpus


def test_a_fit_needs_the_ranks_and_simulates_one_instance():
    measured = read_measured([SILENT])
    assert ranks(with_gpus(measured, told_of("sizing.tp=4", "sizing.pp=2"))) == (4, 2)
    assert ranks(with_gpus(measured, told_of("sizing.measured_gpus=1"))) == (1, 1)
    with pytest.raises(UserError, match=r"served by 8 GPUs, but how they shared the model is not known.*sizing\.tp=8"):
        ranks(with_gpus(measured, told_of("sizing.measured_gpus=8")))
    with pytest.raises(UserError, match=r"is from 8 GPUs, several instances of TP 4 x PP 1; a fit simulates one"):
        ranks(with_gpus(measured, told_of("sizing.measured_gpus=8", "sizing.tp=4")))


def test_a_server_that_is_not_ours_has_the_gpus_that_were_stated(tmp_path):
    """`make benchmark benchmark.endpoint=...` knows no ranks unless benchmark.tp_size states them."""
    result = replace(benchmark("fp8")[0], engine="unknown")
    path = tmp_path / "benchmark.json"
    for ranks_, gpus in ((1, None), (4, 4)):
        path.write_text(json.dumps(replace(result, tp_size=ranks_, world_size=ranks_).to_json()))
        found = read_measured([path])
        assert (found.served.gpus, found.gpu) == (gpus, None)


def test_a_cpu_server_has_no_gpus(tmp_path, capsys):
    """Also beside a named GPU: eight CPU servers do not fit into one."""
    (tmp_path / "benchmark.json").write_text(json.dumps(benchmark("fp8")[0].to_json()))
    said = size(tmp_path, capsys, f"sizing.measured={tmp_path / 'benchmark.json'}", "hardware=h100_sxm")
    assert "none: an instance is one CPU server" in said
    (answer,) = tmp_path.glob("size-measured-*/answer.json")
    fleet = json.loads(answer.read_text())["fleet"]
    assert (fleet["instances"], fleet["gpus"]) == (fleet["servers"], 0)


def test_prices_of_gpus_are_refused_for_a_cpu_server(tmp_path):
    (tmp_path / "benchmark.json").write_text(json.dumps(benchmark("fp8")[0].to_json()))
    settings = load(["sizing.peak_rate=31", "sizing.prices.gpu_hour_usd=3"])
    with pytest.raises(UserError, match=r"price per GPU is set \(3 USD\), but .*CPU server"):
        answer_of(settings, gather(), tmp_path / "benchmark.json")


def test_genai_perfs_name_of_tensorrt_llm_is_this_projects():
    """Otherwise `plan` never finds the fit again."""
    measured = read_measured([FILES / "genai_perf_flat.json"])
    assert measured.engine == "tensorrt_llm"


def test_several_instances_of_one_server_are_all_counted(tmp_path):
    """Two instances of TP 2 did the work of 4 GPUs; a result without the number is from one instance."""
    result = replace(benchmark("fp8")[0], engine="tensorrt_llm", tp_size=2, world_size=2)
    path = tmp_path / "benchmark.json"
    for gpu_count, gpus in ((4, 4), (None, 2)):
        path.write_text(json.dumps(replace(result, gpu_count=gpu_count).to_json()))
        served = read_measured([path]).served
        assert (served.gpus, served.tp, served.pp) == (gpus, 2, 1)
    path.write_text(json.dumps(replace(result, gpu_count=4).to_json()))
    with pytest.raises(UserError, match=r"is from 4 GPUs, several instances of TP 2 x PP 1"):
        ranks(read_measured([path]))


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ((), 2),
        (("triton.gpu_device_ids=[[0,1],[2,3]]",), 4),
        (("triton.gpu_device_ids=[[0,1],[0,1]]",), 2),  # two instances that share their GPUs
        (("engine=openvino", "build.tp_size=1"), 1),
    ],
)
def test_a_benchmark_records_the_gpus_of_all_instances(tmp_path, words, gpus):
    asked = ["engine=tensorrt_llm", "hardware=h100_sxm", "model=llama_3_1_8b", "build.tp_size=2", *words]
    made = make_plan(load(asked), "benchmark", Store(tmp_path / "store"), BIG)
    (stage,) = (step.node.stage for step in made.steps if step.node.stage.name == "benchmark")
    assert stage.labels["gpu_count"] == gpus


def test_a_draft_model_on_gpus_of_its_own_counts_too(tmp_path):
    asked = ["engine=tensorrt_llm", "hardware=h100_sxm", "model=llama_3_1_8b", "speculative=draft_target"]
    asked += [
        "model@speculative.draft=llama_3_2_1b",
        "triton.gpu_device_ids=[[0]]",
        "triton.draft_gpu_device_ids=[[1]]",
    ]
    made = make_plan(load(asked), "benchmark", Store(tmp_path / "store"), BIG)
    (stage,) = (step.node.stage for step in made.steps if step.node.stage.name == "benchmark")
    assert stage.labels["gpu_count"] == 2
