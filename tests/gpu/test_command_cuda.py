"""The command on a machine with a GPU, whether TensorRT-LLM is there or not: what it sees, and what it does with it."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT


@pytest.fixture
def command(tmp_path):
    """Run a command with a store of its own."""

    def run(*words, code=0):
        stores = [f"paths.store={tmp_path}/store", f"paths.runs={tmp_path}/runs"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [sys.executable, "-m", "pipelines", words[0], *stores, *words[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    return run


def test_the_doctor_names_the_gpu(command):
    properties = torch.cuda.get_device_properties(0)
    said = json.loads(command("doctor", "doctor.format=json", code=1 if _lacks_trtllm() else 0))
    found = json.dumps(said)
    assert properties.name in found
    assert f"{properties.major}.{properties.minor}" in found


def test_a_plan_takes_the_gpu_of_the_machine(command):
    said = command("plan", "engine=tensorrt_llm", "model=tiny_llama", "quant=fp8")
    assert torch.cuda.get_device_properties(0).name in said
    assert "no NVIDIA GPU" not in said


def test_quantizing_takes_the_gpu_by_itself(command, tmp_path):
    words = ("stage", "engine=tensorrt_llm", "model=tiny_llama", "quant=int4_awq", "stage.name=quantize")
    command(*words, f"stage.link={tmp_path}/checkpoint")
    assert json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["facts"]["device"] == "cuda"
    assert "every stage is cached" in command(*words, f"stage.link={tmp_path}/checkpoint")


def test_a_build_says_what_is_missing(command):
    if not _lacks_trtllm():
        pytest.skip("TensorRT-LLM is installed")
    said = command("build", "engine=tensorrt_llm", "model=tiny_llama", "quant=fp8", code=2)
    assert "tensorrt_llm" in said
    assert re.search(r"make (-C \S+ )?(image|shell)", said)


def _lacks_trtllm():
    return importlib.util.find_spec("tensorrt_llm") is None
