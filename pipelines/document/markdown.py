"""Render a document as Markdown, with the plots as files beside it. Text is escaped, so it is shown verbatim."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipelines.document.blocks import (
    Block,
    BulletList,
    Callout,
    Code,
    Column,
    Document,
    Figure,
    Fold,
    Table,
    Terms,
    Text,
)

_SPECIAL = re.compile(r"([\\`*\[\]|~$]|^#|(?<!\w)_|_(?!\w))")  # inside a word an underscore needs no escape
_HTML = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
_WORDS = {"good": "", "note": "Note: ", "warning": "Warning: "}


def render_markdown(document: Document) -> str:
    """Render the whole report."""
    lines = [f"# {escape(document.title)}", "", escape(document.subtitle), ""]
    lines += ["| | | |", "|---|---|---|"] if document.cards else []
    for card in document.cards:
        value = escape(f"{card.value} {card.unit}".strip())
        tag = f" ({card.origin})" if card.origin else ""
        lines.append(f"| {escape(card.title)} | **{value}** | {escape(card.detail)}{tag} |")
    lines += [""] if document.cards else []
    for block in document.lead:
        lines += _block(block)
    for section in document.sections:
        lines += [f"## {escape(section.title)}", ""]
        for block in section.blocks:
            lines += _block(block)
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).translate(_HTML)


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        return [escape(block.text), ""]
    if isinstance(block, Callout):
        return [f"> {_WORDS[block.kind]}{escape(block.text)}", ""]
    if isinstance(block, BulletList):
        return [*(f"- {escape(item)}" for item in block.items), ""]
    if isinstance(block, Terms):
        return [*(f"- **{escape(term)}**: {escape(text)}" for term, text in block.items), ""]
    if isinstance(block, Code):
        return [*(f"    {line}" for text in block.lines for line in text.splitlines()), ""]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        return _figure(block)
    return _fold(block)


def _fold(block: Fold) -> list[str]:
    inner = [line for each in block.blocks for line in _block(each)]
    return ["<details>", f"<summary>{block.title.translate(_HTML)}</summary>", "", *inner, "</details>", ""]


def _figure(block: Figure) -> list[str]:
    tag = f" ({block.origin})" if block.origin else ""
    return [
        f"**{escape(block.title)}**{tag}",
        "",
        f"![{escape(block.alt)}]({block.name}.svg)",
        "",
        escape(block.caption),
        "",
    ]


def _table(block: Table) -> list[str]:
    tag = f" ({block.origin})" if block.origin else ""
    lines = [f"{escape(block.caption)}{tag}", "", _row([_title(column) for column in block.columns])]
    lines.append("|" + "|".join("---:" if column.right else "---" for column in block.columns) + "|")
    for number, row in enumerate(block.rows):
        cells = [escape(cell) for cell in row]
        lines.append(_row([f"**{cell}**" if number == block.strong else cell for cell in cells]))
    lines.append("")
    for note in block.notes:
        lines += [escape(note), ""]
    return lines


def _title(column: Column) -> str:
    """Join a column's group and title, since Markdown has only one row of titles."""
    return escape(f"{column.group}: {column.title}" if column.group else column.title)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
