"""serving.server=trtllm_serve: an emulated trtllm-serve runs under our supervisor, and a benchmark speaks to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.domain.benchmark import RESULT
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SILENT
from pipelines.plan.plan import make_plan
from pipelines.serving.config import ServingSettings
from pipelines.serving.logs import ServerFailedError
from pipelines.serving.ports import get
from pipelines.settings.compose import load
from pipelines.stages.benchmark import trtllm_serve
from pipelines.store.store import Store
from tests.conftest import ROOT
from tests.support.emulated_trtllm import BIN
from tests.unit.core.test_machine import MACHINE

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


def test_serve_runs_until_ctrl_c_and_leaves_nothing(measured, repository, environment):
    words = command(measured, "serve", f"serving.repository={repository}", "serving.server=trtllm_serve")
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
    server = trtllm_serve(bad, ServingSettings(), tmp_path, SILENT)
    with pytest.raises(ServerFailedError, match=r"trtllm-serve did not start: exit code 1.*has no config\.json"):
        server.__enter__()


def test_one_that_ends_is_named_and_can_be_started_again(emulated, repository, tmp_path):
    with trtllm_serve(repository, ServingSettings(), tmp_path, SILENT) as server:
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait(10)
        with pytest.raises(ServerFailedError, match="trtllm-serve ended while it was in use: killed by SIGKILL"):
            server.check()
        server.restart()
        assert server.model == "checkpoint"


def test_another_engines_repository_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot serve .*: it has no tensorrt_llm/1/model\.yaml"):
        trtllm_serve(tmp_path, ServingSettings(), tmp_path, SILENT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=openvino"], r"serving\.server=trtllm_serve does not serve engine=openvino"),
        (["triton.num_nodes=2", "build.tp_size=2"], r"started on one machine, but triton\.num_nodes=2"),
        (["serving.tritonserver=/bin/true"], r"serving\.tritonserver has no effect with serving\.server"),
    ],
)
def test_what_it_cannot_serve_is_refused_while_planning(tmp_path, words, message):
    big = replace(MACHINE, memory_bytes=2**40)
    with pytest.raises(UserError, match=message):
        make_plan(load([*WORDS, *words]), "serve", Store(tmp_path), big)


def test_a_machine_without_it_is_told(tmp_path):
    plan = make_plan(load(WORDS), "serve", Store(tmp_path), replace(MACHINE, memory_bytes=2**40))
    assert any("needs trtllm-serve, which is not on PATH" in str(fault) for fault in plan.missing)
