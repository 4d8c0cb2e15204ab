"""A Python without the project's packages is told so, in words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipelines.cli.commands import COMMANDS
from pipelines.cli.main import main
from tests.conftest import ROOT


def test_a_python_without_hydra_is_named_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert main(["plan", "calibration.column='text'"]) == 2
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
