"""Draw one picture per cell: throughput, latencies and accuracy over the nights, with the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.document.blocks import Figure
from pipelines.document.canvas import DASHES, MARKERS, Theme, plot
from pipelines.document.show import count
from pipelines.domain.metrics import TRENDS
from pipelines.nightly.record import Record
from pipelines.nightly.shown import scale, shown, title
from pipelines.nightly.verdict import Series, metrics_of

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

SHOWN_NIGHTS = 60
_PANELS = tuple(figure.key for figure in TRENDS)
Line = tuple[str, list[float | None], Series | None]


def cell_trend(record: Record, lines: Sequence[Series], name: str) -> Figure | None:
    """Draw the trend of one cell; return None if none of its metrics is judged.

    Args:
        record: tonight's line.
        lines: its judged series.
        name: name of the file.
    """
    if not lines:
        return None
    nights = lines[0].nights[-SHOWN_NIGHTS:]
    panels = [(base, found) for base in _PANELS if (found := _lines(base, record, lines, nights))]
    if not panels:
        return None

    def draw(figure: Drawing, theme: Theme) -> None:
        rows = (len(panels) + 1) // 2
        grid = figure.subplots(rows, 2, squeeze=False)
        for place in range(2 * rows):
            axes = grid[place // 2][place % 2]
            if place < len(panels):
                _panel(axes, *panels[place], nights, theme)
            else:
                axes.set_axis_off()

    loads = ", ".join(str(load["load"]) for load in record.measurements[-1])
    six = (
        f"model {record.model}; precision {record.precision}; ISL {_mean(record, 'isl')}; OSL {_mean(record, 'osl')}; "
        f"{loads}; TP {record.tp_size}"
    )
    return plot(
        name,
        (7.2, 2.1 * ((len(panels) + 1) // 2)),
        draw,
        title=record.cell,
        caption=(
            f"{count(len(nights), 'night')} on {record.machine_class}. Dashed: limit beyond which tonight counts as "
            f"worse. Cross: judged worse. Measured: {six}; engine {record.engine}."
        ),
        alt=f"Trend of {record.cell}: "
        + "; ".join(_in_words(line) for line in lines if line.metric.split()[0] in _PANELS),
    )


def _lines(base: str, record: Record, lines: Sequence[Series], nights: Sequence[Record]) -> list[Line]:
    """Return (load, values over the nights shown, series) of one panel."""
    if base == "accuracy":
        return [("", [metrics_of(night).get("accuracy") for night in nights], None)] if record.accuracy else []
    found: list[Line] = []
    for line in lines:
        if line.metric.split(" at ")[0] == base:
            found.append((line.metric.partition(" at ")[2], list(line.values[-len(nights) :]), line))
    return found


def _panel(axes: Axes, base: str, lines: Sequence[Line], nights: Sequence[Record], theme: Theme) -> None:
    factor = scale(base)
    for index, (load, values, line) in enumerate(lines):
        points = [(x, factor * value) for x, value in enumerate(values) if value is not None]
        colour = theme.series(index)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.3, linestyle=DASHES[index % 8],
            marker=MARKERS[index % 8], markersize=3.2, label=load or None,
        )  # fmt: skip
        if line is None:
            continue
        limit = line.judged[-1].limit
        if limit is not None:
            axes.axhline(factor * limit, color=theme["bad"], linewidth=0.8, linestyle=(0, (4, 3)))
        bad = [(x, y) for x, y in points if line.judged[len(line.judged) - len(values) + x].state == "worse"]
        axes.plot([x for x, _ in bad], [y for _, y in bad], linestyle="", marker="x", color=theme["bad"], markersize=7)
    axes.set_title(title(base))
    axes.margins(x=0.03, y=0.15)
    if base == "accuracy":
        shares = [100 * value for _, values, _ in lines for value in values if value is not None]
        axes.set_ylim(min(shares) - 1, min(max(shares) + 1, 100.2))
    else:
        axes.set_ylim(bottom=0)
    _dates(axes, nights)
    if len(lines) > 1:
        axes.legend(fontsize=6.5, frameon=False, labelcolor=theme["muted"], loc="best")


def _dates(axes: Axes, nights: Sequence[Record]) -> None:
    """Label at most four dates on the axis."""
    last = len(nights) - 1
    ticks = sorted({round(last * part / 3) for part in range(4)})
    axes.set_xticks(ticks, [nights[tick].at[5:10] for tick in ticks])


def _mean(record: Record, name: str) -> str:
    values = [float(load[name]) for load in record.measurements[-1] if load[name] is not None]
    return f"{sum(values) / len(values):.0f}" if values else "–"


def _in_words(line: Series) -> str:
    before = line.judged[-1].before
    was = f", {shown(line.metric, before)} before" if before is not None else ""
    return f"{title(line.metric)} {shown(line.metric, line.values[-1])}{was}"
