"""Write a document to files: `report.html`, `report.md` and the plots. The same document gives the same bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipelines.document.blocks import Document
from pipelines.domain.errors import UserError
from pipelines.host.files import write_bytes


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Paths of a report: the Markdown, the HTML, and every plot."""

    markdown: Path
    html: Path
    plots: tuple[Path, ...]


def write_document(made: Document, folder: Path) -> ReportPaths:
    """Write a document as Markdown, HTML and plots; each file is replaced atomically, the two texts last.

    Raises:
        UserError: the folder cannot be written.
    """
    from pipelines.document.canvas import standalone
    from pipelines.document.html import render_html
    from pipelines.document.markdown import render_markdown

    plots: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _plots_of(folder / "report.md")
        for figure in made.figures():
            plots.append(write_bytes(folder / f"{figure.name}.svg", standalone(figure.svg).encode()))
            if figure.png is not None:
                plots.append(write_bytes(folder / f"{figure.name}.png", figure.png))
        markdown = write_bytes(folder / "report.md", render_markdown(made).encode())
        html = write_bytes(folder / "report.html", render_html(made).encode())
        for name in before - {path.name for path in plots}:  # delete old plots of formats that are not in this report
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"The report cannot be written to {folder}: {error.strerror}.",
            todo="Choose another folder: report.folder=/some/folder",
        ) from None
    return ReportPaths(markdown, html, tuple(plots))


def _plots_of(markdown: Path) -> set[str]:
    """List the plots that an earlier report left in this folder."""
    if not markdown.is_file():
        return set()
    made = re.findall(r"\(([\w-]+)\.svg\)", markdown.read_text(encoding="utf-8"))
    return {f"{name}{ending}" for name in made for ending in (".svg", ".png")}
