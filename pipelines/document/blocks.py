"""Blocks of a report, understood by both renderers. All strings are plain text, with `commands` in sentences."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.host.screen import table, wrapped

Origin = Literal["measured", "modelled", "recorded", ""]
"""Origin of numbers: a measurement, a performance model, a manifest (sizes, digests), or no numbers."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Callout:
    """A highlighted paragraph: "good", "note" or "warning"."""

    kind: Literal["good", "note", "warning"]
    text: str


@dataclass(frozen=True, slots=True)
class BulletList:
    """Short items."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms and their definitions."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """Lines for a terminal."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: title, group of columns, and whether it is right-aligned."""

    title: str
    group: str = ""
    right: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first cell of a row names it.

    Attributes:
        caption: what it shows, including model, precision, ISL, OSL, concurrency and TP where numbers depend on them.
        rows: each with as many cells as there are columns.
        strong: index of the highlighted row, or None.
    """

    caption: str
    origin: Origin
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a row with a wrong number of cells: a cell under the wrong title would be a false number."""
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"a row of '{self.caption}' does not have {len(self.columns)} cells")


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot.

    Attributes:
        name: name of its file, without extension.
        title: one line above the plot.
        caption: how to read it, and the six facts (see `pipelines.report.data`).
        alt: description in words, for readers who cannot see it.
        svg: `<svg>` element with CSS variables for colours.
        png: the same plot for viewers without SVG; None if there is none.
    """

    name: str
    title: str
    caption: str
    alt: str
    origin: Origin
    svg: str
    png: bytes | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that are collapsed at first."""

    title: str
    blocks: "tuple[Block, ...]"


@dataclass(frozen=True, slots=True)
class RankingStep:
    """What a ranking shows from one limit on.

    Attributes:
        at: the smallest limit it holds for; None is no limit.
        answer: the choice at this limit, or why there is none.
        table: the rows in order.
        cards: the first screen at this limit; empty leaves it.
    """

    at: float | None
    answer: Callout
    table: Table
    cards: "tuple[Card, ...]" = ()


@dataclass(frozen=True, slots=True)
class Ranking:
    """A table whose order depends on a limit; the page has a slider for it, every other form shows the first view.

    Attributes:
        limit: what is limited, e.g. "TTFT p99".
        views: name and steps of each, by ascending limit, the last without one; a single step has no slider.
        start: the limit at first; None is no limit.
        hint: sentence below the controls.
    """

    limit: str
    unit: str
    views: tuple[tuple[str, tuple[RankingStep, ...]], ...]
    start: float | None
    hint: str

    @property
    def first(self) -> RankingStep:
        """The step that is shown at first."""
        steps = self.views[0][1]
        start = self.start
        fits = [step for step in steps if step.at is not None and start is not None and step.at <= start]
        return fits[-1] if fits else steps[-1]


def left(*titles: str) -> tuple[Column, ...]:
    """Return columns of words, which are left-aligned."""
    return tuple(Column(title, right=False) for title in titles)


def right(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers, which are right-aligned."""
    return tuple(map(Column, titles))


def groups(title: str, names: Iterable[str]) -> tuple[Column, ...]:
    """Group neighbouring columns under one title."""
    return tuple(Column(name, title) for name in names)


Block = Text | Callout | BulletList | Terms | Code | Table | Figure | Fold | Ranking


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with its blocks; the id is its anchor in the page."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """One answer on the first screen: question, answer, and its basis."""

    title: str
    value: str
    unit: str
    detail: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file beside the page: its name, what it is, and its content."""

    name: str
    title: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Document:
    """The whole report.

    Attributes:
        subtitle: line below the title.
        cards: the first screen.
        lead: blocks before the sections.
        kind: kind of report, shown above the title.
        source: what the report was made from, shown at the end.
        files: files to write beside it, with a link to each.
    """

    title: str
    subtitle: str
    cards: tuple[Card, ...]
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]
    kind: str = "Deployment report"
    source: str = "manifests and stored results"
    files: tuple[Attachment, ...] = ()

    def figures(self) -> list[Figure]:
        """List all plots in order."""
        return [figure for section in self.sections for figure in _figures(section.blocks)]


def _figures(blocks: tuple[Block, ...]) -> list[Figure]:
    figures: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figure):
            figures.append(block)
        elif isinstance(block, Fold):
            figures += _figures(block.blocks)
    return figures


COMMAND = re.compile(r"(?<!`)`([^`]+)`(?!`)")
"""A command in a sentence."""

# Render a document as Markdown, with the plots as files beside it. Text is escaped, so it is shown verbatim.

_SPECIAL = re.compile(r"([\\`*\[\]|~$]|^#|(?<!\w)_|_(?!\w))")  # inside a word an underscore needs no escape
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
    if document.files:
        lines += ["; ".join(f"[{escape(each.title)}]({each.name})" for each in document.files), ""]
    for section in document.sections:
        lines += [f"## {escape(section.title)}", ""]
        for block in section.blocks:
            lines += _block(block)
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown and HTML, on one line."""
    return _escaped(" ".join(text.split()))


def _escaped(line: str) -> str:
    return html.escape(_SPECIAL.sub(r"\\\1", line), quote=False)


def prose(text: str) -> str:
    """Escape a sentence for Markdown and HTML, on one line; its commands are code."""
    parts = COMMAND.split(" ".join(text.split()))
    return "".join(f"`{part}`" if at % 2 else _escaped(part) for at, part in enumerate(parts))


def _block(block: Block) -> list[str]:
    if isinstance(block, Text):
        return [prose(block.text), ""]
    if isinstance(block, Callout):
        return [f"> {_WORDS[block.kind]}{prose(block.text)}", ""]
    if isinstance(block, BulletList):
        return [*(f"- {prose(item)}" for item in block.items), ""]
    if isinstance(block, Terms):
        return [*(f"- **{escape(term)}**: {prose(text)}" for term, text in block.items), ""]
    if isinstance(block, Code):
        return [*(f"    {line}" for text in block.lines for line in text.splitlines()), ""]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Ranking):
        return [*_block(block.first.answer), *_table(block.first.table)]
    if isinstance(block, Figure):
        tag = f" ({block.origin})" if block.origin else ""
        return [
            f"**{escape(block.title)}**{tag}",
            "",
            f"![{escape(block.alt)}]({block.name}.svg)",
            "",
            escape(block.caption),
            "",
        ]
    inner = [line for each in block.blocks for line in _block(each)]
    return ["<details>", f"<summary>{html.escape(block.title, quote=False)}</summary>", "", *inner, "</details>", ""]


def _table(block: Table) -> list[str]:
    tag = f" ({block.origin})" if block.origin else ""
    # Markdown has only one row of titles
    titles = [escape(f"{each.group}: {each.title}" if each.group else each.title) for each in block.columns]
    lines = [f"{escape(block.caption)}{tag}", "", _row(titles)]
    lines.append("|" + "|".join("---:" if column.right else "---" for column in block.columns) + "|")
    for number, row in enumerate(block.rows):
        cells = [escape(cell) for cell in row]
        lines.append(_row([f"**{cell}**" if number == block.strong and cell else cell for cell in cells]))
    lines.append("")
    for note in block.notes:
        lines += [prose(note), ""]
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# Tables in a terminal, within its width.


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
