"""Tool chatter goes to the log; our own progress is heard."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipelines.compress.quiet import muted


class Printing:
    """A progress display that prints."""

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator:
        print(f"begin {title}")  # noqa: T201
        yield lambda amount: print(f"+{amount}")  # noqa: T201
        print(f"end {title}")  # noqa: T201

    def note(self, text: str) -> None:
        print(text)  # noqa: T201


def test_chatter_goes_to_the_log_and_progress_to_the_screen(capsys, caplog) -> None:
    with caplog.at_level(logging.DEBUG), muted() as quiet:
        progress = quiet.progress(Printing())
        print("chatter")  # noqa: T201
        with progress.task("work", 1) as advance:
            print("more chatter", file=sys.stderr)  # noqa: T201
            advance(1)
        progress.note("done")
    print("after")  # noqa: T201
    assert capsys.readouterr() == ("begin work\n+1\nend work\ndone\nafter\n", "")
    assert caplog.messages == ["chatter", "more chatter"]


def test_other_threads_keep_the_screen(capsys) -> None:
    """A progress bar redraws from its own thread."""
    with muted():
        thread = threading.Thread(target=lambda: print("redraw"))  # noqa: T201
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "redraw\n"


def test_an_error_passes_through_and_ends_the_task(capsys) -> None:
    with pytest.raises(ValueError, match="broken"), muted() as quiet, quiet.progress(Printing()).task("work", 1):
        raise ValueError("broken")
    assert capsys.readouterr().out == "begin work\n"


def test_a_log_handler_on_the_muted_stream_does_not_loop(capsys) -> None:
    """Handlers that look the stream up at every line, as rich's does, find ours."""

    class Current(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sys.stdout.write(f"log: {record.getMessage()}\n")

    logger, handler = logging.getLogger("pipelines.compress.tools"), Current()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with muted():
            print("chatter")  # noqa: T201
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert capsys.readouterr().out == "log: chatter\n"


def test_a_terminal_stays_a_terminal_while_muted(monkeypatch):
    """Otherwise progress bars fall back to lines for log files."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with muted():
        assert sys.stderr.isatty()
