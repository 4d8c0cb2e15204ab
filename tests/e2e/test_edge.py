"""engine=tensorrt_edge on the command line, with NVIDIA's exporter in the environment of `make setup-edge`."""

import json
import shlex
import signal
import subprocess
import time

import pytest

from pipelines.engines.tensorrt_edge.exporter import environment_fault, python_of
from pipelines.engines.tensorrt_llm.config import BuildSettings
from pipelines.stages.unified import device_commands
from tests.conftest import ROOT

ENVIRONMENT = ROOT / ".venv-edge"
FAULT = environment_fault(ENVIRONMENT)
EDGE = ("engine=tensorrt_edge", "model=tiny_llama", "quant=fp8")
needs_edge = pytest.mark.skipif(FAULT is not None, reason=str(FAULT))
PARSERS = """
import json, sys
from experimental.builder.cli import _parser
from experimental.server.config import parse_server_config
building, serving = json.loads(sys.argv[1])
_parser().parse_args(building)
parse_server_config(serving)
"""


def built(cli):
    return [path for path in (cli.store / "build").glob("*") if not path.name.startswith(".")]


def test_without_its_environment_it_is_named_and_nothing_is_written(cli) -> None:
    text = " ".join(cli.run("build", *EDGE, "paths.edge=nowhere", code=2).split())
    assert "nowhere' is no environment of TensorRT Edge-LLM" in text
    assert text.endswith(f"Run: make -C {ROOT} setup-edge")
    assert not cli.store.exists()


def test_the_plan_has_the_commands_of_the_device(cli) -> None:
    text = " ".join(cli.run("plan", *EDGE, "build.max_batch_size=2").replace("\\\n", " ").split())
    assert "llm_build --onnxDir llm --engineDir engine --maxBatchSize 2 --maxInputLen 2048 --maxKVCacheCapacity" in text
    assert "memory and speed on the device: unknown" in text
    assert "docker" not in text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("evaluate", "cannot evaluate: TensorRT Edge-LLM runs on the device. It works with build."),
        ("serve", "cannot serve: TensorRT Edge-LLM runs on the device. It works with build."),
        ("image", "has no image: its files are made with trtllm-pipelines build, on any machine."),
    ],
)
def test_other_commands_name_what_works(command: str, said: str, cli) -> None:
    assert f"engine=tensorrt_edge {said}" in " ".join(cli.run(command, *EDGE, code=2).split())


@needs_edge
@pytest.mark.thorough
def test_a_build_that_is_killed_leaves_nothing_and_the_next_one_finishes(cli) -> None:
    process = cli.start("build", *EDGE, f"paths.edge={ENVIRONMENT}")
    for line in process.stdout:
        if line.startswith("build:"):
            break
    time.sleep(3)  # into the exporter
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert built(cli) == []
    text = cli.run("build", *EDGE, f"paths.edge={ENVIRONMENT}")
    assert "95 of 95 tensors read back" in text
    assert "the model has no chat template" in text
    (folder,) = built(cli)
    assert {"llm", "checkpoint", "manifest.json"} == {path.name for path in folder.iterdir()}
    exported = {path.name for path in (folder / "llm").iterdir()}
    assert {
        "model.onnx",
        "model.onnx.data",
        "embedding.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } < exported
    facts = json.loads((folder / "manifest.json").read_text())["facts"]
    assert facts["operators"] == ["trt_edgellm.AttentionPlugin"]
    assert facts["exporter"] == "0.11.0"
    assert "Nothing to do" in cli.run("build", *EDGE, f"paths.edge={ENVIRONMENT}", "build.max_batch_size=3")


@needs_edge
@pytest.mark.thorough
def test_nvidias_parsers_take_the_commands() -> None:
    commands = [shlex.split(line) for line in device_commands(BuildSettings(max_batch_size=2), None).values()]
    words = [
        next(words[1:] for words in commands if words[0] == program)
        for program in ("tensorrt-edgellm-build", "tensorrt-edgellm-serve")
    ]
    python = str(python_of(ENVIRONMENT))
    done = subprocess.run([python, "-c", PARSERS, json.dumps(words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
