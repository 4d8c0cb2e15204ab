"""`make size` from the words of the user to the files."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.host.machine import GpuFacts, Machine
from pipelines.plan.candidates import judge_of
from pipelines.predict.performance.deployment import costs
from pipelines.predict.performance.gpus import gpu_named
from pipelines.predict.performance.limits import drawn_lengths, known_lengths
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import PerformanceModel, Setup, checkpoint_text
from pipelines.predict.performance.placement import place
from pipelines.predict.sizing import size_command
from pipelines.predict.sizing.answer import answer
from pipelines.predict.sizing.question import ask, setup_label
from pipelines.predict.sizing.sensitivity import changes
from pipelines.predict.sizing.size_command import question_id, solve
from pipelines.settings.root import Settings
from tests.conftest import ROOT
from tests.support.load_settings import workload
from tests.support.yardstick import as_if_quiet

BENCHMARKS = ROOT / "tests" / "reference" / "benchmarks"
H100 = ["model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "workload.osl=200"]
ASKED = [*H100, "sizing.average_rate=53", "sizing.slo.ttft_ms=500"]
NO_GPU = Machine(2, 2**34, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")


def load(*overrides) -> Settings:
    from pipelines.settings.compose import load as composed

    return composed(list(overrides))


def size(tmp_path, *words):
    return main(["size", *words, f"report.folder={tmp_path}"])


def answer_folder(tmp_path) -> Path:
    """The only folder with an answer."""
    (folder,) = tmp_path.glob("size-llama_3_8b-h100_sxm-*")
    return folder


def test_a_package_of_the_pages_is_missed_before_the_answer(tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else real(name))
    assert size(tmp_path, *ASKED) == 2
    out, err = capsys.readouterr()
    assert "The answer's page needs the Python package 'matplotlib'" in re.sub(r"\s+", " ", err)
    assert (out, list(tmp_path.iterdir())) == ("", [])
    assert size(tmp_path, "sizing.rate=8", "sizing.measured_gpus=1", "sizing.peak_rate=20", "hardware=h100_sxm") == 0


@pytest.mark.parametrize("arrival", ["constant", "poisson", "gamma"])
def test_the_figures_name_the_arrivals_that_were_simulated(tmp_path, arrival):
    size(tmp_path, *ASKED, "sizing.tp=1", "sizing.requests=200", f"workload.arrival={arrival}")
    text = (answer_folder(tmp_path) / "report.md").read_text()
    assert set(re.findall(r"(\w+) arrivals; TP", text)) == {"Poisson" if arrival == "poisson" else arrival}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workload.isl=1", "workload.osl=1"], "prompts of 1 token beside"),
        (["workload.osl=2", "sizing.slo.ttft_ms=60"], r"with 0\.\d+ running on average"),
    ],
)
def test_one_token_and_less_than_one_request_are_told_as_such(words, said):
    few = ["sizing.requests=200", "sizing.average_rate=0.1", "sizing.tp=1"]
    text = " ".join(size_command.sized_from([*H100, *few, *words], judge_of).lines)
    assert re.search(said, re.sub(r"\s+", " ", text))


def test_each_question_has_its_own_folder(tmp_path):
    """Other limits are another question; another folder for reports or another store is not."""
    ids = [question_id(load(*ASKED, *words)) for words in ([], ["sizing.slo.itl_ms=20"], ["workload.osl=100"])]
    assert len(set(ids)) == 3
    assert question_id(load(*ASKED, "paths.store=elsewhere", f"report.folder={tmp_path}")) == ids[0]


def test_the_answer_stands_on_the_screen_and_in_a_folder(tmp_path, capsys):
    assert size(tmp_path, *ASKED, "sizing.tp=[1,2]", "sizing.requests=400") == 0
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if not line.startswith("written")) <= 80
    assert "65/s at peak (P95 of Poisson arrivals in one second)" in said
    assert "* TP 1 fp8, KV fp8" in said
    folder = answer_folder(tmp_path)
    found = json.loads((folder / "answer.json").read_text())
    best = found["options"][0]
    assert found["recommended"] == best["option"] == "TP 1 fp8, KV fp8"
    assert best["fleet"]["needed"] == -(-65 // best["requests_per_s"])
    assert best["provenance"] in ("fitted", "transferred", "datasheet")
    assert best["requests_per_s_low"] <= best["requests_per_s"] <= best["requests_per_s_high"]
    assert found["check"]["fleet"]["meets"]
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["option"] for row in rows] == [option["option"] for option in found["options"]]
    assert (folder / "pareto.svg").is_file()
    assert "Effect of one change" in (folder / "report.md").read_text()
    assert not (folder / "changes.svg").exists()
    page = (folder / "report.html").read_text()
    assert page.count('<div class="card">') == 3  # no tile without a number, here the cost
    assert "whole servers are billed: 8 GPUs" in page
    text = (folder / "report.md").read_text()
    assert "Because it needs the fewest" in text
    assert "modelled" in text


def test_a_day_is_replayed_and_drawn(tmp_path, capsys):
    words = ["sizing=autoscaled", "sizing.autoscaling.cold_start_s=120", "sizing.tp=1", "sizing.requests=400"]
    assert size(tmp_path, *ASKED, *words) == 0
    said = capsys.readouterr().out
    assert "built-in shape of a business day (assumed, not measured)" in said
    assert "GPU-hours" in said
    record = json.loads((answer_folder(tmp_path) / "answer.json").read_text())
    day = record["day"]
    assert day["autoscaled"]["gpu_hours"] < day["fixed"]["gpu_hours"]
    # tokens and prices are those of this day, and not of 53/s around the clock
    assert record["question"]["demand"]["requests_per_day"] == pytest.approx(day["fixed"]["requests"], rel=0.01)
    assert size(tmp_path, *ASKED, *words, "sizing.busy_hours=8") == 2
    assert "sizing.busy_hours=8 has no effect" in capsys.readouterr().err
    assert (answer_folder(tmp_path) / "day.png").is_file()
    assert size(tmp_path, *ASKED, *words, "sizing.autoscaling.least=500") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"least=500 is more than the (\d+) instances of the fixed fleet.* Lower it to \1 or less", said)


def test_the_table_has_the_same_columns_for_every_option(tmp_path):
    """Also where one of them has no upper end: a limit that may be out of reach."""
    words = ["sizing.slo.ttft_ms=85", "sizing.tp=[1,8]", "sizing.requests=300"]
    assert size(tmp_path, *ASKED, *words) == 0
    rows = list(csv.DictReader((answer_folder(tmp_path) / "table.csv").open()))
    assert all(None not in row for row in rows)


def test_prices_that_are_given_are_told(tmp_path, capsys):
    prices = ["sizing.prices.server_usd=320000", "sizing.prices.years=4", "sizing.prices.licence_usd=4500"]
    assert size(tmp_path, *ASKED, *prices, "sizing.tp=1", "sizing.requests=400") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "116,000 USD a year (servers 80,000, licences 36,000); not given and not included: hosting, power" in said
    assert "% utilisation" in said
    assert re.search(r"whole servers are billed: 8 GPUs, \d of them idle", said)


def test_a_benchmark_is_sized_from(tmp_path, capsys):
    words = ["sizing.peak_rate=30", "sizing.slo.ttft_ms=3000", "hardware=h100_sxm"]
    assert size(tmp_path, f"sizing.measured={BENCHMARKS / 'aiperf_1_5.json'}", *words) == 0
    said = capsys.readouterr().out
    assert "measured with aiperf" in " ".join(said.split())
    assert "not simulated" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*H100], "There is no load to size for"),
        (["sizing.average_rate=5"], r"hardware=auto, and this machine has no GPU \(nvidia-smi is not installed\)"),
        ([*ASKED, "sizing.model=lama-3-8b"], r"model 'lama-3-8b' is not known.*Did you mean 'llama-3-8b'"),
        ([*ASKED, "hardware=h100_smx"], r"hardware=h100_smx is not known.*Did you mean 'h100_sxm'"),
        ([*ASKED, "model=lama_3_8b"], r"model=lama_3_8b is not known.*Did you mean 'llama_3_8b'"),
        (
            ["model=hub", "model.hub_id=org/x", "hardware=l4", "sizing.peak_rate=1"],
            "So the sizes of org--x are not known",
        ),
    ],
)
def test_what_is_missing_is_named(words, message):
    with pytest.raises(UserError, match=message):
        ask(load(*words), NO_GPU)


def test_the_gpu_of_this_machine_is_taken_with_its_servers_size():
    gpus = tuple(GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 85_520_809_984) for _ in range(4))
    machine = Machine(8, 2**38, gpus, "", has_tensorrt_llm=True, platform="test")
    asked = ask(load("model=llama_3_8b", "sizing.average_rate=5"), machine)
    assert (asked.gpu.gpu, asked.gpu.gpus_per_server, asked.tp) == ("H100-SXM-80GB", 4, (1, 2, 4))


def test_a_chosen_tp_is_not_searched():
    assert ask(load(*ASKED, "parallel=tp2"), NO_GPU).tp == (2,)
    assert ask(load(*ASKED), NO_GPU).tp == (1, 2, 4, 8)
    assert ask(load(*ASKED, "sizing.tp=[4,8]"), NO_GPU).tp == (4, 8)


def test_a_model_of_the_table_needs_no_file_in_conf():
    asked = ask(load("sizing.model=mixtral-8x7b", "hardware=h100_sxm", "sizing.average_rate=5"), NO_GPU)
    assert asked.model.num_experts == 8


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "is not a Hugging Face model: it has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path, text, fault):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=fault):
        ask(load(f"model.path={tmp_path}", "hardware=h100_sxm", "sizing.average_rate=5"), NO_GPU)


def test_the_folder_that_is_given_comes_before_conf(tmp_path):
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768}
    sizes |= {"architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_local_experts": 8, "num_experts_per_tok": 2}))
    asked = ask(load("model=llama_3_8b", f"model.path={tmp_path}", "hardware=h100_sxm", "sizing.peak_rate=5"), NO_GPU)
    assert (asked.model.num_experts, asked.model.name) == (8, tmp_path.name)


def test_turns_of_a_conversation_carry_all_before_them():
    isl, osl = drawn_lengths(workload(isl=100, osl=50, turns=3), 6)
    assert list(isl) == [100, 250, 400] * 2
    assert set(osl) == {50}


def test_lengths_of_a_trace_are_its_own(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"time": 0, "isl": 10, "osl": 5}\n{"time": 1, "isl": 20, "osl": 7}\n')
    isl, osl = drawn_lengths(workload(arrival="trace", trace=file), 4)
    assert (list(isl), list(osl)) == ([10, 20, 10, 20], [5, 7, 5, 7])


def test_many_requests_are_represented_by_those_that_are_simulated(tmp_path):
    """Their mean is that of all within half a percent; limits of the engine are for the longest of all."""
    file, rng = tmp_path / "trace.csv", np.random.default_rng(1)
    isl, osl = rng.lognormal(6, 1, 5000).astype(int) + 1, rng.integers(1, 400, 5000)
    file.write_text("time,isl,osl\n" + "".join(f"{i},{a},{b}\n" for i, (a, b) in enumerate(zip(isl, osl, strict=True))))
    drawn, answers = drawn_lengths(workload(trace=file), 1000)
    assert (drawn + answers).mean() == pytest.approx((isl + osl).mean(), rel=5e-3)
    lengths = known_lengths(load(f"workload.trace={file}", "sizing.requests=1000"))
    assert (lengths.longest_isl, lengths.longest) == (isl.max(), (isl + osl).max())
    question = ask(load("model=llama_3_8b", "hardware=h100_sxm", f"workload.trace={file}"), NO_GPU)
    assert question.longest == (isl + osl).max()
    with pytest.raises(UserError, match=r"is longer than the context of llama_3_8b.* Leave such requests out of"):
        question.check()


@pytest.mark.parametrize(
    ("load_words", "requests"),
    [
        (["sizing.average_rate=20", "sizing.peak_factor=4"], 20 * 86400),  # the peak is shorter than an hour
        (["sizing.average_rate=20", "sizing.peak_factor=1.5"], 20 * 1.5 * 12.35 * 3600),  # the peak is the busiest hour
        (["sizing.users=50000", "sizing.requests_per_user_day=20", "sizing.peak_factor=4"], 1e6),
        (["sizing.users=50000", "sizing.requests_per_user_day=20", "sizing.busy_hours=12"], 1e6),
        (["workload.trace=FILE"], None),
    ],
)
def test_the_day_has_the_requests_that_are_counted(tmp_path, monkeypatch, load_words, requests):
    """20/s with a factor of 4 had 3,556,800 requests a day, the average for 49 hours."""
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * i + i % 7, "input_length": 300, "output_length": 50} for i in range(3000)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(size_command, "changes", lambda *_: [])  # not of the day
    words = [*H100[: 5 if requests else 3], "sizing.slo.ttft_ms=500", "sizing.tp=1", "sizing.requests=200", *load_words]
    words += ["sizing.autoscaling.day=business", "sizing.autoscaling.cold_start_s=60"]
    settings = load(*(word.replace("FILE", str(file)) for word in words))
    result = solve(settings, ask(settings, NO_GPU), costs(settings))
    demand = result.answer.question.demand
    assert demand.busy_hours <= 24
    assert demand.requests_per_day == pytest.approx(result.day.fixed.requests, rel=0.01)
    assert requests is None or demand.requests_per_day == pytest.approx(requests, rel=0.001)


def test_users_whose_day_is_busier_than_the_peak_are_refused(tmp_path, capsys):
    users = ["sizing.users=50000", "sizing.requests_per_user_day=20", "sizing.slo.ttft_ms=500", "sizing.tp=1"]
    day = ["sizing.autoscaling.day=business", "sizing.autoscaling.cold_start_s=60", "sizing.requests=200"]
    assert size(tmp_path, *H100, *users, *day) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a peak of 17 requests/s, and the busiest hour of the day's shape has 22.49" in said
    assert "sizing.busy_hours=12" in said
    assert size(tmp_path, *H100, *users, *day, "sizing.peak_rate=20") == 2
    assert "sizing.peak_rate=23" in capsys.readouterr().err


def test_one_file_is_rate_peak_lengths_and_day(tmp_path, capsys):
    """Nothing else is given of the load."""
    file = tmp_path / "log.csv"
    log = (f"{1e12 + 100 * n},{1900 + n % 200},200\n" for n in range(3000))
    file.write_text("start,sent,got\n" + "".join(log))
    columns = "workload.columns={time: start, isl: sent, osl: got}"
    words = (f"workload.trace={file}", columns, "sizing=autoscaled", "sizing.autoscaling.cold_start_s=60")
    assert size(tmp_path, *H100[:3], *words, "sizing.slo.ttft_ms=500", "sizing.requests=400") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "load 10/s on average, 10/s at peak (busiest 60 s of the trace)" in said
    assert "trace 3,000 requests in 299.9 s, of which 400 are simulated" in said
    assert "requests 2,000 (1,900 to 2,099) tokens in, 200 out; online" in said
    assert f"day trace {file}; 3,000 requests, busiest 10/s" in said


def test_the_former_trace_of_a_day_says_where_it_went(tmp_path, capsys):
    assert size(tmp_path, *ASKED, "sizing.autoscaling.trace=x.csv") == 2
    assert "It is now\n       'workload.trace'." in capsys.readouterr().err


def test_a_trace_without_lengths_is_refused(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"time": 0, "prompt": "Hello", "osl": 5}\n')
    with pytest.raises(UserError, match="has prompts, whose tokens only the model's tokenizer can count"):
        drawn_lengths(workload(arrival="trace", trace=file), 4)


SCRIPT = """
import sys, time
from pathlib import Path
from pipelines.settings.compose import load
from pipelines.host.machine import gather
from pipelines.predict.sizing.question import ask, setup_label
from pipelines.predict.performance.deployment import costs
from pipelines.predict.sizing.size_command import solve
from pipelines.predict.sizing.words import words
settings = load(sys.argv[1:])
result = solve(settings, ask(settings, gather()), costs(settings))
words(result)
print(time.process_time())
"""


def seconds(*overrides) -> float:
    """Processor time from the start of Python to the answer, imports included; the first of three runs compiles."""
    run = [sys.executable, "-c", SCRIPT, *overrides]
    return as_if_quiet(
        lambda: float(subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout), runs=3
    )


@pytest.mark.thorough
def test_an_answer_without_a_search_is_quick():
    """The goal is a second of processor time; 1.2 s is measured."""
    assert seconds(*ASKED, "sizing.tp=1") < 2.0


@pytest.mark.thorough
def test_an_answer_with_a_search_takes_less_than_ten_seconds():
    assert seconds(*ASKED, "sizing.formats=[none,fp8,int8_sq,int4_awq]") < 10.0


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert size(tmp_path / "file", *ASKED, "sizing.tp=1", "sizing.requests=200") == 2
    assert "cannot be created" in capsys.readouterr().err


def test_a_result_of_nothing_known_is_refused(tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text("{}")
    assert size(tmp_path, f"sizing.measured={file}", "sizing.peak_rate=3") == 2
    assert "is not a benchmark result" in " ".join(capsys.readouterr().err.split())
    assert Path(file).is_file()


def test_a_published_mixture_is_sized_as_its_publisher_made_it():
    """NVIDIA's NVFP4 folder of Qwen3 235B, with attention data parallel ranks, on the LLM API, which alone runs it."""
    apart = "llm_api.extra={enable_attention_dp: true}"
    words = ("sizing.model=qwen3-235b-a22b", "quant=nvfp4", "sizing.tp=[1,4]", "hardware=b200_sxm", apart)
    settings = load(*words, "sizing.peak_rate=5")
    question = ask(settings, NO_GPU)
    assert question.engine == "TensorRT-LLM's LLM API"
    assert [setup_label(each) for each in question.setups()] == ["TP 1 nvfp4", "DEP 4 nvfp4"]
    for setup in question.setups():
        judge_of(settings, NO_GPU)(setup, None)  # no rule refuses what is not made here
        assert checkpoint_text(setup) == "nvidia/Qwen3-235B-A22B-NVFP4 as published, not made here"
        with pytest.raises(UserError, match="quant=int4_awq of Qwen3MoeForCausalLM cannot be exported"):
            judge_of(settings, NO_GPU)(replace(setup, qformat=QFormat.INT4_AWQ), None)


def test_a_format_that_nobody_publishes_is_said_to_be_unknown():
    setup = Setup(model_named("deepseek-r1"), gpu_named("h100_sxm"), QFormat.INT4_AWQ, tp=8)
    assert checkpoint_text(setup).startswith("no published folder of deepseek-r1 in int4_awq is known here")
    assert checkpoint_text(Setup(model_named("llama-3.1-8b"), gpu_named("h100_sxm"), QFormat.FP8)) == ""


def test_a_rank_with_the_whole_attention_has_a_batch_and_a_cache_of_its_own():
    """A KV cache of 61 x 576 bytes a token on each of 8 ranks holds 8 times the requests; TP holds one copy on each."""
    apart = ("llm_api.extra={enable_attention_dp: true}",)
    words = ("sizing.model=deepseek-r1", "quant=fp8", "kv_cache.dtype=fp8", "hardware=h200_sxm", "sizing.tp=8")
    placed = []
    for more in ((), apart):
        question = ask(load(*words, "sizing.peak_rate=5", "build.max_batch_size=128", *more), NO_GPU)
        setup = next(question.setups())
        cost = PerformanceModel.load().cost(setup)
        placed.append((setup.lanes, place(setup, cost.cost, question.terms, question.lengths).concurrency))
    assert [lanes for lanes, _ in placed] == [1, 8]
    assert [each.requests for _, each in placed] == [128, 8 * 128]


def test_the_kv_caches_of_all_attention_data_parallel_ranks_are_counted_and_other_ranks_named_alike():
    apart = "llm_api.extra={enable_attention_dp: true}"
    words = ("sizing.model=qwen3-30b-a3b", "quant=fp8", "hardware=h200_sxm", "sizing.requests=200", apart)
    labels, held = [], []
    for tp in (1, 4):
        question = ask(load(*words, "sizing.peak_rate=5", f"sizing.tp={tp}"), NO_GPU)
        found = answer(question, PerformanceModel.load().cost)
        one = found.chosen.instance
        held.append(one.kv_tokens / (one.placed.concurrency.requests * question.lengths.mean))
        labels.append({c.what for c in changes(question, found.chosen, PerformanceModel.load().cost)})
    assert min(held) >= 1
    assert "DEP 2" in labels[0]
    assert {"DEP 2", "DEP 8"} < labels[1]
    assert not any(what.startswith("TP ") for what in labels[0] | labels[1])


def test_a_rule_names_the_model_that_is_sized():
    settings = load("sizing.model=gemma-3-1b", "engine=tensorrt_llm", "hardware=h100_sxm", "sizing.peak_rate=5")
    setup = Setup(model_named("gemma-3-1b"), gpu_named("h100_sxm"), QFormat.INT4_WO, tp=4)
    with pytest.raises(UserError, match="and gemma-3-1b has "):
        judge_of(settings, NO_GPU)(setup, None)


def test_experts_must_be_divisible_where_attention_is_not_split():
    setup = Setup(model_named("llama-4-maverick"), gpu_named("gb200"), QFormat.NVFP4, tp=16, attention_dp=True)
    assert PerformanceModel.load().cost(setup).cost.token > 0  # 40 heads need not be divisible
    with pytest.raises(UserError, match="has 128 experts; tp_size=24"):
        PerformanceModel.load().cost(replace(setup, tp=24))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["sizing.rate=5", "sizing.measured_gpus=1", "sizing.formats=[fp8,none]"], r"sizing\.formats=\[fp8,none\]"),
        (["sizing.rate=5", "sizing.measured_gpus=1", "sizing.kv_formats=int8"], r"sizing\.kv_formats=\[int8\]"),
        (["sizing.rate=5", "sizing.measured_gpus=1", "sizing.requests=300"], r"sizing\.requests=300"),
        (["sizing.rate=5", "sizing.measured_gpus=1", "sizing.slo.percentile=99"], r"sizing\.slo\.percentile=99"),
        (["sizing.measured=a.json", "sizing.fit=b.json"], r"sizing\.fit=b\.json"),
        (["sizing.autoscaling.up_at=0.9"], r"sizing\.autoscaling\.up_at=0\.9"),
        (["sizing.autoscaling.cold_start_s=60"], r"sizing\.autoscaling\.cold_start_s=60"),
        (["sizing.peak_window_s=10"], r"sizing\.peak_window_s=10"),
        (["hardware=[h100_sxm,l40s]", "sizing.peak_window_s=10"], r"sizing\.peak_window_s=10"),
        (["sizing.busy_hours=8"], r"sizing\.busy_hours=8"),
        (["sizing.prices.licence_usd=4500"], r"sizing\.prices\.licence_usd=4500"),
        (["sizing.prices.utilisation=0.5"], r"sizing\.prices\.utilisation=0\.5"),
        (["workload=burst"], r"workload\.arrival=burst"),
        (["workload.think_time_s=2"], r"workload\.think_time_s=2"),
        (["workload.arrival=poisson", "workload.cv=3"], r"workload\.cv=3\.0"),
        (["workload.trace_speed=2"], r"workload\.trace_speed=2\.0"),
    ],
)
def test_what_the_question_does_not_read_is_refused(tmp_path, capsys, words, refused):
    assert size(tmp_path, "model=llama_3_8b", "hardware=h100_sxm", "sizing.peak_rate=10", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(f"{refused} has no effect", said)
    assert ("or add sizing.autoscaling.day=business" in said) == ("autoscaling" in refused)
