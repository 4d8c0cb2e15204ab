"""Output that nobody takes: a reader may stop after a line (`| head -1`), a disk may be full, a stream closed."""

import os
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


@pytest.mark.parametrize("both", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_the_files_of_a_simulation_are_written(tmp_path: Path, both: bool) -> None:
    line, code, said = first_line(tmp_path, "simulate", both=both)
    assert (line[:5], code) == ("time:", 0)
    assert "Error" not in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"summary.json", "slots.png", "curves.png", "simulator.html"} <= {path.name for path in folder.iterdir()}


def test_a_fault_keeps_its_exit_code(tmp_path: Path) -> None:
    line, code, _ = first_line(tmp_path, "plan", "quant=fp9", both=True)
    assert (line[:6], code) == ("error:", 2)


@pytest.mark.parametrize("words", [["help"], ["config"]])
def test_nobody_reads_at_all(words: list[str]) -> None:
    command = [sys.executable, "-m", "pipelines", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert (running.stderr.read(), running.wait(timeout=60)) == ("", 0)


FULL, CLOSED = "No space left on device", "Bad file descriptor"


@pytest.mark.parametrize(
    ("words", "redirected", "code", "said"),
    [
        ("--version", "> /dev/full", 2, f"error: the output could not be written: {FULL}."),
        ("config", "> /dev/full", 2, f"error: the output could not be written: {FULL}."),
        ("--version", ">&-", 2, f"error: the output could not be written: {CLOSED}."),
        ("config paths.store=5 nothing", "<&- >&-", 2, "error: 'nothing' is not a valid override"),
        ("config nothing", "2> /dev/full", 2, ""),
        ("config nothing", "<&- >&- 2>&-", 2, ""),
        ("--version", "<&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_a_failure(words: str, redirected: str, code: int, said: str) -> None:
    command = f"{sys.executable} -m pipelines {words} {redirected}"
    ran = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, "Traceback" in ran.stderr) == (code, False)
    assert ran.stderr.startswith(said)


def test_a_screen_without_the_character_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    show = "from pipelines.host.screen import outlive_readers, say; outlive_readers(); say('a – b')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ascii_only = environment | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", show], capture_output=True, env=ascii_only, timeout=60, check=False)
    assert (ran.stdout, ran.returncode) == (b"a ? b\n", 0)
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -m pipelines plan"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 2
    assert b"was removed" in ran.stderr.replace(b"\n      ", b"")
