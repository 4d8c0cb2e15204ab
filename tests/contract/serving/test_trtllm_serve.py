"""serving.server=trtllm_serve: an emulated trtllm-serve runs under our supervisor; benchmarks and evaluations ask."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eval.results import RESULT as EVALUATION
from eval.results import EvalResult
from pipelines.domain.benchmark import RESULT
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SILENT
from pipelines.plan.plan import make_plan
from pipelines.serving import ports
from pipelines.serving.config import ServingSettings
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.ports import free_port, get
from pipelines.settings.compose import load
from pipelines.stages.benchmark import trtllm_serve
from pipelines.store.store import Store
from tests.conftest import ROOT
from tests.support.emulated_trtllm import BIN
from tests.unit.core.test_machine import MACHINE

BIG = replace(MACHINE, memory_bytes=2**40)
SERVING = ServingSettings(server="trtllm_serve")
WORDS = ["engine=tensorrt_llm_llmapi", "model=tiny_llama", "quant=none", "serving.server=trtllm_serve"]


@pytest.fixture(scope="module")
def environment():
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "EMULATED_PYTHON": sys.executable}


@pytest.fixture
def emulated(monkeypatch, environment):
    for name in ("PATH", "PYTHONPATH", "EMULATED_PYTHON"):
        monkeypatch.setenv(name, environment[name])


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "pipelines", *words, f"paths.store={folder}/store", f"paths.runs={folder}/runs"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, environment):
    """Run a benchmark from the model to the result; return the folder of store and runs."""
    folder = tmp_path_factory.mktemp("served")
    load = ["benchmark.concurrency=2", "benchmark.num_requests=8", "benchmark.warmup_s=0", "workload.osl=8"]
    subprocess.run(command(folder, "benchmark", *WORDS, *load), env=environment, cwd=folder, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def repository(measured):
    (folder,) = (measured / "store" / "repository").glob("tiny_llama-none-*")
    return folder


def test_a_benchmark_starts_it_and_measures_it_over_http(measured):
    (path,) = (measured / "store" / "benchmark").glob(f"*/{RESULT}")
    result = json.loads(path.read_text())
    assert (result["engine"], result["complete"]) == ("llmapi", True)
    (log,) = (measured / "runs").glob("*-trtllm-serve-*.log")
    assert "max_batch_size" in log.with_suffix(".yaml").read_text()


ASKED = ["eval=mini_answers", "eval.limit=1"]


@pytest.mark.thorough  # three commands with lm-eval
def test_an_evaluation_starts_it_goes_on_after_its_end_and_is_cached(measured, environment):
    words = command(measured, "evaluate", *WORDS, *ASKED)
    ends = environment | {"EMULATED_ANSWERS": "3"}
    first = subprocess.run(words, env=ends, cwd=measured, capture_output=True, text=True, timeout=120)
    assert first.returncode == 2
    assert "trtllm-serve ended while it was in use" in " ".join(first.stderr.split())
    second = subprocess.run(words, env=environment, cwd=measured, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert "answers of a run that was stopped are taken" in " ".join(second.stdout.split())
    (path,) = (measured / "store" / "evaluate").glob(f"*/{EVALUATION}")
    result = EvalResult.load(path)
    assert (result.engine, result.qformat, result.overall.questions) == ("llmapi", "none", 12)
    assert not list((measured / "runs").glob(".answers/*.jsonl"))
    third = subprocess.run(words, env=environment, cwd=measured, capture_output=True, text=True, timeout=120)
    assert "nothing to do" in third.stdout.lower(), third.stdout


def test_a_format_and_its_baseline_are_asked_one_after_the_other(tmp_path):
    words = [word for word in WORDS if "quant" not in word]
    plan = make_plan(load([*words, "quant=fp8", "eval=gsm8k"]), "evaluate", Store(tmp_path), BIG)
    made = ["build", "repository", "evaluate"]
    rest = [step.node.id for step in plan.steps if not step.node.id.startswith("download")]
    assert rest == [*(f"baseline.{name}" for name in made), "quantize", *made]


@pytest.mark.parametrize("task", ["mini_mmlu", "mmlu", "arc_challenge", "hellaswag", "wikitext", "boolq"])
def test_tasks_that_need_the_probability_of_a_text_are_refused(tmp_path, task):
    named = (
        [f"eval={task}"] if task != "boolq" else ["eval=lm_eval", f"eval.task={task}", "eval.dataset=aps/super_glue"]
    )
    with pytest.raises(UserError, match=rf"eval\.task='{task}' needs the log probabilities.*eval=gsm8k"):
        make_plan(load([*WORDS, *named]), "evaluate", Store(tmp_path), BIG)


def test_its_predictions_are_not_compared(tmp_path):
    with pytest.raises(UserError, match=r"trtllm-serve returns log probabilities of its answers, not of a prompt's"):
        make_plan(load([*WORDS, "quant=fp8"]), "fidelity", Store(tmp_path), BIG)


def test_serve_runs_until_ctrl_c_and_leaves_nothing(measured, repository, environment):
    own = f"serving.openai_port={free_port('127.0.0.1', {})}"  # the usual one may be another test's in between
    words = command(measured, "serve", f"serving.repository={repository}", "serving.server=trtllm_serve", own)
    with subprocess.Popen(words, env=environment, cwd=measured, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = []
            while "curl" not in (line := server.stdout.readline()):
                lines.append(line)
                assert server.poll() is None
            port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
            assert any("Ctrl-C ends it" in each for each in lines)
            assert '"model": "checkpoint"' in "".join(server.stdout.readline() for _ in range(2))
            assert get("127.0.0.1", port, "/health") == (200, "")
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:  # otherwise a failed assertion waits for it for ever
            server.kill()
    assert get("127.0.0.1", port, "/health") is None


def test_a_failed_start_says_why(emulated, repository, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(repository, bad)
    (bad / "tensorrt_llm" / "1" / "checkpoint" / "config.json").unlink()
    server = trtllm_serve(bad, SERVING, tmp_path, SILENT)
    with pytest.raises(ServerFailedError, match=r"trtllm-serve did not start: exit code 1.*has no config\.json"):
        server.__enter__()


def test_a_default_port_that_was_just_taken_is_left_to_the_other(emulated, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "is_free", lambda _host, _port: True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(ports, "USUAL_PORTS", {**ports.USUAL_PORTS, "openai_port": taken})
        with trtllm_serve(repository, SERVING, tmp_path, SILENT, usual_ports=True) as server:
            assert f":{taken}/" not in server.url
            assert server.model == "checkpoint"


def test_one_that_ends_is_named_and_can_be_started_again(emulated, repository, tmp_path):
    with trtllm_serve(repository, SERVING, tmp_path, SILENT) as server:
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait(10)
        with pytest.raises(ServerFailedError, match="trtllm-serve ended while it was in use: killed by SIGKILL"):
            server.check()
        server.restart()
        assert server.model == "checkpoint"


def test_another_engines_repository_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot serve .*: it has no tensorrt_llm/1/model\.yaml"):
        trtllm_serve(tmp_path, SERVING, tmp_path, SILENT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=openvino"], r"serving\.server=trtllm_serve does not serve engine=openvino"),
        (["triton.num_nodes=2", "build.tp_size=2"], r"started on one machine, but triton\.num_nodes=2"),
        (["serving.tritonserver=/bin/true"], r"serving\.tritonserver has no effect with serving\.server"),
    ],
)
def test_what_it_cannot_serve_is_refused_while_planning(tmp_path, words, message):
    for target in ("serve", "evaluate"):
        with pytest.raises(UserError, match=message):
            make_plan(load([*WORDS, *words]), target, Store(tmp_path), BIG)


def test_a_machine_without_it_is_told(tmp_path):
    for target in ("serve", "evaluate"):
        plan = make_plan(load([*WORDS, "eval=mini_answers"]), target, Store(tmp_path), BIG)
        assert any("needs trtllm-serve, which is not on PATH" in str(fault) for fault in plan.missing)
