"""Paragraphs and tables for a terminal, within its width."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby, zip_longest

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
    """Break a paragraph into lines that fit; words are kept whole.

    Args:
        text: the paragraph.
        indent: blanks before every line but the first.
        room: the longest line, if not `width()`.
    """
    return textwrap.fill(
        text, room or width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def command_lines(words: Sequence[str], indent: int = 0) -> list[str]:
    """Break a command between its words into lines that fit and that a shell reads as one.

    Args:
        words: quoted for the shell.
        indent: blanks before the first line; the others have two more.
    """
    lines: list[str] = []
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
    words: Collection[int] = (),
    groups: Sequence[str] = (),
    least: Sequence[int] = (),
    gap: int = 2,
    indent: int = 0,
) -> list[str]:
    """Align cells in columns: texts to the left, numbers to the right.

    A table that is too wide gets one blank between columns, then its texts are broken into lines. If that is not
    enough, it is cut into blocks, each with the first columns and as many of the others as fit.

    Args:
        rows: the heading first, all of the same length; a text in place of a row is a paragraph of its own.
        left: columns at the start that hold texts and stand in every block.
        words: other columns that hold texts.
        groups: a title above each column, or none; neighbours with the same title share it.
        least: least widths of the columns.
        gap: blanks between columns where they fit.
        indent: blanks before every line.
    """
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    widths = [max(pair) for pair in zip(widths, [*least, *[0] * len(widths)], strict=False)]
    texts, room = {*range(left), *words}, width() - indent
    if sum(widths) + gap * (len(widths) - 1) > room:
        gap = 1
    widths = _squeezed(widths, texts, room - gap * (len(widths) - 1))
    lines: list[str] = []
    for number, block in enumerate(_blocks(widths, left, room, gap)):
        if number:
            lines.append("")
        if groups:
            lines.append(_titles([groups[at] for at in block], [widths[at] for at in block], gap))
        for row in rows:
            if not isinstance(row, str):
                lines += _row([row[at] for at in block], [(widths[at], at in texts) for at in block], gap)
            elif number == 0:
                lines += wrapped(row, len(row) - len(row.lstrip()) + 2, room).splitlines()
    return [" " * indent + line if line else "" for line in lines]


def _squeezed(widths: list[int], texts: Collection[int], room: int) -> list[int]:
    """Take from the widest texts what a table has too much, and leave each enough to be read."""
    widths = list(widths)
    while sum(widths) > room:
        widest = max(texts, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= LEAST_TEXT:
            break
        widths[widest] -= 1
    return widths


def _blocks(widths: Sequence[int], left: int, room: int, gap: int) -> list[list[int]]:
    """Share the columns out to as many blocks as it takes; the first `left` are in all of them."""
    fixed, blocks = list(range(left)), [list(range(left))]
    for at in range(left, len(widths)):
        taken = [*blocks[-1], at]
        if len(blocks[-1]) > left and sum(widths[i] for i in taken) + gap * (len(taken) - 1) > room:
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
