"""`make simulate`: what it prints, what it writes, what it refuses. In ticks, so that every number can be checked."""

import contextlib
import csv
import importlib.util
import io
import itertools
import json
import re
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.api import simulate
from pipelines.cli.commands import COMMANDS
from pipelines.domain.errors import UserError
from pipelines.host import files
from pipelines.loadgen.config import load_faults
from pipelines.predict.performance.deployment import FittedModel
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.simulate import files as written
from pipelines.predict.simulate.simulate_command import with_defaults
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.predict.simulator.run import IterationCost
from tests.conftest import ROOT


def simulated(folder: Path, *overrides: str) -> Path:
    """Run the command; the run folder."""
    before = set((folder / "runs").glob("*"))
    assert COMMANDS["simulate"].run([f"paths.runs={folder}/runs", f"paths.store={folder}/store", *overrides]) == 0
    (made,) = set((folder / "runs").glob("*")) - before
    return made


def test_a_missing_package_is_said_before_the_run(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else real(name))
    with pytest.raises(UserError, match="needs the Python package 'matplotlib'"):
        COMMANDS["simulate"].run([f"paths.runs={tmp_path}/runs", f"paths.store={tmp_path}/store"])
    assert list(tmp_path.iterdir()) == []


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


AT_ONCE = ("workload=classic", "benchmark.num_requests=100")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return simulated(tmp_path_factory.mktemp("simulate"), *AT_ONCE)


@pytest.fixture(scope="module")
def without_words(tmp_path_factory) -> tuple[Path, str]:
    """The run folder and what the command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        made = simulated(tmp_path_factory.mktemp("without_words"))
    return made, out.getvalue()


def test_without_words_static_and_in_flight_stand_side_by_side(without_words):
    _, out = without_words
    assert re.search(r"^ +static +in-flight$", out, re.M)
    assert re.search(r"^requests done +100 +100$", out, re.M)
    assert "requests per 1,000 ticks" in out
    assert max(map(len, out.split("\n\n")[1].splitlines())) < 80


def test_without_words_static_batching_falls_behind_a_load_that_in_flight_batching_serves(without_words):
    """The panels of queue and latency have something to show: one line climbs, the other one comes and goes."""
    made, out = without_words
    static, inflight = json.loads((made / "summary.json").read_text())["outcomes"]
    waiting = [float(row["queue"]) for row in rows(made / "iterations.csv") if row["policy"] == "in-flight"]
    assert 2 <= max(waiting) <= 8
    assert sum(now == 0 < before for before, now in itertools.pairwise(waiting)) >= 5
    assert static["queue_max"] > 3 * inflight["queue_max"]
    assert static["ttft"]["mean"] > 5 * inflight["ttft"]["mean"]
    assert (static["offered"], inflight["capacity"]) == (0.22, None)
    out = " ".join(out.split())
    assert "0.22 requests/tick (poisson)" in out
    assert "static: the load is 1.2 times the capacity: of 220 requests per 1,000 ticks it can serve 178." in out
    assert "in-flight: the load" not in out


def test_the_guide_shows_what_the_first_command_prints(without_words):
    table = without_words[1].split("\n\n")[1]
    assert textwrap.indent(table, "    ") in GUIDE


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ([], ["workload=classic", "workload.arrival=poisson", "benchmark.request_rate=0.22", AT_ONCE[1]]),
        (["workload.arrival=burst"], ["workload=classic", "workload.arrival=poisson", AT_ONCE[1]]),
        (
            ["workload.arrival=constant"],
            ["workload=classic", "workload.arrival=poisson", "benchmark.request_rate=0.22", AT_ONCE[1]],
        ),
        (["benchmark.request_rate=3"], ["workload=classic", "workload.arrival=poisson"]),
        (["benchmark.concurrency=3"], ["workload=classic", "workload.arrival=closed"]),
        (["workload=poisson", "benchmark.request_rate=3"], []),
    ],
)
def test_words_about_the_load_replace_the_default_one(words, added):
    assert with_defaults(words)[0] == [*added, *words]
    _, settings = with_defaults(words)
    assert not load_faults(settings.workload, settings.benchmark)


def test_the_table_of_iterations_names_what_kept_requests_waiting(first):
    found = {
        policy: {row["refused"] for row in rows(first / "iterations.csv") if row["policy"] == policy}
        for policy in ("static", "in-flight")
    }
    assert found == {"static": {"", "batch", "slots"}, "in-flight": {"", "slots"}}


def test_the_run_folder_has_tables_pictures_trace_and_page(first):
    made = {path.name for path in first.iterdir()}
    assert made == {
        "config.yaml", "overrides.json", "run.log", "summary.json", "requests.csv", "iterations.csv", "trace.json",
        "slots.png", "curves.png", "simulator.html",
    }  # fmt: skip
    assert (first / "slots.png").read_bytes().startswith(b"\x89PNG")


def test_tables_say_the_same_as_the_summary(first):
    static, inflight = json.loads((first / "summary.json").read_text())["outcomes"]
    requests = rows(first / "requests.csv")
    of_inflight = [row for row in requests if row["policy"] == "in-flight"]
    ttft = [float(row["first_token"]) - float(row["arrival"]) for row in of_inflight]
    assert inflight["ttft"]["mean"] == pytest.approx(sum(ttft) / 100)
    assert inflight["tokens_rate"] * inflight["window"] == pytest.approx(sum(int(row["osl"]) for row in of_inflight))
    iterations = [row for row in rows(first / "iterations.csv") if row["policy"] == "static"]
    assert float(iterations[-1]["start"]) + float(iterations[-1]["ticks"]) == static["window"]


def test_in_flight_keeps_the_slots_busy_and_is_done_earlier(first):
    static, inflight = json.loads((first / "summary.json").read_text())["outcomes"]
    assert inflight["window"] < 0.8 * static["window"]
    assert static["busy"] < 3.5 < inflight["busy"] <= 4
    assert inflight["ttft"]["mean"] < static["ttft"]["mean"]


@pytest.mark.pictures
def test_a_second_run_gives_the_same_files(first, tmp_path):
    again = simulated(tmp_path, *AT_ONCE)
    for name in ("summary.json", "requests.csv", "iterations.csv", "trace.json", "slots.png", "simulator.html"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_turns_that_wait_for_an_answer_are_refused(tmp_path):
    """Their times depend on the server."""
    (tmp_path / "trace").write_text(
        '{"session_id": 1, "timestamp": 1, "input_length": 8, "output_length": 2}\n'
        '{"session_id": 1, "delay": 1, "input_length": 8, "output_length": 2}'
    )
    with pytest.raises(UserError, match=r"has 1 turn with a delay .* Give each turn a time of its own"):
        COMMANDS["simulate"].run([f"workload.trace={tmp_path / 'trace'}", f"paths.runs={tmp_path}"])


def test_policies_slots_and_an_open_load_are_chosen_in_words(tmp_path, capsys):
    words = ("simulator.policy=inflight_chunked", "simulator.slots=8", "workload=poisson", "benchmark.request_rate=0.1")
    made = json.loads((simulated(tmp_path, *words) / "summary.json").read_text())
    (outcome,) = made["outcomes"]
    assert (outcome["policy"], outcome["slots"], outcome["request_rate"]) == ("inflight_chunked", 8, 0.1)
    # 64 tokens of 128-token prompts take a tick, as a decode step does: 8 + 64.
    assert "72 tokens per iteration" in capsys.readouterr().out
    assert outcome["itl"]["count"] == 1000


def test_several_loads_are_rows_of_one_table_and_points_of_the_curves(tmp_path, capsys):
    made = json.loads((simulated(tmp_path, "benchmark.concurrency=[1,8]") / "summary.json").read_text())
    out = capsys.readouterr().out
    assert re.search(r"^1 +static ", out, re.M)
    assert re.search(r"^8 +in-flight ", out, re.M)
    assert made["curves"]["against"] == "concurrency"
    assert [[point["load"] for point in curve["points"]] for curve in made["curves"]["of"]] == [[1, 8], [1, 8]]
    assert max(map(len, out.split("\n\n")[1].splitlines())) < 80


def test_a_run_that_is_cut_says_whom_its_latencies_leave_out(tmp_path, capsys):
    simulated(tmp_path, *AT_ONCE, "simulator.until=100", "workload.osl=10")
    out = capsys.readouterr().out
    # The worked example: fixed lengths give the same to both policies.
    assert re.search(r"^requests done +20 +20$", out, re.M)
    assert re.search(r"^queue at the end +76 +76$", out, re.M)
    assert "latencies cover only requests that got that far" in " ".join(out.split())


def test_a_full_kv_cache_is_named_and_pauses_are_counted(tmp_path, capsys):
    # 4 x 18 tokens cannot be held by 40 blocks of one token.
    words = ("simulator.kv_blocks=40", "simulator.tokens_per_block=1", "workload.isl=8", "workload.osl=10")
    simulated(tmp_path, *words, "simulator.policy=[inflight]")
    reserved = capsys.readouterr().out
    assert "because the KV cache was full" in " ".join(reserved.split())
    assert re.search(r"^pauses +0$", reserved, re.M)
    simulated(tmp_path, *words, "simulator.policy=[inflight]", "simulator.admission=max_utilization")
    assert not re.search(r"^pauses +0$", capsys.readouterr().out, re.M)


ATTENTION_DP = "llm_api.extra={enable_attention_dp: true}"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["simulator.policy=inflite"], r"policy='inflite'.*static, inflight.*Did you mean 'inflight'\?$"),
        (["simulator.policy=[static,static]"], "names one twice"),
        (["simulator.policy=[]"], r"policy=\[\], which simulates nothing"),
        (["simulator.slots=0"], "simulator.slots='0'"),
        (["simulator.prefill=0"], "simulator.prefill='0'"),
        (["simulator.until=-5"], "simulator.until='-5'"),
        (["simulator.time=hours"], "simulator.time='hours'.*ticks"),
        (["workload=poisson"], "workload.arrival=poisson has no rate"),
        (["workload=poisson", "benchmark.concurrency=4", "benchmark.request_rate=1"], r"concurrency=\[4\] conflicts"),
        (
            ["workload=poisson", "benchmark.request_rate=1", "simulator.client_delay=2"],
            "client_delay=2 does not apply to",
        ),
        (["simulator.admission=max_utilization"], r"simulator\.admission=max_utilization has no effect.*kv_blocks"),
        (["simulator.tokens_per_block=16"], r"simulator\.tokens_per_block=16 has no effect.*simulator\.kv_blocks"),
        (
            ["hardware=h100_sxm", "model=llama_3_8b", "simulator.prefill=3"],
            r"\.prefill=3 has .*model or sizing\.fit gives",
        ),
        (["hardware=h100_sxm", "model=llama_3_8b", "simulator.chunks=2"], r"simulator\.chunks=2 has no effect: in sec"),
        (["simulator.kv_blocks=2"], "128 input and 18 output tokens needs 5 KV blocks of 32 tokens; the cache has 2"),
        (
            ["simulator.kv_blocks=5", "simulator.prefix_tokens=200"],
            "18 output tokens needs 2 KV blocks of 32 tokens besides those of the shared prefix of 200 tokens",
        ),
        (["simulator.until=1"], r"simulator\.until=1 ends the run before the first request arrives, at 4\.297 ticks"),
        (
            ["hardware=h100_sxm", "model=llama_3_8b", "workload.isl=8000", "workload.osl=300"],
            r"workload=fixed has requests of up to 8,300 tokens; the engine holds max_seq_len=8192\. .*reads no more",
        ),
        (
            ["hardware=h100_sxm", "model=llama_3_8b", "workload.isl=900", "build.max_input_len=800"],
            r"up to 900 tokens; the engine holds max_input_len=800\. .*or set build\.max_input_len=900 or more",
        ),
        (["simulator.time=seconds"], "simulator.time=seconds needs a GPU.*hardware=auto"),
        (["hardware=h100_sxm", "model=llama_3_1_70b", "quant=none"], "leaves no KV cache on h100_sxm"),
        (["hardware=a100_sxm_80gb", "model=llama_3_8b", "quant=fp8"], "fp8.*A100"),
        (["hardware=h100_sxm", "model=llama_3_8b", "hardware.tdp_w=null"], "H100-SXM-80GB: tdp_w is missing"),
        (
            ["hardware=h100_sxm", "model=llama_3_8b", "hardware.nvlink_gb_s_bidir=null"],
            "H100-SXM-80GB: nvlink_gb_s_bidir is missing",
        ),
        (["hardware=h100_sxm", "model=llama_3_8b", "build.pp_size=2"], "build.pp_size=2 is not simulated.*make size"),
        (
            ["hardware=b200_sxm", "sizing.model=deepseek-r1", "quant=nvfp4", "build.tp_size=4", ATTENTION_DP],
            "4 attention data parallel ranks .*is not simulated: each of its ranks.*make size",
        ),
    ],
)
def test_bad_input_gets_one_clear_fault(tmp_path, words, fault):
    with pytest.raises(UserError, match=fault) as caught:
        simulated(tmp_path, *words)
    assert len(caught.value.faults) == 1
    assert not list((tmp_path / "runs").glob("*"))


def test_faults_are_told_together(tmp_path):
    with pytest.raises(UserError) as caught:
        simulated(tmp_path, "simulator.slots=0", "simulator.chunks=0")
    assert len(caught.value.faults) == 2


def test_a_gpu_makes_it_seconds_with_the_engine_limits_of_the_build(tmp_path, capsys):
    words = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload=chat", "benchmark.concurrency=25")
    given = ("build.max_batch_size=2048", "build.max_num_tokens=8192")
    made = json.loads((simulated(tmp_path, *words, *given) / "summary.json").read_text())
    static, inflight = made["outcomes"]
    assert made["unit"] == "s"
    assert inflight["slots"] == 2048
    assert 0.001 < inflight["itl"]["mean"] < 0.1
    assert inflight["requests_rate"] > static["requests_rate"]
    out = capsys.readouterr().out
    assert "llama_3_8b fp8-kv_fp8 on h100_sxm" in out  # the tuning sets the FP8 KV cache
    assert "TTFT mean, ms" in out
    assert inflight["busy_max"] == 25
    assert re.search(r"slots in use +1\d\.\d +2\d\.\d\n", out)  # of 25, not a share of 2,048


LONG_PROMPTS = (
    "model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "workload.osl=200",
    "benchmark.concurrency=25", "build.max_num_tokens=8192",
)  # fmt: skip


def test_a_static_engine_is_not_capped_by_the_token_budget_of_the_in_flight_one(tmp_path, capsys):
    """8,192 tokens are 4 prompts of 2,000: batches of 4 of 25 made in-flight batching look 3.3 times as fast."""
    made = json.loads((simulated(tmp_path, *LONG_PROMPTS) / "summary.json").read_text())
    static, inflight = made["outcomes"]
    assert (static["busy_max"], inflight["busy_max"]) == (25, 25)
    assert (static["max_num_tokens"], inflight["max_num_tokens"]) == (None, 8192)
    assert inflight["tokens_rate"] < 1.1 * static["tokens_rate"]  # equal lengths: there is nothing to gain
    assert inflight["kv_share"] < 0.2
    assert set(inflight["waiting"]) == {"max_num_tokens"}
    out = " ".join(capsys.readouterr().out.split())
    assert "static: all prompts of a batch in one iteration" in out
    assert "the others: 8,192 tokens per iteration" in out
    assert "static: no request waited for a slot." in out
    assert "the next prompt did not fit into the token budget of 8,192 (max_num_tokens)" in out
    assert "KV cache was full" not in out


def test_a_token_budget_that_is_given_holds_for_every_engine_and_is_named_as_the_limit(tmp_path, capsys):
    made = json.loads(
        (simulated(tmp_path, *LONG_PROMPTS, "simulator.max_num_tokens=8192") / "summary.json").read_text()
    )
    static, _ = made["outcomes"]
    assert (static["busy_max"], static["max_num_tokens"]) == (4, 8192)
    out = " ".join(capsys.readouterr().out.split())
    assert "used up the token budget of 8,192 (max_num_tokens)" in out
    assert "all prompts of a batch" not in out


GPU = ("hardware=h100_sxm", "model=llama_3_8b", "quant=fp8", "workload=poisson")


def test_a_window_in_which_nothing_ends_lasts_until_the_last_response(tmp_path):
    """These requests arrive within 43 ms, between the ends of two static batches."""
    made = simulated(tmp_path, *GPU, "benchmark.request_rate=100", "benchmark.num_requests=5")
    static, in_flight = json.loads((made / "summary.json").read_text())["outcomes"]
    assert static["window"] > static["e2e"]["max"]
    assert static["requests_rate"] == pytest.approx(static["requests"] / static["window"])
    assert min(static["requests_rate"], in_flight["requests_rate"]) > 20


@pytest.mark.parametrize("more", [(), ("simulator.drawn=0.5",)])
def test_a_request_that_comes_late_is_drawn(tmp_path, more):
    """The first one arrives after 1 s and takes 0.3 s; a picture that ends before it has an empty queue."""
    made = simulated(tmp_path, *GPU, "benchmark.request_rate=0.05", "benchmark.num_requests=1", *more)
    assert (made / "slots.png").is_file()


def test_a_load_far_above_capacity_says_so(tmp_path, capsys):
    words = ("workload=poisson", "workload.osl=10")
    made = simulated(tmp_path, *words, "benchmark.request_rate=364", "benchmark.num_requests=200")
    static, _ = json.loads((made / "summary.json").read_text())["outcomes"]
    # 4 requests take 4 prompts of 2 ticks and 9 tokens of one
    assert static["offered"] / static["capacity"] == pytest.approx(364 * 17 / 4, rel=1e-9)
    out = " ".join(capsys.readouterr().out.split())
    assert "static: the load is 1,547 times the capacity: of 364,000 requests per 1,000 ticks it can serve 235." in out
    assert "TTFT and E2E depend on the length of the run" in out
    simulated(tmp_path, *words, "benchmark.request_rate=[0.01,0.5,2]", "simulator.policy=inflight")
    out = " ".join(capsys.readouterr().out.split())
    assert "in-flight at 2 requests/tick (poisson): the load is 8.5 times the capacity" in out
    assert "length of the run. The same holds for 1 smaller load." in out
    assert "0.01 requests/tick (poisson): the load" not in out


def test_more_users_than_can_run_are_named(tmp_path, capsys):
    simulated(tmp_path, "benchmark.concurrency=4000", "benchmark.num_requests=4100", "simulator.policy=inflight")
    out = " ".join(capsys.readouterr().out.split())
    assert "in-flight: 4,000 users are 1,000 times the 4 requests that run together" in out


def test_a_model_that_only_the_llm_api_runs_is_said_to_be_served_by_it():
    words = ["hardware=h100_sxm", "quant=none", "benchmark.concurrency=2"]
    said = "engine: TensorRT-LLM's LLM API, because TensorRT engines do not run gpt-oss-20b"
    assert said in " ".join(simulate("sizing.model=gpt-oss-20b", *words).text.split())
    assert "engine:" not in simulate("sizing.model=llama-3.1-8b", *words).text


def test_a_mixture_of_experts_is_simulated_in_seconds_too(tmp_path, capsys):
    words = ("sizing.model=mixtral-8x7b", "quant=fp8", "hardware=h200_sxm", "benchmark.concurrency=4")
    made = json.loads((simulated(tmp_path, *words, "simulator.policy=inflight") / "summary.json").read_text())
    (outcome,) = made["outcomes"]
    assert outcome["requests"] > 0
    assert made["what"].startswith("mixtral-8x7b fp8 on h200_sxm")


def test_what_is_not_read_is_named():
    """In ticks neither model nor engine; in seconds not how a benchmark measures; what is read is not named."""
    few = ["benchmark.num_requests=20", "benchmark.request_rate=0.2"]
    ticks = simulate("quant=fp8", "build.max_batch_size=8", "simulator.slots=2", "benchmark.warmup_s=9", *few).text
    assert "not read: quant=fp8, build.max_batch_size=8, benchmark.warmup_s=9 (hardware=" in " ".join(ticks.split())
    ticks = simulate("benchmark.window=whole", "sizing.model=llama-3.1-8b", "sizing.requests=200", *few).text
    assert "not read: benchmark.window=whole, sizing.model=llama-3.1-8b, sizing.requests=200" in " ".join(ticks.split())
    chosen = simulate("simulator.time=ticks", "hardware=h100_sxm", "quant=fp8", *few).text
    assert "\nnot read: hardware=h100_sxm, quant=fp8\n" in chosen
    gpu = ["hardware=h100_sxm", "model=llama_3_8b", "quant=fp8", "build.max_batch_size=8", "workload=poisson"]
    of_others = ["eval.limit=3", "calibration.size=64", "serving.http_port=9000", "report.folder=x"]
    seconds = simulate(*gpu, "sizing.tp=2", "benchmark.warmup_s=9", *of_others, *few).text
    named = "not read: sizing.tp=2, benchmark.warmup_s=9, " + ", ".join(of_others)
    assert f"{named} llama_3_8b" in " ".join(seconds.split())
    assert "not read" not in simulate(*gpu, *few, "benchmark.window=whole", "tuning=plain", "reuse=none").text
    traced = simulate(f"workload.trace={ROOT}/tests/reference/traces/requests.csv", "workload.isl=4000").text
    assert "\nnot read: workload.isl=4000\n" in traced


def test_a_fit_makes_it_seconds_with_its_own_engine(tmp_path, capsys):
    cost = IterationCost(1e-5, 0.0, 1e-3, 0.0, fixed=2e-3)
    deployment = ModelledDeployment(SchedulerLimits(slots=6, kv_blocks=512, tokens_per_block=16), cost, 0.003, 0.001)
    known = {"model": "tiny_gemma", "precision": "fp8", "engine": "openvino", "gpu": None, "cpu": "x", "tp": 1, "pp": 1}
    fitted = {
        "intervals": {},
        "at_bound": (),
        "undecided": (),
        "spread": {},
        "levels": (),
        "versions": {},
        "multipliers": {},
    }
    made = FittedModel(**known, **fitted, deployment=deployment, fitted_on={"tool": "this project"})
    made.save(tmp_path / "c.json")
    words = (f"sizing.fit={tmp_path}/c.json", "benchmark.concurrency=3", "simulator.kv_blocks=100")
    summary = json.loads((simulated(tmp_path, *words) / "summary.json").read_text())
    outcome = summary["outcomes"][1]
    assert (summary["unit"], outcome["slots"]) == ("s", 6)
    assert outcome["itl"]["mean"] > 3e-3  # 2 ms and 1 ms of weights at least
    said = capsys.readouterr().out
    assert "tiny_gemma fp8 on openvino" in said
    assert replace(made, gpu=None, engine="unknown").name == "tiny_gemma fp8 on a server elsewhere"
    assert replace(made, precision=None, engine=None).name == "tiny_gemma on a server elsewhere"
    assert "KV cache: 100 blocks of 16 tokens (as given)" in said
    simulated(tmp_path, *words[:2])
    assert "KV cache: 512 blocks of 16 tokens (as fitted)" in capsys.readouterr().out
    assert "not read" not in said
    unread = ["model=llama_3_8b", "quant=fp8", "build.tp_size=4", "hardware=h100_sxm"]
    named = simulate(*words, "benchmark.window=whole", "kv_cache.enable_block_reuse=false", *unread).text
    assert f"\nnot read: {', '.join(unread)}\n" in named
    replace(made, pp=2, deployment=replace(deployment, lanes=2)).save(tmp_path / "c.json")
    with pytest.raises(UserError, match=r"TP 1 with build\.pp_size=2 is not simulated: each of its stages"):
        simulated(tmp_path, *words)


@pytest.mark.parametrize(("words", "ticks"), [((), 100), (("workload.osl=64",), 2.5 * 65), (("simulator.drawn=9",), 9)])
def test_the_picture_of_the_slots_is_long_enough_for_answers_to_end(tmp_path, monkeypatch, words, ticks):
    """A stay is 2 ticks of prompt, in which the first token comes, and one for each of the other 63."""
    drawn = []
    real = written.slots_picture

    def noted(*given, until, **named):
        drawn.append(until)
        return real(*given, until=until, **named)

    monkeypatch.setattr(written, "slots_picture", noted)
    engine = ("simulator.policy=[inflight]", "simulator.slots=1")
    simulated(tmp_path, "workload=classic", "benchmark.num_requests=16", *engine, *words)
    assert drawn == [pytest.approx(ticks)]


def test_stopped_while_writing_no_half_file_is_left(tmp_path, monkeypatch):
    def stop(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(files.Path, "write_bytes", stop)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(tmp_path / "requests.csv", b"policy,load,request\n")
    assert list(tmp_path.iterdir()) == []


GUIDE = (ROOT / "docs" / "sizing.md").read_text()
LINES = [shlex.split(line, comments=True) for line in GUIDE.splitlines() if line.startswith("    make simulate")]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_the_commands_of_the_guide_are_taken(words):
    _, settings = with_defaults(words[2:])
    assert not load_faults(settings.workload, settings.benchmark)


def test_one_of_anything_is_singular(tmp_path, capsys):
    simulated(tmp_path, "workload=burst", "benchmark.num_requests=1", "simulator.slots=1", "simulator.policy=inflight")
    out = " ".join(capsys.readouterr().out.split())
    assert "1 slot; workload burst:" in out
    assert "; 1 request at once" in out
    words = ("benchmark.concurrency=40", "benchmark.num_requests=80", "simulator.slots=1", "simulator.policy=inflight")
    simulated(tmp_path, *words)
    out = " ".join(capsys.readouterr().out.split())
    assert "because the only slot was in use" in out
    assert "40 users are 40 times the 1 request that runs: more of them add waiting" in out


@pytest.mark.parametrize(("requests", "rate"), [(12, 20), (100, 100)])
def test_a_short_open_loop_that_is_served_has_the_rate_at_which_it_is_sent(requests, rate):
    """An answer takes 0.36 s. With a tenth of the requests as warm-up, 0 of 12 and 62 of 100 ended in the window."""
    words = f"workload=constant hardware=h100_sxm model=llama_3_1_8b benchmark.request_rate={rate}"
    (one,) = simulate(*words.split(), f"benchmark.num_requests={requests}", "simulator.policy=[inflight]").record
    assert one.outcome.e2e.mean > 0.3
    assert one.outcome.e2e.count == requests
    assert one.outcome.requests_rate == pytest.approx(rate, rel=0.1)
    assert one.outcome.tokens_rate == pytest.approx(rate * one.level.load.osl[0], rel=0.1)


def test_a_short_open_loop_above_capacity_is_told_from_one_that_is_served():
    """All 100 requests fit into the slots, so none waits; more of them at this rate would."""
    words = "workload=constant hardware=h100_sxm model=llama_3_1_8b benchmark.request_rate=100 workload.osl=500"
    (one,) = simulate(*words.split(), "benchmark.num_requests=100", "simulator.policy=[inflight]").record
    assert one.outcome.capacity == pytest.approx(49, abs=3)


def test_an_open_loop_above_capacity_has_the_rate_that_is_served():
    """No warm-up is long enough for a queue that grows: the window of 1,000 requests had 181 ends, less than half."""
    words = "workload=constant hardware=h100_sxm model=llama_3_1_8b benchmark.request_rate=20 workload.osl=2000"
    (one,) = simulate(*words.split(), "simulator.policy=[inflight]").record
    assert one.outcome.capacity is not None
    assert one.outcome.requests_rate == pytest.approx(one.outcome.capacity, rel=0.1)
