"""Draw with Matplotlib: SVG that follows the page's theme, and PNG in the light theme. Output is deterministic."""

from __future__ import annotations

import html
import importlib.util
import io
import itertools
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.document.blocks import COMMAND, Column, Document, Figure, Origin, Ranking, render_markdown
from pipelines.domain.errors import Fault
from pipelines.host.files import disk_faults, write_bytes
from pipelines.host.screen import as_typed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Write a document to files: `report.html`, `report.md` and the plots. The same document gives the same bytes.


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Paths of a report: the Markdown, the HTML, every plot, and the files beside them."""

    markdown: Path
    html: Path
    plots: tuple[Path, ...]
    files: tuple[Path, ...] = ()


def missing_packages(what: str = "The report", names: Sequence[str] = ("jinja2", "matplotlib")) -> list[Fault]:
    """List the packages for `write_document`, or `names`, that this Python lacks, to be said before the work."""
    return [
        Fault(f"{what} needs the Python package '{name}', which is not installed.", todo="Run: make setup")
        for name in names
        if importlib.util.find_spec(name) is None
    ]


def write_document(document: Document, folder: Path) -> ReportPaths:
    """Write a document as Markdown, HTML and plots; each file is replaced atomically, the two texts last.

    Raises:
        UserError: the folder cannot be written.
    """
    plots: list[Path] = []
    todo = "Choose another folder: report.folder=/some/folder"
    with disk_faults(f"The report cannot be written to {folder}", todo):
        folder.mkdir(parents=True, exist_ok=True)
        earlier = folder / "report.md"
        text = earlier.read_text(encoding="utf-8") if earlier.is_file() else ""
        before = {f"{name}{end}" for name in re.findall(r"\(([\w-]+)\.svg\)", text) for end in (".svg", ".png")}
        for figure in document.figures():
            plots.append(write_bytes(folder / f"{figure.name}.svg", standalone(figure.svg).encode()))
            if figure.png is not None:
                plots.append(write_bytes(folder / f"{figure.name}.png", figure.png))
        files = tuple(write_bytes(folder / each.name, each.content) for each in document.files)
        markdown = write_bytes(folder / "report.md", as_typed(render_markdown(document)).encode())
        html = write_bytes(folder / "report.html", as_typed(render_html(document)).encode())
        for name in before - {path.name for path in plots}:  # delete old plots of formats that are not in this report
            (folder / name).unlink(missing_ok=True)
    return ReportPaths(markdown, html, tuple(plots), files)


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

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
_DASHES = (
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
        """Return the colour of the n-th curve."""
        return self.colours[f"s{index % 8}"]


def marker(index: int) -> str:
    """Return the marker of the n-th curve; a colour that repeats gets another one."""
    return _MARKERS[(index + index // 8) % 8]


def dash(index: int) -> Any:
    """Return the line style of the n-th curve; a colour that repeats gets another one."""
    return _DASHES[(index + index // 8) % 8]


Draw = Callable[["Drawing", Theme], None]
VALUE = "value: "
"""An artist whose `gid` begins so shows the rest of it where the pointer or the focus is."""


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
    out, unnamed = io.BytesIO(), ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
    figure.savefig(out, format=form, dpi=160, metadata=dict.fromkeys(unnamed))
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
    pointed = r'<g class="value" data-value="\1"><title>\1</title>'
    body, values = re.subn(rf'<g id="{name}-{VALUE}([^"]*)">', pointed, body)
    label = html.escape(alt, quote=False).replace('"', "&quot;")
    # What is inside an image has no focus, so a plot with values to visit is a group.
    opening += f' role="{"group" if values else "img"}" aria-label="{label}">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, body, count=1).strip()


def standalone(svg: str) -> str:
    """Return a standalone SVG file with the colours of both themes and the font."""
    style = (
        f"<style>svg{{{variables(LIGHT)};background:var(--paper)}}"
        f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}"
        "text{font-family:system-ui,sans-serif;paint-order:stroke;stroke:var(--paper);stroke-width:2.5px}</style>"
    )
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace(">", f">{style}", 1) + "\n"


def axis(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Set the titles and labels of one panel."""
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def plain_log(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic with ticks at 1, 2, 5, 10, ..., or at 1, 10, 100 over more than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    line = getattr(axes, f"{which}axis")
    wide = max(values) > 100 * min(values)
    line.set_major_locator(LogLocator(base=10, subs=(1,) if wide else (1, 2, 5)))
    line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    line.set_minor_formatter(NullFormatter())


# Render a document as one HTML file without external resources: light, dark, phone, print; all escaped. Its script adds
# to a page that says everything without one: sorting, values at the pointer, the slider of a ranking. No other may run.

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render_html(document: Document) -> str:
    """Render the whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

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
    environment.filters["steps"] = ranking_data
    environment.filters["prose"] = lambda text: Markup(COMMAND.sub(r"<code>\1</code>", str(escape(text))))
    script = "\n" + (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        document=document, light=Markup(variables(LIGHT)), dark=Markup(variables(DARK)),
        script=Markup(script), digest=digest,
    )  # fmt: skip


def ranking_data(block: Ranking) -> dict[str, Any]:
    """Return what the script of the page needs of a ranking: its views, with every step as texts."""
    steps = [
        [
            {
                "at": step.at,
                "kind": step.answer.kind,
                "answer": step.answer.text,
                "caption": step.table.caption,
                "rows": step.table.rows,
                "strong": step.table.strong,
                "notes": step.table.notes,
                "cards": [asdict(card) for card in step.cards],
            }
            for step in each
        ]
        for _, each in block.views
    ]
    return {"start": block.start, "unit": block.unit, "steps": steps}


def header_groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return group titles with the number of columns each spans; [] if there are none."""
    spans = [(title, len(list(items))) for title, items in itertools.groupby(columns, key=lambda column: column.group)]
    return spans if any(title for title, _ in spans) else []


def variables(colours: Mapping[str, str]) -> str:
    """Return colours as CSS variables."""
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


# Place labels in plots without overlaps: names beside the ends of curves, loads beside markers.

End = tuple[tuple[float, float], str, str]
"""(x, y) in data, name, colour."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

NAME_STEP = 11.0
"""Vertical distance between two names, in points."""

_OFFSETS = ((5, 6), (5, -12), (-5, 6), (-5, -12))
"""Possible positions of a load's label, in points from its marker; the sign of the first number gives the side."""


_SIDES = ((8, 0, "left"), (0, -13, "center"), (-8, 0, "right"), (0, 14, "center"))
"""Possible positions of a name, in points from the end of its curve, best first."""


def beside(axes: Axes, ends: Sequence[End], points: Sequence[tuple[float, float]], line: str) -> list[Box]:
    """Label the curves: at their ends where there is room, else in a column beside the axes.

    Args:
        axes: the axes, with their final limits.
        ends: right end of each curve, its name and colour.
        points: every marker, so that no name covers one, nor an axis.
        line: colour of the thin line from the column to a curve.

    Returns:
        areas of the names inside the axes, in points of the figure.
    """
    wall, floor = _at(axes, (axes.get_xlim()[0], axes.get_ylim()[0]))
    used = [_around(_at(axes, point)) for point in points]
    crowded: list[End] = []
    boxes: list[Box] = []
    for point, name, colour in ends:
        for dx, dy, side in _SIDES:
            at = _at(axes, point)
            width = 5.4 * len(name)
            left = at[0] + dx - {"left": 0.0, "center": width / 2, "right": width}[side]
            box = (left, at[1] + dy - 5, left + width, at[1] + dy + 5)
            if box[0] > wall and box[1] > floor and not any(_overlap(box, other) for other in (*used, *boxes)):
                boxes.append(box)
                axes.annotate(
                    name, point, (dx, dy), textcoords="offset points", color=colour, ha=side, va="center",
                    fontsize=8.5, fontweight="bold", annotation_clip=False,
                )  # fmt: skip
                break
        else:
            crowded.append((point, name, colour))
    _column(axes, crowded, line)
    return boxes


def _column(axes: Axes, ends: Sequence[End], line: str) -> None:
    """Write names to the right of the axes, ordered by height and kept apart, with a thin line to each curve."""
    low, high = (_at(axes, (axes.get_xlim()[0], y))[1] for y in axes.get_ylim())
    places = [(_at(axes, point)[1] - low) / (high - low) for point, _, _ in ends]
    for (point, name, colour), fraction in zip(ends, apart(places, NAME_STEP / (high - low)), strict=True):
        axes.annotate(
            name, point, (1.06, fraction), xycoords="data", textcoords="axes fraction", color=colour, va="center",
            fontsize=8.5, fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def _at(axes: Axes, point: tuple[float, float]) -> tuple[float, float]:
    """Convert data coordinates to points of the figure."""
    x, y = axes.transData.transform(point)
    return float(x) * 72 / axes.figure.dpi, float(y) * 72 / axes.figure.dpi


def _around(at: tuple[float, float]) -> Box:
    return at[0] - 4, at[1] - 4, at[0] + 4, at[1] + 4


def apart(places: Sequence[float], step: float) -> list[float]:
    """Move heights (0..1) as little as needed so that neighbours are at least `step` apart, in the same order."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + step)
    over = moved[order[-1]] - 1.0 if order else 0.0
    if over > 0:  # the topmost is outside the picture, so push down from above
        moved[order[-1]] = 1.0
        for after, before in itertools.pairwise(reversed(order)):
            moved[before] = min(moved[before], moved[after] - step)
    return moved


def place(axes: Axes, marks: Sequence[tuple[float, float, str]], colour: str, taken: Sequence[Box] = ()) -> None:
    """Write a load beside each marker where there is room; labels that would overlap are omitted.

    Args:
        axes: the axes, with their final limits.
        marks: x, y and text.
        colour: colour of the text.
        taken: areas already in use, in points of the figure.
    """
    points = [_at(axes, mark[:2]) for mark in marks]
    used = [*map(_around, points), *taken]
    for (x, y, text), at in zip(marks, points, strict=True):
        for dx, dy in _OFFSETS:
            width = 5.0 * len(text)
            left = at[0] + dx if dx > 0 else at[0] + dx - width
            box = (left, at[1] + dy - 1, left + width, at[1] + dy + 8)
            if not any(_overlap(box, other) for other in used):
                used.append(box)
                axes.annotate(
                    text, (x, y), (dx, dy), textcoords="offset points", ha="left" if dx > 0 else "right",
                    fontsize=7.5, color=colour,
                )  # fmt: skip
                break


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
