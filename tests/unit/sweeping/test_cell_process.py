"""A cell is a process: whatever ends it, its file says so and the next cell is not touched."""

import signal
import subprocess
import sys
import time

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from pipelines.host.machine import Machine
from pipelines.sweep import launch
from pipelines.sweep.cells import RunCell, SweepCell, Watch, read

MACHINE = Machine(2, 2**34, (), "a test", has_tensorrt_llm=False, platform="test")


@pytest.fixture
def cell(tmp_path):
    made = SweepCell(1, "evaluate", ("quant=fp8",), "quant=fp8")
    made.write(tmp_path)
    return made


def run(tmp_path, monkeypatch, program: str) -> SweepCell:
    """Run the cell with another program in Python's place."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(HydraConfig, "get", lambda: type("Hydra", (), {"job": type("Job", (), {"num": 0})}))
    RunCell(tmp_path, (tmp_path / "cell-1.json",), shown=False)(None)
    return read(tmp_path / "cell-1.json")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("kill -KILL $$", "signal SIGKILL, which the kernel sends when memory runs out"),
        ("kill -SEGV $$", "signal SIGSEGV"),
        ("exit 3", "exit code 3 and no result"),
    ],
)
def test_a_cell_that_dies_is_told_how(tmp_path, monkeypatch, cell, program, reason):
    after = run(tmp_path, monkeypatch, program)
    assert (after.state, after.reason) == ("failed", f"its process ended with {reason}")


def test_what_a_cell_prints_is_in_its_log(tmp_path, monkeypatch, cell):
    run(tmp_path, monkeypatch, 'echo "$@"; echo wrong >&2')
    assert cell.log(tmp_path).read_text() == f"-m pipelines.sweep.cell {tmp_path}/cell-1.json\nwrong\n"


def test_a_result_that_was_written_stands(tmp_path, monkeypatch, cell):
    """A crash while Python shuts down takes nothing away."""
    after = run(tmp_path, monkeypatch, f"sed -i s/waiting/done/ {tmp_path}/cell-1.json; kill -SEGV $$")
    assert after.state == "done"


@pytest.mark.parametrize("killed", ["launcher", "submitter"])
def test_ctrl_c_lets_the_cell_clean_up(tmp_path, cell, killed):
    """In a process of its own, so that the interrupt cannot hit the tests; likewise if its sweep is killed."""
    submitter = subprocess.Popen(["sleep", "60"])
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ntrap 'touch {tmp_path}/cleaned; exit 130' TERM; touch {tmp_path}/started\n"
        "while true; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(program), str(submitter.pid)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored when started in the background
    )
    while not (tmp_path / "started").exists():
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT) if killed == "launcher" else submitter.kill()
    _, said = launcher.communicate()
    submitter.kill()
    submitter.wait()
    assert b"KeyboardInterrupt" in said
    assert (tmp_path / "cleaned").exists()


LAUNCHER = """
import signal, sys
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from pipelines.sweep.cells import RunCell

signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it can be seen
folder, sys.executable = Path(sys.argv[1]), sys.argv[2]
HydraConfig.get = lambda: type("Hydra", (), {"job": type("Job", (), {"num": 0})})
RunCell(folder, (folder / "cell-1.json",), shown=False, submitter=int(sys.argv[3]))(None)
"""


def test_changes_are_said_once(tmp_path, capsys):
    cells = [SweepCell(number, "evaluate", (f"eval.limit={number}",), f"eval.limit={number}") for number in (1, 2)]
    for made in cells:
        made.write(tmp_path)
    watch = Watch(tmp_path, cells)
    watch.poll({2: "queued (Priority)"})
    watch.poll({2: "queued (Priority)"})
    SweepCell(1, "evaluate", (), "eval.limit=1", state="running", host="node7").write(tmp_path)
    watch.poll({2: "queued (Priority)"})
    SweepCell(1, "evaluate", (), "eval.limit=1", state="done", seconds=34.0).write(tmp_path)
    cells[1].failed("no GPU").write(tmp_path)
    watch.poll()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[2] queued (Priority)"
    assert lines[2].startswith("[1] running on node7: eval.limit=1, log ")
    assert lines[3:] == ["    1 waiting, 1 running", "[1] done in 34 s: eval.limit=1", "[2] failed: eval.limit=2"]


def test_a_watch_looks_until_the_launcher_is_back(tmp_path, capsys, cell):
    with Watch(tmp_path, [cell]).meanwhile():
        SweepCell(1, "evaluate", (), "quant=fp8", state="done", seconds=1.0).write(tmp_path)
    assert "[1] done in" in capsys.readouterr().out


def test_the_machine_of_a_launcher_is_remembered(tmp_path):
    launcher, other = OmegaConf.create({"partition": "h100"}), OmegaConf.create({"partition": "a100"})
    assert launch.recall(tmp_path, launcher) is None
    launch.remember(tmp_path, launcher, [SweepCell(1, "evaluate", (), "", machine=MACHINE.to_json())])
    assert launch.recall(tmp_path, launcher) == MACHINE
    assert launch.recall(tmp_path, other) is None


def test_a_machine_that_another_version_wrote_is_unknown(tmp_path):
    launcher = OmegaConf.create({"partition": "h100"})
    launch.remember(tmp_path, launcher, [SweepCell(1, "evaluate", (), "", machine={"cpus": 2})])
    assert launch.recall(tmp_path, launcher) is None
