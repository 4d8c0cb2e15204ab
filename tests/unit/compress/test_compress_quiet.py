"""Output of libraries goes to the log; our own progress is seen."""

import io
import logging
import sys

import pytest

from pipelines.compress.contexts import muted
from pipelines.host.screen import ScreenProgress


def messages_of_tools(caplog) -> list[str]:
    return [each.message for each in caplog.records if each.name == "pipelines.compress.tools"]


def test_output_of_libraries_goes_to_the_log_and_progress_to_the_screen(capsys, caplog) -> None:
    progress = ScreenProgress()
    with caplog.at_level(logging.DEBUG, "pipelines.compress.tools"), muted():
        print("chatter")  # noqa: T201
        with progress.task("work", 1) as advance:
            print("more chatter", file=sys.stderr)  # noqa: T201
            advance(1)
        progress.note("done")
    print("after")  # noqa: T201
    assert capsys.readouterr() == ("  done\nafter\n", "  work: 100 %\n")
    assert messages_of_tools(caplog) == ["chatter", "more chatter"]


def test_on_a_terminal_the_bar_is_drawn_and_the_output_of_libraries_is_not(monkeypatch, caplog) -> None:
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ScreenProgress()
    with caplog.at_level(logging.DEBUG, "pipelines.compress.tools"), muted(), progress.task("work", 1) as advance:
        print("chatter")  # noqa: T201
        advance(1)
    assert "work" in terminal.getvalue()
    assert "chatter" not in terminal.getvalue()
    assert messages_of_tools(caplog) == ["chatter"]


def test_an_error_passes_through(capsys) -> None:
    with pytest.raises(ValueError, match="broken"), muted():
        raise ValueError("broken")
    print("after")  # noqa: T201
    assert capsys.readouterr().out == "after\n"


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
