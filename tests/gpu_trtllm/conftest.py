"""These tests need NVIDIA's Triton TensorRT-LLM container (26.04 to 26.07) and a GPU; elsewhere they are skipped."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.compress.config import CalibrationSettings
from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import QFormat
from tests.conftest import ROOT
from tests.support.specs import quant_spec

MODEL = ROOT / "pipelines" / "bundled" / "models" / "tiny_llama"
TEMPLATES = Path("/app/all_models/inflight_batcher_llm")


@pytest.fixture(scope="session", autouse=True)
def _container():
    for missing, reason in (
        (importlib.util.find_spec("tensorrt_llm") is None, "the Python package tensorrt_llm is not installed"),
        (shutil.which("trtllm-build") is None, "trtllm-build is not on PATH"),
        (not Path("/opt/tritonserver/bin/tritonserver").is_file(), "there is no /opt/tritonserver"),
    ):
        if missing:
            pytest.skip(reason)


class Cli:
    """`python -m pipelines` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pipelines", words[0], f"paths.store={self.folder}/store", *words[1:]]

    def run(self, *words: str) -> str:
        done = subprocess.run(self.command(*words), cwd=self.folder, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def cli(tmp_path_factory):
    return Cli(tmp_path_factory.mktemp("user"))


def own_checkpoint(folder: Path) -> Path:
    """The bundled Llama for trtllm-build; made without an engine, because the GPU image may lack the CPU engine."""
    quantize(MODEL, folder, quant_spec(QFormat.NONE), (), CalibrationSettings())
    return folder


@pytest.fixture(scope="session")
def engine(cli):
    """The bundled Llama's own checkpoint, built by trtllm-build alone: an engine from elsewhere."""
    checkpoint, out = own_checkpoint(cli.folder / "checkpoint"), cli.folder / "engine"
    limits = ["--max_batch_size", "8", "--max_input_len", "512", "--max_seq_len", "1024", "--max_num_tokens", "2048"]
    command = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(out), *limits]
    subprocess.run(command, check=True, timeout=1800)
    return out
