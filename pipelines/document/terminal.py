"""Render tables of a document for a terminal, within its width."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.document.blocks import Table
from pipelines.host.screen import table, wrapped


def render_text(tables: Iterable[Table]) -> str:
    """Render tables with their captions and notes, with an empty line between them."""
    return "\n\n".join(
        "\n".join([wrapped(each.caption, 0), "", *rows_text(each), "", *(wrapped(note, 0) for note in each.notes)])
        for each in tables
    ).rstrip()


def rows_text(block: Table) -> list[str]:
    """Render the rows of a table below their titles, without its caption and its notes."""
    texts = [at for at, column in enumerate(block.columns) if not column.right]
    left = next(at for at, column in enumerate(block.columns) if column.right)
    groups = [column.group for column in block.columns] if any(column.group for column in block.columns) else ()
    return table([[column.title for column in block.columns], *block.rows], left=left, words=texts, groups=groups)
