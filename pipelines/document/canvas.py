"""Draw with Matplotlib: SVG that follows the page's theme, and PNG in the light theme. Output is deterministic."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.document.blocks import Figure, Origin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

__all__ = ["Axes", "Drawing"]
"""Re-exported for modules that draw, because only this module imports matplotlib."""
LIGHT = {
    "ink": "#1c2024", "muted": "#5b6470", "grid": "#e3e6ea", "paper": "#ffffff",
    "wait": "#c05a00", "work": "#1f6fb4", "bad": "#b3261e",
    "s0": "#1f6fb4", "s1": "#c24a0a", "s2": "#00795c", "s3": "#93399a",
    "s4": "#8a6800", "s5": "#5a6270", "s6": "#b0205a", "s7": "#0b7a8c",
}  # fmt: skip
DARK = {
    "ink": "#e8eaed", "muted": "#a3acb8", "grid": "#343a42", "paper": "#16191d",
    "wait": "#ffa657", "work": "#6cb6ff", "bad": "#ff8a80",
    "s0": "#6cb6ff", "s1": "#ff9a5c", "s2": "#45d3a4", "s3": "#dd9ae6",
    "s4": "#e3c04b", "s5": "#b4bcc8", "s6": "#ff8fb3", "s7": "#5fd4e4",
}  # fmt: skip
"""Text and lines keep a contrast of at least 3:1 (text 4.5:1) to `paper`. The series are an Okabe-Ito-like order that
also differs in lightness; markers and line styles tell them apart without colour."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2)),
    (0, (3, 1)),
    (0, (2, 2)),
    (0, (6, 1, 1, 1)),
)
_SENTINEL = {name: f"#0a0b{number:02x}" for number, name in enumerate(LIGHT)}


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours by role, as matplotlib takes them."""

    colours: dict[str, str]

    def __getitem__(self, role: str) -> str:
        return self.colours[role]

    def series(self, index: int) -> str:
        """Return the colour of the n-th format."""
        return self.colours[f"s{index % 8}"]


Draw = Callable[["Drawing", Theme], None]


def plot(
    name: str, size: tuple[float, float], draw: Draw, *, title: str, caption: str, alt: str,
    origin: Origin = "measured", png: bool = False,
) -> Figure:  # fmt: skip
    """Draw a plot for the page and, if requested, as a PNG.

    Args:
        name: name of the file; also makes the ids of its elements unique within a page.
        size: width and height in inches; 1 inch is 72 units of the SVG.
        draw: fills a figure.
        title: one line above the plot.
        caption: text below the plot.
        alt: description in words.
        origin: origin of the numbers.
        png: whether to make a PNG as well.
    """
    svg = _svg(_render(size, draw, Theme(_SENTINEL), "svg").decode(), name, alt)
    picture = _render(size, draw, Theme(LIGHT), "png") if png else None
    return Figure(name, title, caption, alt, origin, svg, picture)


def _render(size: tuple[float, float], draw: Draw, theme: Theme, form: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    style: dict[str, Any] = {
        "svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "report",
        "font.family": "DejaVu Sans", "font.size": 8.5,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": theme["muted"],
        "axes.linewidth": 0.7, "axes.labelcolor": theme["muted"], "axes.titlecolor": theme["ink"],
        "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 8.5,
        "xtick.color": theme["muted"], "ytick.color": theme["muted"], "xtick.labelsize": 8, "ytick.labelsize": 8,
        "xtick.major.width": 0.7, "ytick.major.width": 0.7, "text.color": theme["ink"],
        "axes.grid": True, "grid.color": theme["grid"], "grid.linewidth": 0.7, "axes.axisbelow": True,
        "axes.facecolor": "none", "figure.facecolor": theme["paper"] if form == "png" else "none",
    }  # fmt: skip
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style)  # type: ignore[arg-type]
        figure = Drawing(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, theme)
        return _saved(figure, form)


def _saved(figure: Drawing, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, dpi=160, metadata=metadata)
    return out.getvalue()


def _svg(text: str, name: str, alt: str) -> str:
    """Extract the SVG element, with unique ids, CSS variables for colours, and a size set by the page."""
    body = text[text.index("<svg") :]
    for role, colour in _SENTINEL.items():
        body = body.replace(colour, f"var(--{role})")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font\1: \2sans-serif", body)
    view = re.search(r'viewBox="[^"]*"', body)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view and view[0]}'
    opening += f' role="img" aria-label="{_attribute(alt)}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, body, count=1).strip()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def standalone(svg: str) -> str:
    """Return a standalone SVG file with the colours of both themes and the font."""
    light, dark = (";".join(f"--{k}:{v}" for k, v in colours.items()) for colours in (LIGHT, DARK))
    style = (
        f"<style>svg{{{light};background:var(--paper)}}"
        f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}"
        "text{font-family:system-ui,sans-serif;paint-order:stroke;stroke:var(--paper);stroke-width:2.5px}</style>"
    )
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace(">", f">{style}", 1) + "\n"


def axis(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set the titles and labels of one panel."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def plain_log(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic with plain numbers as ticks: 1, 2, 5, 10, ..., or 1, 10, 100 over more than two decades.

    Args:
        axes: the panel.
        which: "x" or "y".
        values: what will be drawn, above 0.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    line = getattr(axes, f"{which}axis")
    wide = max(values) > 100 * min(values)
    line.set_major_locator(LogLocator(base=10, subs=(1,) if wide else (1, 2, 5)))
    line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    line.set_minor_formatter(NullFormatter())
