"""Render tables of a document for a terminal, within its width."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.document.blocks import Table
from pipelines.host.screen import table, wrapped


def render_text(tables: Iterable[Table]) -> str:
    """Render tables with their captions and notes, with an empty line between them."""
    texts = []
    for block in tables:
        text_columns = [at for at, column in enumerate(block.columns) if not column.right]
        left = next(at for at, column in enumerate(block.columns) if column.right)
        groups = [column.group for column in block.columns] if any(column.group for column in block.columns) else ()
        titles = [column.title for column in block.columns]
        rows = table([titles, *block.rows], left=left, text_columns=text_columns, groups=groups)
        texts.append("\n".join([wrapped(block.caption, 0), "", *rows, "", *(wrapped(note, 0) for note in block.notes)]))
    return "\n\n".join(texts).rstrip()
