"""`make simulate`: what it prints, what it writes, what it refuses. In ticks, so that every number can be checked."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.domain.errors import UserError
from pipelines.host import files
from pipelines.predict.performance.fit_file import FittedModel
from pipelines.predict.performance.modelled import ModelledDeployment
from pipelines.predict.simulate import pictures
from pipelines.predict.simulate.command import with_defaults
from pipelines.predict.simulator.cost import IterationCost
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.settings.load import load_faults
from tests.conftest import ROOT


def simulated(folder: Path, *overrides: str) -> Path:
    """Run the command; the run folder."""
    before = set((folder / "runs").glob("*"))
    assert COMMANDS["simulate"].run([f"paths.runs={folder}/runs", f"paths.store={folder}/store", *overrides]) == 0
    (made,) = set((folder / "runs").glob("*")) - before
    return made


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    return simulated(tmp_path_factory.mktemp("simulate"))


def test_without_words_static_and_in_flight_stand_side_by_side(tmp_path, capsys):
    simulated(tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"^ +static +in-flight$", out, re.M)
    assert re.search(r"^requests done +100 +100$", out, re.M)
    assert "requests per 1,000 ticks" in out
    assert max(map(len, out.split("\n\n")[1].splitlines())) < 80


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


def test_a_second_run_gives_the_same_files(first, tmp_path):
    again = simulated(tmp_path)
    for name in ("summary.json", "requests.csv", "iterations.csv", "trace.json", "slots.png", "simulator.html"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


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
    simulated(tmp_path, "simulator.until=100", "workload.osl=10")
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
        (["workload=poisson", "benchmark.concurrency=4", "benchmark.request_rate=1"], r"concurrency=\[4\] does not go"),
        (
            ["workload=poisson", "benchmark.request_rate=1", "simulator.client_delay=2"],
            "client_delay=2 does not apply to",
        ),
        (["simulator.kv_blocks=2"], "128 input and 18 output tokens needs 5 KV blocks of 32 tokens; the cache has 2"),
        (
            ["simulator.kv_blocks=5", "simulator.prefix_tokens=200"],
            "18 output tokens needs 2 KV blocks of 32 tokens besides those of the shared prefix of 200 tokens",
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
    assert "llama_3_8b fp8 on h100_sxm" in out
    assert "TTFT mean, ms" in out
    assert inflight["busy_max"] == 25
    assert re.search(r"slots in use +1\d\.\d +2\d\.\d\n", out)  # of 25, not a share of 2,048


def test_a_mixture_of_experts_is_simulated_in_seconds_too(tmp_path, capsys):
    words = ("sizing.model=mixtral-8x7b", "quant=fp8", "hardware=h200_sxm", "benchmark.concurrency=4")
    made = json.loads((simulated(tmp_path, *words, "simulator.policy=inflight") / "summary.json").read_text())
    (outcome,) = made["outcomes"]
    assert outcome["requests"] > 0
    assert made["what"].startswith("mixtral-8x7b fp8 on h200_sxm")


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
    assert "KV cache: 100 blocks of 16 tokens (as given)" in said
    simulated(tmp_path, *words[:2])
    assert "KV cache: 512 blocks of 16 tokens (as fitted)" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "ticks"), [((), 60), (("workload.osl=64",), 2.5 * 65), (("simulator.drawn=9",), 9)])
def test_the_picture_of_the_slots_is_long_enough_for_answers_to_end(tmp_path, monkeypatch, words, ticks):
    """A stay is 2 ticks of prompt, in which the first token comes, and one for each of the other 63."""
    drawn = []
    real = pictures.slots_picture

    def noted(*given, until, **named):
        drawn.append(until)
        return real(*given, until=until, **named)

    monkeypatch.setattr(pictures, "slots_picture", noted)
    simulated(tmp_path, "simulator.policy=[inflight]", "simulator.slots=1", "benchmark.num_requests=8", *words)
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


GUIDE = (ROOT / "docs" / "simulator.md").read_text()
LINES = [line.split("#")[0].split() for line in GUIDE.splitlines() if line.startswith("    make simulate")]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_the_commands_of_the_guide_are_taken(words):
    _, settings = with_defaults(words[2:])
    assert not load_faults(settings.workload, settings.benchmark)
