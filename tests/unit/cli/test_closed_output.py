"""Whoever reads the output may stop after a line (`| head -1`): the command finishes its work all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def first_line(tmp_path: Path, *words: str, both: bool = False) -> tuple[str, int, str]:
    """The first line of a command, its exit code, and what it said on standard error; with `both` that closes too."""
    command = [sys.executable, "-m", "pipelines", *words, f"paths.runs={tmp_path}/runs"]
    errors = subprocess.STDOUT if both else subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as running:
        line = running.stdout.readline()
        running.stdout.close()
        said = running.stderr.read() if running.stderr else ""
        return line, running.wait(timeout=120), said


@pytest.mark.parametrize("both", [False, True])
def test_the_files_of_a_simulation_are_written(tmp_path: Path, both: bool) -> None:
    line, code, said = first_line(tmp_path, "simulate", both=both)
    assert (line[:5], code) == ("time:", 0)
    assert "Error" not in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"summary.json", "slots.png", "curves.png", "simulator.html"} <= {path.name for path in folder.iterdir()}


def test_a_fault_keeps_its_exit_code(tmp_path: Path) -> None:
    line, code, _ = first_line(tmp_path, "simulate", "simulator.slots=0", both=True)
    assert (line[:6], code) == ("error:", 2)


@pytest.mark.parametrize("words", [["help"], ["config"]])
def test_nobody_reads_at_all(words: list[str]) -> None:
    command = [sys.executable, "-m", "pipelines", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert (running.stderr.read(), running.wait(timeout=60)) == ("", 0)
