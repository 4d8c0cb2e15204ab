"""Output for people while a command runs: plain lines, and one progress bar for long work."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from pipelines.domain.progress import Advance

log = logging.getLogger("pipelines")
NARROWEST, WIDEST = 60, 120
STYLES = {"error": "1;31", "warning": "33"}
"""ANSI codes: bold red, yellow."""


def width() -> int:
    """Return the longest line to print: one less than the terminal's columns (or COLUMNS), within bounds.

    Without a terminal it is 79.
    """
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns)) - 1


def wrapped(text: str, indent: int = 2) -> str:
    """Break a paragraph into lines that fit; words are kept whole."""
    return textwrap.fill(text, width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def table(
    rows: Sequence[Sequence[str]], *, left: int = 1, least: Sequence[int] = (), gap: int = 2, indent: int = 0
) -> list[str]:
    """Align cells in columns, the first `left` of them to the left and numbers to the right.

    A table that is too wide gets one blank between columns; one that is still too wide is cut into blocks, each with
    the left columns and as many of the others as fit.

    Args:
        rows: the heading first, all of the same length.
        left: columns that are aligned to the left and stand in every block.
        least: least widths of the columns.
        gap: blanks between columns where they fit.
        indent: blanks before each line.
    """
    room = width() - indent
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    widths = [max(pair) for pair in zip(widths, [*least, *[0] * len(widths)], strict=False)]
    if sum(widths) + gap * (len(widths) - 1) > room:
        gap = 1
    fixed, blocks = list(range(left)), [list[int]()]
    for at in range(left, len(widths)):
        taken = [*fixed, *blocks[-1], at]
        if blocks[-1] and sum(widths[i] for i in taken) + gap * (len(taken) - 1) > room:
            blocks.append([])
        blocks[-1].append(at)
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for row in rows:
            cells = [row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in (*fixed, *block)]
            lines.append((" " * indent + (" " * gap).join(cells)).rstrip())
    return lines


def styled(word: str, stream: TextIO) -> str:
    """Colour a word of `STYLES` where the stream takes colours."""
    return f"\x1b[{STYLES[word]}m{word}\x1b[0m" if has_colour(stream) else word


def has_colour(stream: TextIO) -> bool:
    """Return whether to write colours: the stream is a terminal and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def complain(text: str, word: Literal["error", "warning"] = "error") -> None:
    """Print an error or a warning as its own paragraph on standard error."""
    indent = " " * len(f"{word}: ")
    sys.stderr.write(wrapped(f"{word}: {text}", len(indent)).replace(word, styled(word, sys.stderr), 1) + "\n")


def warn(text: str) -> None:
    """Print a warning about the work that follows, and keep it in the run's log."""
    sys.stdout.write(wrapped(f"warning: {text}", 9).replace("warning", styled("warning", sys.stdout), 1) + "\n")
    sys.stdout.flush()
    log.info("warning: %s", text)


def say(text: str = "") -> None:
    """Print one line to standard output and keep it in the run's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if text:
        log.info("%s", text)


class _Outlived(io.FileIO):
    """A stream that discards output once its reader has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return super().write(data)


def outlive_readers() -> None:
    """Let this process finish its work when the reader of its output stops early (`| head -1`)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            continue
        raw = _Outlived(stream.fileno(), "wb", closefd=False)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        same = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        setattr(sys, name, io.TextIOWrapper(buffer, **same))


class ScreenProgress:
    """Progress bars on a terminal; elsewhere (CI logs) a line per tenth of the work."""

    @contextmanager
    def task(self, title: str, total: float | None, unit: str = "") -> Iterator[Advance]:
        """See `pipelines.domain.progress.Progress.task`."""
        log.info("%s: %s %s", title, total if total is not None else "", unit)
        if sys.stderr.isatty():
            with _bar(title, total, unit) as advance:
                yield advance
        else:
            yield _tenths(title, total)

    def note(self, text: str) -> None:
        """See `pipelines.domain.progress.Progress.note`."""
        say(f"  {text}")


@contextmanager
def _bar(title: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("  {task.description}"), BarColumn(bar_width=20), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda amount: bars.advance(task, amount)


def _tenths(title: str, total: float | None) -> Advance:
    """Print one line per tenth of the work, so that a log without a terminal stays readable."""
    done, shown = 0.0, 0

    def advance(amount: float) -> None:
        nonlocal done, shown
        done += amount
        tenth = int(10 * done / total) if total else 0
        if tenth > shown:
            shown = tenth
            sys.stderr.write(f"  {title}: {10 * tenth} %\n")
            sys.stderr.flush()

    return advance
