"""The command line as a user has it: a subprocess, an own store, an own folder."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT


@dataclass
class Cli:
    """Runs `python -m pipelines` in a folder of its own with a store shared by the module's tests."""

    folder: Path
    store: Path
    environment: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pipelines", words[0], f"paths.store={self.store}", *words[1:]]

    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "OMP_NUM_THREADS": "1", **self.environment}

    def run(self, *words: str, code: int = 0, timeout: float = 600) -> str:
        """Run to the end, check the exit code, return standard output and error."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env=self.env(), capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored when started in the background
        )
        self.started.append(process)
        return process


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    """A user with an empty store; the tests of a module follow each other and share what was made."""
    folder = tmp_path_factory.mktemp("user")
    user = Cli(folder, folder / "artifacts")
    yield user
    for process in user.started:  # a test that failed midway left it running
        if process.poll() is None:
            process.terminate()
            process.wait(60)
