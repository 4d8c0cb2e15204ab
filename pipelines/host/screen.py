"""Output for people while a command runs: plain lines, and one progress bar for long work."""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from pipelines.domain.errors import masked
from pipelines.domain.progress import Advance
from pipelines.host.text import command_lines, wrapped

log = logging.getLogger("pipelines")
STYLES = {"error": "1;31", "warning": "33"}
"""ANSI codes: bold red, yellow."""


def styled(word: str, stream: TextIO) -> str:
    """Colour a word of `STYLES` where the stream takes colours."""
    return f"\x1b[{STYLES[word]}m{word}\x1b[0m" if has_colour(stream) else word


def has_colour(stream: TextIO) -> bool:
    """Return whether to write colours: the stream is a terminal and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def complain(text: str, word: Literal["error", "warning"] = "error", command: Sequence[str] = ()) -> None:
    """Print an error or a warning as its own paragraph on standard error, and below it a command that helps."""
    indent = len(f"{word}: ")
    lines = [wrapped(f"{word}: {masked(text)}", indent).replace(word, styled(word, sys.stderr), 1)]
    lines += command_lines([shlex.quote(each) for each in command], indent)
    sys.stderr.write("\n".join(lines) + "\n")


def warn(text: str) -> None:
    """Print a warning about the work that follows, and keep it in the run's log."""
    sys.stdout.write(wrapped(f"warning: {text}", 9).replace("warning", styled("warning", sys.stdout), 1) + "\n")
    sys.stdout.flush()
    log.info("warning: %s", text)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print one line to standard output, or another stream, and keep it in the run's log."""
    stream = stream or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
    if text:
        log.info("%s", text)


class _Outlived(io.FileIO):
    """A stream that discards output once its reader has gone, and notes why output was lost otherwise.

    Attributes:
        lost: why output could not be written, e.g. "No space left on device"; None if nothing was lost.
    """

    lost: str | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            self.lost = error.strerror
            return len(data)


class _Masked(io.TextIOWrapper):
    """Text in which addresses show no passwords, whoever writes it, tracebacks included."""

    def write(self, text: str, /) -> int:
        super().write(masked(text))
        return len(text)


LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""Errors of a redirected output that cost its lines and not the work."""


def outlive_readers() -> None:
    """Let this process finish its work when its output is not taken: `| head -1`, `> /dev/full`, `>&-`.

    A character that the output's encoding lacks becomes "?" instead of an error.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller; /dev/null takes its number, the lowest one free
            number = os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = _Outlived(stream.fileno(), "wb", closefd=False)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        same = {key: getattr(stream, key) for key in ("encoding", "line_buffering", "write_through")}
        errors = "replace" if stream.errors == "strict" else stream.errors
        setattr(sys, name, _Masked(buffer, errors=errors, **same))


def lost_output() -> str | None:
    """Write what is still buffered, and return why output was lost; None if all of it was written or nobody reads."""
    sys.stdout.flush()
    raw = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
    return getattr(raw, "lost", None)


SILENT_S = 10.0
"""How long slow work says nothing, where it knows how far it is."""


class ScreenProgress:
    """Progress bars on a terminal; elsewhere (CI logs) a line per tenth of the work, or per percent of slow work.

    They go to the streams that are there when this is made, also while a library's output is redirected.
    """

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `pipelines.domain.progress.Progress.task`."""
        log.info("%s: %s %s", title, total if total is not None else "", unit)
        if self._err.isatty():
            with _bar(title, total, unit, self._err, above=sys.stdout is self._out) as advance:
                yield advance
        else:
            yield _lines(title, total, self._err)

    def note(self, text: str) -> None:
        """See `pipelines.domain.progress.Progress.note`."""
        say(f"  {text}", self._out)


@contextmanager
def _bar(title: str, total: float | None, unit: str, stream: TextIO, *, above: bool) -> Iterator[Advance]:
    """Draw a bar; above: lines that are printed meanwhile appear above it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("  {task.description}"), BarColumn(bar_width=20), amount, TimeRemainingColumn())
    console = Console(file=stream)
    with Progress(*columns, console=console, transient=True, redirect_stdout=above, redirect_stderr=above) as bars:
        task = bars.add_task(title, total=total)
        yield lambda amount: bars.advance(task, amount)


def _lines(title: str, total: float | None, stream: TextIO) -> Advance:
    """Print a line per tenth of the work, or per percent where one takes long: so that a log is not silent."""
    done, shown, last = 0.0, 0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, shown, last
        done += amount
        percent, now = int(100 * done / total) if total else 0, time.monotonic()
        if now - last < SILENT_S:
            percent -= percent % 10
        if percent > shown:
            shown, last = percent, now
            stream.write(f"  {title}: {percent} %\n")
            stream.flush()

    return advance
