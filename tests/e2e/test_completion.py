"""Completion in a real bash and a real zsh: a line, a Tab, and what the shell makes of it."""

import os
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.terminal import start_on_terminal

pytestmark = pytest.mark.thorough

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
WAIT_S = 60  # a Tab starts Python and composes the configuration


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        program = folder / "trtllm-pipelines"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m pipelines "$@"\n')
        program.chmod(0o755)
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb", "PS1": "$ "}
        self.process, self.screen = start_on_terminal(START[name], environment)
        self.type(f'eval "$(trtllm-pipelines --completion {name})"; echo re""ady\n')
        self.wait_for("ready")

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def wait_for(self, text: str) -> str:
        """What the screen shows until a text is there."""
        seen, until = "", time.monotonic() + WAIT_S
        while text not in seen:
            assert time.monotonic() < until, f"waited for {text!r}, saw {seen!r}"
            if select.select([self.screen], [], [], 0.5)[0]:
                seen += os.read(self.screen, 4096).decode(errors="replace").replace("\a", "")
        return seen

    def completed(self, line: str, text: str) -> None:
        """Type a line and Tab, wait for a text, and drop the line."""
        self.type(f"{line}\t")
        self.wait_for(text)
        self.type("\x15")  # Ctrl-U

    def close(self) -> None:
        self.type("\x15exit\n")
        os.close(self.screen)
        self.process.wait()


@pytest.fixture(scope="module", params=["bash", "zsh"])
def shell(request, tmp_path_factory):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    started = Shell(request.param, tmp_path_factory.mktemp(request.param))
    yield started
    started.close()


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("bui", "build "),
        ("build quan", "quant"),
        ("build quant=int4_a", "quant=int4_awq"),
        ("build build.kv_cache_t", "build.kv_cache_type="),
        ("build build.kv_cache_type=cont", "build.kv_cache_type=continuous"),
        ("sweep quant=fp8,int4_a", "quant=fp8,int4_awq"),
        ("config sparsi", "sparsity"),
    ],
)
def test_a_tab_completes(shell, typed, seen):
    shell.completed(f"trtllm-pipelines {typed}", seen)
