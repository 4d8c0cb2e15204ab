"""Direct labels in plots: names beside the ends of curves, loads beside markers, none on top of another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.domain.benchmark import Level

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME_STEP = 11.0
"""Distance between two names one above the other, points."""

_OFFSETS = ((5, 6), (5, -12), (-5, 6), (-5, -12))
"""Where a load may stand, points from its marker; the sign of the first says on which side."""


def load_label(level: Level) -> str:
    """The load as short as it can be: "16", "4/s", "burst"."""
    if level.concurrency is not None:
        return str(level.concurrency)
    return f"{level.request_rate:g}/s" if level.request_rate is not None else level.arrival


def beside(axes: Axes, ends: Sequence[tuple[tuple[float, float], str, str]], line: str) -> None:
    """Write names in a column right of the axes, ordered by height and kept apart, with a thin line to each curve.

    Args:
        axes: with its final limits.
        ends: ((x, y) of the curve's right end, name, colour).
        line: colour of the thin line.
    """
    top = axes.transData.transform
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # points; before the layout, near enough
    low, high = (top((0, value))[1] for value in axes.get_ylim())
    places = [((top(point)[1] - low) / ((high - low) or 1)) for point, _, _ in ends]
    step = NAME_STEP / height
    for (point, name, colour), fraction in zip(ends, apart(places, step), strict=True):
        axes.annotate(
            name, point, (1.02, fraction), xycoords="data", textcoords="axes fraction", color=colour, va="center",
            fontsize=8.5, fontweight="bold", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def apart(places: Sequence[float], step: float) -> list[float]:
    """Move heights (0..1) as little as needed so that neighbours are at least `step` apart; the order stays."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + step)
    over = moved[order[-1]] - 1.0 if order else 0.0
    if over > 0:  # the topmost left the picture: push down from above
        moved[order[-1]] = 1.0
        for after, before in itertools.pairwise(reversed(order)):
            moved[before] = min(moved[before], moved[after] - step)
    return moved


def place(axes: Axes, marks: Sequence[tuple[float, float, str]], colour: str) -> None:
    """Write a load beside each marker where there is room; one that would cover another label is left out."""
    figure = axes.figure
    figure.canvas.draw()  # the layout decides where things are
    scale = figure.dpi / 72
    points = [tuple(value / scale for value in axes.transData.transform((x, y))) for x, y, _ in marks]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for (x, y), at, (_, _, text) in zip([mark[:2] for mark in marks], points, marks, strict=True):
        for dx, dy in _OFFSETS:
            width = 5.0 * len(text)
            left = at[0] + dx if dx > 0 else at[0] + dx - width
            box = (left, at[1] + dy - 1, left + width, at[1] + dy + 8)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                axes.annotate(
                    text, (x, y), (dx, dy), textcoords="offset points", ha="left" if dx > 0 else "right",
                    fontsize=7.5, color=colour,
                )  # fmt: skip
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
