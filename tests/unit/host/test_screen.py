"""What a log without a terminal shows of long work."""

import itertools

import pytest

from pipelines.host import screen
from pipelines.loadgen.level import live_view


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.1, range(10, 101, 10)), (12.0, range(4, 101, 4))],
)
def test_a_line_per_tenth_and_per_percent_of_slow_work(capsys, monkeypatch, seconds, shown):
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(screen.time, "monotonic", lambda: next(clock))
    with screen.ScreenProgress().task("quantizing", 25) as advance:
        for _ in range(25):
            advance(1)
    assert capsys.readouterr().err.splitlines() == [f"  quantizing: {percent} %" for percent in shown]


def test_a_terminal_without_a_cursor_gets_the_lines_of_a_log(capsys, monkeypatch):
    """Rich draws nothing there but an empty line for each bar."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with screen.ScreenProgress().task("quantizing", 2) as advance:
        advance(1)
    with live_view("concurrency 4") as show:
        show("13.8 req/s")
    assert capsys.readouterr().err == "  quantizing: 50 %\n"


def test_a_narrow_terminal_gets_lines_that_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    progress = screen.ScreenProgress()
    title = "loading ModelOpt's CUDA kernels, compiled once for a machine"
    note = "continuing a run that was stopped " * 3
    with progress.task(title, 1) as advance:
        advance(1)
    progress.note(note)
    said = capsys.readouterr()
    assert max(len(line) for line in [*said.out.splitlines(), *said.err.splitlines()]) < 60
    assert " ".join(said.err.split()) == f"{title}: 100 %"
    assert said.out.split() == note.split()
