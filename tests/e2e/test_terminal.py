"""What commands print on a real terminal: lines that fit, colours for errors and warnings and nowhere else."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.terminal import start_on_terminal

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
GPU = ["model=llama_3_8b", "quant=fp8", "hardware=h100_sxm"]
OUTPUTS = {
    "help": ["--help"],
    "help of a command": ["build", "--help"],
    "plan": ["plan"],
    "plan for a GPU": ["plan", "engine=tensorrt_llm", *GPU],
    "build": ["build", "quant=int4_wo"],
    "config": ["config", "build"],
    "doctor": ["doctor", "doctor.timeout_s=0.1"],
    "size": ["size", "sizing.average_rate=5", *GPU],
    "simulate": ["simulate", "simulator.policy=[static,inflight]", "benchmark.num_requests=20"],
    "error": ["build", "quant=fp9", "fp8", "evaluate"],
}


def on_terminal(folder, columns, *words, **environment):
    """Run a command on a terminal of so many columns; exit code and what it shows."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment = {**inherited, "TERM": "xterm", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "pipelines", *words]
    process, screen = start_on_terminal(command, environment, folder=folder, columns=columns)
    shown = b""
    while True:
        try:
            read = os.read(screen, 65536)
        except OSError:  # the other side is closed
            break
        if not read:
            break
        shown += read
    os.close(screen)
    return process.wait(), shown.decode().replace("\r\n", "\n")


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("words", OUTPUTS.values(), ids=OUTPUTS)
def test_every_line_fits(tmp_path, columns, words):
    """Longer are only paths and other words that cannot be broken."""
    code, shown = on_terminal(tmp_path, columns, *words)
    assert code == (2 if words == OUTPUTS["error"] else 0), shown
    long = [line for line in COLOUR.sub("", shown).splitlines() if len(line) > columns and "/" not in line]
    assert long == []
    assert len(shown.splitlines()) > 2


def test_an_error_has_colour_on_a_terminal_alone(tmp_path):
    _, shown = on_terminal(tmp_path, 80, "build", "int4_awq")
    assert shown.startswith("\x1b[1;31merror\x1b[0m: 'int4_awq' is not a valid override")
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        _, shown = on_terminal(tmp_path, 80, "build", "int4_awq", **plain)
        assert shown.startswith("error: 'int4_awq'")
    piped = subprocess.run([sys.executable, "-m", "pipelines", "build", "int4_awq"], cwd=ROOT, capture_output=True)
    assert piped.stderr.startswith(b"error: 'int4_awq'")


def test_a_warning_has_colour_on_a_terminal_alone(tmp_path):
    words = ["plan", "quant=w4a8_awq"]  # of Gemma
    _, shown = on_terminal(tmp_path, 80, *words)
    assert "\x1b[33mwarning\x1b[0m: " in shown
    _, shown = on_terminal(tmp_path, 80, *words, NO_COLOR="1")
    assert "\nwarning: " in shown


@pytest.mark.parametrize("words", [OUTPUTS["doctor"], pytest.param(OUTPUTS["size"], marks=pytest.mark.thorough)])
def test_no_color_means_none(tmp_path, words):
    code, shown = on_terminal(tmp_path, 80, *words, NO_COLOR="1")
    assert code == 0
    assert "\x1b" not in shown
