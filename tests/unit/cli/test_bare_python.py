"""A Python without the project's packages is told so, in words."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.cli.main import main
from pipelines.settings.model import BUNDLED
from tests.conftest import ROOT


def test_a_python_without_hydra_is_named_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert main(["plan", r"calibration.column=a\ text"]) == 2
    said = capsys.readouterr().err
    assert "lacks the Python package 'hydra'" in said
    assert "make image, then make shell" in said


def run_lacking(monkeypatch, name):
    """Run `plan`, which fails to import a module."""

    def run(_self, _words):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(type(COMMANDS["plan"]), "run", run)
    return main(["plan"])


def test_a_missing_package_of_one_feature_is_named_with_how_to_install_it(monkeypatch, capsys):
    assert run_lacking(monkeypatch, "matplotlib.pyplot") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "needs the Python package 'matplotlib'" in said
    assert "pip install 'trtllm-pipelines[cpu,serve,report,size,sweep]'" in said


def test_a_missing_module_of_our_own_is_a_fault_of_ours(monkeypatch):
    with pytest.raises(ModuleNotFoundError, match=r"pipelines\.gone"):
        run_lacking(monkeypatch, "pipelines.gone")


def test_planning_for_a_gpu_needs_numpy(tmp_path):
    code = """
import sys
sys.modules["numpy"] = None
from pipelines.cli.main import main
sys.exit(main(["plan", "hardware=h100_sxm", "model=llama_3_8b", "quant=fp8"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "needs the Python package 'numpy'" in done.stderr


def test_planning_reads_a_model_folder_without_the_packages_of_a_run(tmp_path):
    """Also tokens that only files beside tokenizer.json add."""
    for name, file, content in (
        ("in_settings", "tokenizer_config.json", {"added_tokens_decoder": {"1769": {"content": "<|im_end|>"}}}),
        ("in_a_file", "added_tokens.json", {"<|im_end|>": 1769}),
    ):
        folder = shutil.copytree(BUNDLED / "models" / "tiny_llama", tmp_path / name)
        (folder / file).write_text(json.dumps(content))
        words = ["plan", f"model.path={folder}", "quant=fp8", "plan.target=build", f"paths.store={tmp_path / 'store'}"]
        code = f"""
import sys
for name in ("tokenizers", "transformers", "torch", "openvino", "huggingface_hub", "pyarrow"):
    sys.modules[name] = None
from pipelines.cli.main import main
sys.exit(main({words}))
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert "needs the Python package" not in done.stderr
        assert re.search(r"run +quantize", done.stdout), done.stderr
