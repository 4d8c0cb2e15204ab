"""Pictures of an answer: Pareto front, a day."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.document.blocks import Figure
from pipelines.document.canvas import DASHES, MARKERS, Theme, axis, plot
from pipelines.document.labels import beside
from pipelines.predict.sizing.answer import FleetOption
from pipelines.predict.sizing.instance import LoadOutcome
from pipelines.predict.sizing.pareto import front
from pipelines.predict.sizing.result import Day, Result

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

Point = tuple[float, float]
XOf = Callable[[LoadOutcome], float]


def pareto(result: Result, six: str) -> Figure:
    """Draw requests per second per GPU against TTFT, and against the speed for each user."""
    question = result.answer.question
    percent = f"P{question.percentile:g}"

    def draw(figure: Drawing, theme: Theme) -> None:
        left, right = figure.subplots(1, 2)
        axis(left, "Time to first token", f"TTFT {percent}, ms", "requests/s per GPU")
        _panel(left, result, theme, lambda seen: 1000 * seen.at(question.percentile)["ttft"], less_x=True)
        _limit(left, question.slo.ttft_ms, theme)
        axis(right, "Speed for each user", f"tokens/s per user (1 / ITL {percent})", "")
        _panel(right, result, theme, lambda seen: 1 / seen.at(question.percentile)["itl"], less_x=False)
        itl = question.slo.itl_ms
        _limit(right, None if itl is None else 1000 / itl, theme, side="left")

    best = result.answer.chosen
    return plot(
        "pareto",
        (7.2, 3.7),
        draw,
        title="Throughput per GPU against responsiveness",
        caption=(
            "Each line is one configuration from almost no load to its rate within the limits. Filled markers: no "
            f"other point is better in both (Pareto front). Ring: recommended ({best.label}). {six}"
        ),
        alt="; ".join(
            f"{option.label}: {option.per_gpu:.3g} requests/s per GPU at TTFT "
            f"{1000 * option.capacity.seen.at(question.percentile)['ttft']:.0f} ms"
            for option in result.answer.options[: len(result.ladders)]
        ),
        origin="modelled",
        png=True,
    )  # fmt: skip


def _panel(axes: Axes, result: Result, theme: Theme, x_of: XOf, *, less_x: bool) -> None:
    options = result.answer.options[: len(result.ladders)]
    curves = [_points(option, seen, x_of) for option, seen in zip(options, result.ladders, strict=True)]
    every = [point for points in curves for point in points]
    if not every:
        axes.set_axis_off()
        return
    best = {every[index] for index in front(every, less_x=less_x)}
    ends = []
    for index, (option, points) in enumerate(zip(options, curves, strict=True)):
        colour = theme.series(index)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.5, linestyle=DASHES[index % 8], zorder=2)
        for x, y in points:
            face = colour if (x, y) in best else theme["paper"]
            axes.plot([x], [y], marker=MARKERS[index % 8], markersize=5, color=colour, markerfacecolor=face, zorder=3)
        ends.append((points[-1], option.label, colour))
    x, y = curves[0][-1]
    axes.plot(
        [x], [y], marker="o", markersize=13, color=theme["ink"], markerfacecolor="none", markeredgewidth=1.4, zorder=4
    )
    axes.set_ylim(0, 1.18 * max(y for _, y in every))
    axes.set_xlim(0, 1.12 * max(x for x, _ in every))
    axes.figure.canvas.draw()
    if less_x:  # both panels use the same colours
        beside(axes, ends, every, theme["muted"])


def _points(option: FleetOption, seen: Sequence[LoadOutcome], x_of: XOf) -> list[Point]:
    found = [(x_of(one), one.rate / option.gpus) for one in seen]
    return [(x, y) for x, y in found if math.isfinite(x)]


def _limit(axes: Axes, value: float | None, theme: Theme, *, side: str = "right") -> None:
    if value is None or not axes.axison:
        return
    axes.set_xlim(right=max(axes.get_xlim()[1], 1.06 * value))
    axes.axvline(value, color=theme["bad"], linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "limit", (value, 1.0), (-3 if side == "right" else 3, -8), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha=side, color=theme["bad"], fontsize=7.5,
    )  # fmt: skip


def day_picture(result: Result, day: Day, six: str) -> Figure:
    """Draw the rate, the instances and the signal over a day."""
    moving, most = day.moving, int(day.fixed.ready.max())

    def draw(figure: Drawing, theme: Theme) -> None:
        top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.2, 0.8))
        top.plot(moving.hours, _smooth(moving.rate), color=theme["work"], linewidth=1)
        axis(top, "", "", "requests/s")
        middle.fill_between(moving.hours, moving.ready, step="mid", color=theme["work"], alpha=0.35, linewidth=0)
        both = moving.ready + moving.starting
        middle.fill_between(moving.hours, moving.ready, both, step="mid", color=theme["wait"], alpha=0.8, linewidth=0)
        middle.axhline(most, color=theme["ink"], linewidth=1, linestyle=(0, (4, 3)))
        middle.annotate(
            f"fixed fleet: {most}", (0, most), (3, -9), textcoords="offset points", fontsize=7.5, color=theme["ink"]
        )
        axis(middle, "", "", "instances")
        low.plot(moving.hours, moving.signal, color=theme["wait"], linewidth=0.8)
        low.axhline(1, color=theme["bad"], linewidth=1, linestyle=(0, (4, 3)))
        low.set_ylim(0, max(1.5, min(3.0, float(moving.signal.max()) * 1.05)))
        axis(low, "", "hour of the day", "signal / limit")
        for axes in (top, middle, low):
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, float(moving.hours[-1]))

    gpus = result.answer.chosen.gpus
    return plot(
        "day",
        (7.2, 5.0),
        draw,
        title="A day with autoscaling",
        caption=(
            f"{day.how}. Blue: instances that take requests; orange: starting. "
            f"{moving.instance_hours * gpus:,.0f} GPU-hours, fixed fleet {day.fixed.instance_hours * gpus:,.0f}; "
            f" {100 * moving.over:.2f} % versus {100 * day.fixed.over:.2f} % of requests over a limit. {six}"
        ),
        alt=f"Between {moving.ready.min()} and {moving.ready.max()} instances over the day, {moving.starts} starts.",
        origin="modelled",
        png=True,
    )


def _smooth(values: Any) -> Any:
    """Average over at least half a minute, so that the plot shows a line instead of a band."""
    import numpy as np

    width = max(1, len(values) // 480)
    return np.convolve(np.pad(values, width // 2, mode="edge"), np.ones(width) / width, mode="same")[
        width // 2 : width // 2 + len(values)
    ]
