"""Render a document as one HTML file without scripts or external resources: light, dark, phone, print; all escaped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from pipelines.document.blocks import Column, Document
from pipelines.document.canvas import DARK, LIGHT

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render_html(document: Document) -> str:
    """Render the whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["heads"] = header_groups
    environment.filters["svg"] = Markup  # our own drawing; Matplotlib escaped its texts
    return environment.get_template("report.html").render(
        document=document, light=Markup(_variables(LIGHT)), dark=Markup(_variables(DARK))
    )


def header_groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return group titles with the number of columns each spans; [] if there are none."""
    spans = [(title, len(list(items))) for title, items in itertools.groupby(columns, key=lambda column: column.group)]
    return spans if any(title for title, _ in spans) else []


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())
