"""Place labels in plots without overlaps: names beside the ends of curves, loads beside markers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes

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
        points: every marker, so that no name covers one.
        line: colour of the thin line from the column to a curve.

    Returns:
        areas of the names inside the axes, in points of the figure.
    """
    floor = _at(axes, (axes.get_xlim()[0], axes.get_ylim()[0]))[1]
    used = [_around(_at(axes, point)) for point in points]
    crowded: list[End] = []
    boxes: list[Box] = []
    for point, name, colour in ends:
        for dx, dy, side in _SIDES:
            box = _name_box(_at(axes, point), len(name), dx, dy, side)
            if box[1] > floor and not any(_overlap(box, other) for other in (*used, *boxes)):
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


def _name_box(at: tuple[float, float], letters: int, dx: float, dy: float, side: str) -> Box:
    width = 5.4 * letters
    left = at[0] + dx - {"left": 0.0, "center": width / 2, "right": width}[side]
    return left, at[1] + dy - 5, left + width, at[1] + dy + 5


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
    """Return the area covered by a marker."""
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
