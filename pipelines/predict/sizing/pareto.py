"""Pareto front of points in two dimensions."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]], *, less_x: bool = False) -> list[int]:
    """Return the indices of the points that no other point beats, by ascending x. More is better; for x see `less_x`.

    Equal points are all on the front.

    Args:
        points: (x, y).
        less_x: a lower x is better (a latency).
    """
    sign = -1 if less_x else 1
    order = sorted(range(len(points)), key=lambda index: (-sign * points[index][0], -points[index][1]))
    found: list[int] = []
    best = float("-inf")
    for index in order:
        if points[index][1] > best or (found and points[index] == points[found[-1]]):
            found.append(index)
            best = points[index][1]
    return sorted(found, key=lambda index: points[index][0])
