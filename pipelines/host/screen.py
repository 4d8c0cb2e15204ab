"""Output for people while a command runs: plain lines, and one progress bar for long work."""

import errno
import io
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from typing import Any, Literal, TextIO

from pipelines.domain.errors import masked
from pipelines.domain.progress import Advance

# Texts name commands as a checkout has them: "make build". Without make the reader types other words.

_COMMAND = re.compile(r"\bmake (?!all [a-z]+\b(?!=))([a-z]+(?:-[a-z]+)*)")
"""A command of make; not "make all others"."""
_typed: dict[str, str] = {}


def name_commands(typed: Mapping[str, str]) -> None:
    """Show other words for "make NAME" from now on, e.g. {"build": "trtllm-pipelines build"}; without, make's."""
    _typed.clear()
    _typed.update(typed)


def as_typed(text: str) -> str:
    """Return a text with the commands in it as the reader types them; stored artifacts keep make's words."""
    return _COMMAND.sub(lambda found: _typed.get(found[1], found[0]), text) if _typed else text


# Paragraphs and tables for a terminal, within its width.

NARROWEST, WIDEST = 60, 120
CONTINUED = " \\"
"""End of a line of a command that goes on in the next line."""
LEAST_TEXT = 12
"""No column of texts gets narrower than this to make room."""


def width() -> int:
    """Return the longest line to print: one less than the terminal's columns (or COLUMNS), within bounds.

    Without a terminal it is 79.
    """
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns)) - 1


def wrapped(text: str, indent: int = 2, room: int | None = None) -> str:
    """Break a paragraph into lines that fit; words are kept whole."""
    return textwrap.fill(
        as_typed(text), room or width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def wrapped_lines(text: str, indent: int = 2) -> list[str]:
    """Break a paragraph into a list of lines, as `wrapped` does."""
    return wrapped(text, indent).splitlines()


def command_lines(words: Sequence[str], indent: int = 0) -> list[str]:
    """Break a command between its words into lines that fit and that a shell reads as one.

    Args:
        words: quoted for the shell.
        indent: blanks before the first line; the others have two more.
    """
    lines: list[str] = []
    if words and words[0] == "make":
        words = [*as_typed(" ".join(words[:2])).split(), *words[2:]]
    for word in words:
        if lines and len(lines[-1]) + len(word) + len(" " + CONTINUED) <= width():
            lines[-1] += f" {word}"
        else:
            lines.append(" " * (indent + 2 * bool(lines)) + word)
    return [f"{line}{CONTINUED}" for line in lines[:-1]] + lines[-1:]


def table(
    rows: Sequence[Sequence[str] | str],
    *,
    left: int = 1,
    repeated: int | None = None,
    text_columns: Collection[int] = (),
    groups: Sequence[str] = (),
    indent: int = 0,
) -> list[str]:
    """Align cells in columns: texts to the left, numbers to the right.

    A table that is too wide gets one blank between columns, then its texts are broken into lines. If that is not
    enough, it is cut into blocks, each with the first columns and as many of the others as fit.

    Args:
        rows: the heading first, all of the same length; a text in place of a row is a paragraph of its own.
        left: columns at the start that hold texts.
        repeated: columns at the start that stand in every block, if not those.
        text_columns: other columns that hold texts.
        groups: a title above each column, or none; neighbours with the same title share it.
        indent: blanks before every line.
    """
    rows = [row if isinstance(row, str) else [as_typed(cell) for cell in row] for row in rows]
    cells = [row for row in rows if not isinstance(row, str)]
    widths, gap = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))], 2
    for title, spanned in groupby(range(len(groups)), key=lambda at: groups[at]):
        *_, last = own = list(spanned)
        widths[last] += max(0, len(title) - sum(widths[at] for at in own) - gap * (len(own) - 1))
    texts, room = {*range(left), *text_columns}, width() - indent
    if sum(widths) + gap * (len(widths) - 1) > room:
        gap = 1
    widths = _squeezed(widths, texts, room - gap * (len(widths) - 1))
    lines: list[str] = []
    for number, block in enumerate(_blocks(widths, left if repeated is None else repeated, room, gap)):
        if number:
            lines.append("")
        if any(groups[at] for at in block if groups):
            lines.append(_titles([groups[at] for at in block], [widths[at] for at in block], gap))
        for row in rows:
            if not isinstance(row, str):
                lines += _row([row[at] for at in block], [(widths[at], at in texts) for at in block], gap)
            elif number == 0:
                lines += wrapped(row, len(row) - len(row.lstrip()) + 2, room).splitlines()
    return [" " * indent + line if line else "" for line in lines]


def _squeezed(widths: list[int], texts: Collection[int], room: int) -> list[int]:
    """Shrink the widest text columns until the table fits, but not below a readable width."""
    widths = list(widths)
    while sum(widths) > room:
        widest = max(texts, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= LEAST_TEXT:
            break
        widths[widest] -= 1
    return widths


def _blocks(widths: Sequence[int], repeated: int, room: int, gap: int) -> list[list[int]]:
    """Split the columns into as many blocks as needed; each repeats the first ones."""
    fixed, blocks = list(range(repeated)), [list(range(repeated))]
    for at in range(repeated, len(widths)):
        taken = [*blocks[-1], at]
        if len(blocks[-1]) > repeated and sum(widths[i] for i in taken) + gap * (len(taken) - 1) > room:
            taken = [*fixed, at]
            blocks.append(taken)
        blocks[-1] = taken
    return blocks


def _titles(groups: Sequence[str], widths: Sequence[int], gap: int) -> str:
    """Write titles above the middle of their columns."""
    parts = []
    for title, columns in groupby(zip(groups, widths, strict=True), key=lambda column: column[0]):
        spanned = [size for _, size in columns]
        parts.append(title.center(sum(spanned) + gap * (len(spanned) - 1)))
    return (" " * gap).join(parts).rstrip()


def _row(cells: Sequence[str], columns: Sequence[tuple[int, bool]], gap: int) -> list[str]:
    """Write one row; texts wider than their columns go on in the next lines.

    Words of the last column are kept whole, because paths are copied from there.
    """
    parts = []
    for at, (cell, (size, text)) in enumerate(zip(cells, columns, strict=True)):
        if text and len(cell) > size:
            broken = at < len(columns) - 1
            parts.append(textwrap.wrap(cell, size, break_long_words=broken, break_on_hyphens=broken))
        else:
            parts.append([cell])
    return [
        (" " * gap)
        .join(part.ljust(size) if text else part.rjust(size) for part, (size, text) in zip(line, columns, strict=True))
        .rstrip()
        for line in zip_longest(*parts, fillvalue="")
    ]


log = logging.getLogger("pipelines")
STYLES = {"error": "1;31", "warning": "33"}
"""ANSI codes: bold red, yellow."""


def redraws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor and knows colours."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def coloured(text: str, word: str, code: str, stream: TextIO) -> str:
    """Colour the first place of a word in a text, on a terminal for which NO_COLOR is not set (no-color.org)."""
    plain = not redraws(stream) or os.environ.get("NO_COLOR")
    return text if plain else text.replace(word, f"\x1b[{code}m{word}\x1b[0m", 1)


def labelled(word: str, text: str, stream: TextIO) -> str:
    """Return a paragraph that begins with a word of `STYLES`, for a stream."""
    return coloured(wrapped(f"{word}: {text}", len(f"{word}: ")), word, STYLES[word], stream)


def complain(text: str, word: Literal["error", "warning"] = "error", command: Sequence[str] = ()) -> None:
    """Print an error or a warning as its own paragraph on standard error, and below it a command that helps."""
    lines = [labelled(word, masked(text), sys.stderr)]
    lines += command_lines([shlex.quote(each) for each in command], len(f"{word}: "))
    sys.stderr.write("\n".join(lines) + "\n")


def warn(*texts: object) -> None:
    """Print warnings about the work that follows, and keep them in the run's log."""
    for text in texts:
        sys.stdout.write(labelled("warning", str(text), sys.stdout) + "\n")
        sys.stdout.flush()
        log.info("warning: %s", text)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print one line to standard output, or another stream, and keep it in the run's log."""
    stream, text = stream or sys.stdout, as_typed(text)
    stream.write(f"{text}\n")
    stream.flush()
    if text:
        log.info("%s", text)


def tell(text: str) -> None:
    """Print each line as a paragraph within the terminal's width; what goes on in the next has two more blanks."""
    say("\n".join(wrapped(line, len(line) - len(line.lstrip(" ")) + 2) for line in text.split("\n")))


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
    """Stream that masks passwords in addresses, in tracebacks as well."""

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
    """Flush, and return why output was lost; None if all of it was written or the reader has gone."""
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
        if redraws(self._err):
            with _bar(title, total, unit, self._err, above=sys.stdout is self._out) as advance:
                yield advance
        else:
            yield _lines(title, total, self._err)

    def note(self, text: str) -> None:
        """See `pipelines.domain.progress.Progress.note`."""
        say(wrapped(f"  {text}", 4), self._out)


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
    done, last_percent, last = 0.0, 0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, last_percent, last
        done += amount
        percent, now = int(100 * done / total) if total else 0, time.monotonic()
        if now - last < SILENT_S:
            percent -= percent % 10
        if percent > last_percent:
            last_percent, last = percent, now
            stream.write(wrapped(f"  {title}: {percent} %", 4) + "\n")
            stream.flush()

    return advance
