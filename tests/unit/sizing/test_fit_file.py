"""`calibrate` as a user has it: the file, where it is found again, and what stands beside measured numbers."""

import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.domain.benchmark import RESULT
from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.variant import Variant
from pipelines.predict.config import FITS
from pipelines.predict.performance.calibrate_command import SHOWN
from pipelines.predict.performance.deployment import costs, fitted_deployment, gpu_model, load_fit, stored_fits
from pipelines.predict.performance.fit import GPU_KNOBS, KNOWN_BY
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.models import known_model, model_named
from pipelines.predict.performance.performance import PerformanceModel, Setup
from pipelines.report.collect import collect
from pipelines.report.report_command import with_models
from pipelines.report.sections import document
from pipelines.report.tables_load import modelled_table
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.report_store import benchmark, full_store

FILES = Path(__file__).parents[2] / "reference" / "benchmarks"
LLAMA = ["model=llama_3_1_8b", "quant=fp8", "hardware=h100_sxm", "engine=tensorrt_llm"]


def run(capsys, *words):
    assert COMMANDS["calibrate"].run(words) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A result of this project of a deployment without noise."""
    folder = tmp_path_factory.mktemp("result")
    result, files = benchmark("fp8")
    for name, content in files.items():
        raw = json.dumps(content).encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return folder / RESULT, result


def test_our_engine_is_fitted_without_a_model_and_found_again(tmp_path, capsys, ours):
    text = run(capsys, f"sizing.measured={ours[0]}", f"paths.store={tmp_path}")
    assert "each coefficient is fitted by itself: the CPU engine" in text.replace("\n", " ")
    assert "concurrency 16, ISL 128, OSL 8" in text
    assert "median error, %" in text
    assert max(map(len, text.partition("\nfit: ")[0].splitlines())) <= 80
    file = tmp_path / FITS / "synthetic-fp8-openvino-tp1.json"
    assert f"fit: {file}" in text
    made = load_fit(file)
    assert made.cpu == "2 CPU cores, Linux x86_64 Python 3.11.7"
    assert made.why == "fitted to 3 loads measured with trtllm-pipelines on 2026-01-02"
    same = {"model": "synthetic", "precision": "fp8", "engine": "openvino", "tp": 1, "world": 1}
    assert fitted_deployment([made], **same, where={made.cpu}).provenance == "fitted"
    assert fitted_deployment([made], **same, where={"64 CPU cores, Linux"}) is None
    assert fitted_deployment([made], **{**same, "precision": "none"}, where={made.cpu}) is None


def test_the_place_of_the_file_can_be_given(tmp_path, capsys, ours):
    file = tmp_path / "here.json"
    run(capsys, f"sizing.measured={ours[0]}", f"sizing.fit={file}", f"paths.store={tmp_path / 'store'}")
    assert load_fit(file).model == "synthetic"
    assert not (tmp_path / "store" / FITS).exists()


def test_a_plan_refuses_a_named_fit_of_another_deployment(tmp_path, capsys, ours):
    """It was left out without a word."""
    file = tmp_path / "here.json"
    run(capsys, f"sizing.measured={ours[0]}", f"sizing.fit={file}", f"paths.store={tmp_path / 'store'}")
    with pytest.raises(UserError, match=r"here\.json does not match this deployment: it is for synthetic, fp8, engine"):
        COMMANDS["plan"].run(["quant=int8_wo", f"sizing.fit={file}", f"paths.store={tmp_path / 'store'}"])


def test_a_fit_to_a_result_without_streaming_is_read_back(tmp_path, capsys):
    """What was not measured of TTFT and ITL leaves the model's own uncertainty of them."""
    result = json.loads((FILES / "aiperf_1_5.json").read_text())
    result = {name: value for name, value in result.items() if "_token_latency" not in name and "first" not in name}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(result))
    run(capsys, f"sizing.measured={tmp_path}", *LLAMA, f"sizing.fit={tmp_path / 'fit.json'}")
    made, model = load_fit(tmp_path / "fit.json"), known_model(load(LLAMA))
    assert made.spread.keys() == {"throughput"}
    setup = Setup.of(load(LLAMA), model, gpu_named("h100_sxm"))
    predicted = PerformanceModel.load().cost(setup)
    spread = made.cost(setup, predicted).spread
    assert (spread["ttft"], spread["itl"]) == (predicted.spread["ttft"], predicted.spread["itl"])


def test_a_gpu_that_is_named_starts_from_the_performance_model(tmp_path, capsys):
    words = [f"sizing.measured={FILES / 'aiperf_1_5.json'}", *LLAMA, f"paths.store={tmp_path}"]
    text = run(capsys, *words)
    assert "multipliers on the performance model are fitted" in text.replace("\n", " ")
    assert "TTFT p95 ms  ITL mean ms" in text
    # one load cannot tell ten coefficients apart
    assert "not determined by these loads: other values fit about as well" in text
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("fit: "))
    assert "e+0" not in text  # 4,700 and not 4.7e+03
    made = load_fit(tmp_path / FITS / "llama_3_1_8b-fp8-h100_sxm-tp1.json")
    assert (made.model, made.precision, made.gpu, made.tp) == ("llama_3_1_8b", "fp8", "h100_sxm", 1)
    settings = load(LLAMA)
    prior = gpu_model(settings, known_model(settings), gpu_named("h100_sxm"), PerformanceModel.load().cost).deployment
    low, high = made.intervals["weights"]
    assert low < prior.cost.weights < high  # what one load does not decide stays where the model had it
    lines = {line.strip().partition("  ")[0]: line for line in text.splitlines()}
    for knob in GPU_KNOBS:
        low, high = made.intervals[knob.fields[0]]
        wide = math.log(high / low) / (2 * 1.96) > KNOWN_BY * knob.sd
        assert lines[SHOWN[knob.fields[0]][0]].endswith("*") is wide, knob.name


def test_a_result_of_vllm_is_fitted_at_the_ranks_that_are_named(tmp_path, capsys):
    """With what vLLM writes by default: P99 and no E2E. Without its ranks, TP 1 was assumed."""
    data = json.loads((FILES / "vllm_bench_serve.json").read_text())
    usual = {key: value for key, value in data.items() if "e2el" not in key and not key.startswith(("p90", "p95"))}
    path = tmp_path / "vllm-infqps-concurrency8-Llama-20260901-100000.json"
    path.write_text(json.dumps(usual))
    words = [f"sizing.measured={tmp_path}", *LLAMA, f"paths.store={tmp_path}"]
    with pytest.raises(UserError, match="does not say how many GPUs served the load"):
        COMMANDS["calibrate"].run(words)
    text = run(capsys, *words, "sizing.tp=2")
    assert text.startswith("llama_3_1_8b fp8 measured with vllm bench serve: ")  # as it was configured
    made = load_fit(tmp_path / FITS / "llama_3_1_8b-fp8-h100_sxm-tp2.json")
    assert (made.engine, made.tp, made.pp) == ("vllm", 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"schema": 7}', "has schema 7"),
        ('{"schema": 2}', "is not a fit of `make calibrate`"),
        ("[]", "schema None"),
    ],
)
def test_a_broken_fit_is_refused(tmp_path, text, words):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        load_fit(path)


def test_a_fit_that_is_not_there_says_how_to_make_one():
    with pytest.raises(UserError, match=r"/nowhere/c.json cannot be read.*make calibrate"):
        load_fit(Path("/nowhere/c.json"))


def test_without_a_benchmark_there_is_nothing_to_fit_to():
    with pytest.raises(UserError, match=r"names no benchmark to fit to\. Add sizing\.measured=/my/store/benchmark/"):
        COMMANDS["calibrate"].run(["paths.store=/my/store"])


@pytest.mark.parametrize("variant", ["none", "fp8", "magnitude_2_4-int8_sq", "fp8-kv_fp8", "sparsegpt_2_4-fp8-kv_int8"])
def test_the_word_of_a_compression_is_read_back(variant):
    form = Variant.of(variant)
    qformat, kv_format = form.formats
    assert form.label == variant
    assert (form.sparsity != "none") == ("_2_4" in variant)
    assert kv_format.value == (variant.rpartition("kv_")[2] if "kv_" in variant else "auto")
    assert qformat.value in variant


def test_a_word_of_another_tool_is_no_compression_of_ours():
    assert Variant.of("awq-marlin").formats is None


def test_the_report_shows_modelled_beside_measured_only_where_there_is_a_model(tmp_path, capsys, ours):
    store = full_store(tmp_path / "store", ("none", "fp8"))
    run(capsys, f"sizing.measured={ours[0]}", f"paths.store={store.root}")
    data = with_models(collect(Store(store.root)), load([f"paths.store={store.root}"]), store.root)
    by_format = {run.result.precision: run for run in data.workloads[0].runs}
    assert by_format["none"].modelled is None
    assert modelled_table(by_format["none"]) is None
    beside = modelled_table(by_format["fp8"])
    at = [i for i, column in enumerate(beside.columns) if column.title == "modelled"]
    assert [beside.columns[i].group for i in at] == ["requests/s", "TTFT p50, ms", "TTFT p95, ms", "ITL p50, ms"]
    levels = by_format["fp8"].result.levels
    for row, level in zip(beside.rows, levels, strict=True):
        assert float(row[at[0]].replace(",", "")) == pytest.approx(level.summary.requests_per_s, rel=0.25)
    assert any("fitted to 3 loads" in note for note in beside.notes)
    text = "".join(figure.caption for figure in document(data).figures())
    assert "Dotted: modelled" in text


def test_a_report_without_any_model_says_nothing_of_one(two_formats_of_the_report):
    data = two_formats_of_the_report
    assert all(run.modelled is None for each in data.workloads for run in each.runs)
    assert "odelled" not in "".join(figure.caption for figure in document(data).figures())


@pytest.fixture
def two_formats_of_the_report(tmp_path):
    store = full_store(tmp_path / "plain", ("none",))
    data = collect(Store(store.root))
    return with_models(data, load([f"paths.store={store.root}"]), store.root)


def test_the_plan_shows_what_the_model_says_only_where_there_is_one(tmp_path, capsys):
    store = f"paths.store={tmp_path}"
    assert COMMANDS["plan"].run(["quant=none", "engine=openvino", store]) == 0
    assert "modelled under" not in capsys.readouterr().out
    assert COMMANDS["plan"].run([*LLAMA, "workload=chat", store]) == 0
    text = capsys.readouterr().out
    assert "modelled under workload=chat (" in text
    assert len(re.findall(r"^  concurrency +\d+ ( +[\d.,]+){4}$", text, re.M)) == 3
    assert "usually off by" in text


def test_a_fit_moves_simulations_and_sizes_of_its_gpu(tmp_path, capsys):
    """The setup that was measured costs what was fitted; another split of it moves by the same factors and says so."""
    file = tmp_path / "c.json"
    run(capsys, f"sizing.measured={FILES / 'aiperf_1_5.json'}", *LLAMA, f"sizing.fit={file}")
    settings = load([*LLAMA, f"sizing.fit={file}"])
    model = known_model(settings)
    here = costs(settings)(Setup(model, gpu_named("h100_sxm"), QFormat.FP8))
    split = costs(settings)(Setup(model, gpu_named("h100_sxm"), QFormat.FP8, tp=2))
    other = costs(settings)(Setup(model_named("mistral-7b"), gpu_named("h100_sxm"), QFormat.FP8))
    assert [each.provenance for each in (here, split, other)] == ["fitted", "transferred", "transferred"]
    cache = costs(settings)(Setup(model, gpu_named("h100_sxm"), QFormat.FP8, KvFormat.FP8))
    sparse = costs(settings)(Setup(model, gpu_named("h100_sxm"), QFormat.FP8, sparse=True))
    assert [each.provenance for each in (cache, sparse)] == ["transferred", "transferred"]
    named = replace(model, name="meta-llama/Llama-3.1-8B-Instruct")
    assert costs(settings)(Setup(named, gpu_named("h100_sxm"), QFormat.FP8)).provenance == "fitted"
    assert "of llama_3_1_8b fp8 TP 1" in other.why
    assert other.spread["throughput"] > 5 * here.spread["throughput"]
    assert here.cost.fixed == pytest.approx(load_fit(file).deployment.cost.fixed)
    assert "TP 1" in split.why
    with pytest.raises(UserError, match="is for llama_3_1_8b fp8 on h100_sxm, not for A100"):
        costs(settings)(Setup(model, gpu_named("a100_sxm_80gb"), QFormat.NONE))


def test_fits_of_other_versions_are_passed_over(tmp_path):
    (tmp_path / FITS).mkdir()
    (tmp_path / FITS / "old.json").write_text('{"schema": 0}')
    assert stored_fits(load([f"paths.store={tmp_path}"])) == []
