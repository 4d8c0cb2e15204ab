"""Plots of one benchmark: distributions of TTFT and ITL by load, and the timeline of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.document.blocks import Figure
from pipelines.document.canvas import Theme, axis, plain_log, plot
from pipelines.document.show import count
from pipelines.domain.benchmark import LoadPoint
from pipelines.domain.summary import RequestColumns, ordered, percentile
from pipelines.report.data import BenchmarkRun, run_label

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

MAX_STEPS = 250
"""Maximum number of points of a distribution's curve: more are not visible and make the page larger."""

MAX_ROWS = 64
"""Maximum number of requests in a timeline."""

Curve = tuple[str, list[float]]


def distributions(run: BenchmarkRun, name: str) -> Figure | None:
    """Plot the share of requests at or below a TTFT and an ITL, one curve per load; None without records."""
    ttft = [(level.label, _values(run, level, RequestColumns.ttft)) for level in run.result.levels]
    itl = [(level.label, _values(run, level, RequestColumns.itl)) for level in run.result.levels]
    panels = [("Time to first token", ttft), ("Inter-token latency", itl)]
    panels = [(title, [curve for curve in curves if curve[1]]) for title, curves in panels]
    panels = [(title, curves) for title, curves in panels if curves]
    if not panels:
        return None

    def draw(figure: Drawing, theme: Theme) -> None:
        for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _cumulative(axes, curves, theme)
            axis(axes, title, "ms (log)", "share of requests, %" if axes is figure.axes[0] else "")

    medians = (
        f"{title}, medians: " + ", ".join(f"{label}: {percentile(values, 0.5):.3g} ms" for label, values in curves)
        for title, curves in panels
    )
    return plot(
        name,
        (7.2, 2.9),
        draw,
        title=f"{run.result.precision}: distribution of TTFT and ITL by load",
        caption=(
            "Each curve is one load, darker for higher loads; its height is the share of requests at or below a value. "
            f"Measured: {run_label([run])}."
        ),
        alt="Cumulative distributions, one curve per load. " + " ".join(f"{text}." for text in medians),
    )


def _values(run: BenchmarkRun, level: LoadPoint, latency: Callable[[RequestColumns], Any]) -> list[float]:
    """Return the latencies of a level's requests that its table counts, in milliseconds, ascending."""
    requests, window = run.requests.get(level.requests_file, (None, None))
    if requests is None or window is None:
        return []
    counted = requests.fine() & (requests.due >= window[0]) & (requests.due < window[1])
    return [value / 1e6 for value in ordered(latency(requests)[counted]) if value > 0]


def _cumulative(axes: Axes, curves: Sequence[Curve], theme: Theme) -> None:
    plain_log(axes, "x", [value for _, values in curves for value in (values[0], values[-1])])
    axes.set_ylim(0, 102)
    axes.set_yticks([0, 25, 50, 75, 90, 100])
    count = len(curves)
    for index, (label, values) in enumerate(curves):
        xs, ys = steps(values)
        strength = 0.35 + 0.65 * (index + 1) / count
        axes.plot(xs, ys, color=theme["work"], alpha=strength, linewidth=1.5, drawstyle="steps-post")
        height = (index + 0.7) / (count + 0.4)
        at = values[min(int(height * len(values)), len(values) - 1)]
        axes.annotate(
            label, (at, 100 * height), (3, -3), textcoords="offset points", fontsize=8, fontweight="bold",
            color=theme["ink"],
        )  # fmt: skip


def steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the cumulative distribution of ascending values in percent, thinned to `MAX_STEPS` points.

    Both ends are kept:

    [1, 2, 4, 8] -> x 1 1 2 4 8, y 0 25 50 75 100.
    """
    count = len(values)
    take = range(count) if count <= MAX_STEPS else [round(i * (count - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)]
    return [values[0], *(values[i] for i in take)], [0.0, *(100 * (i + 1) / count for i in take)]


def timeline(run: BenchmarkRun, level: LoadPoint, name: str) -> Figure | None:
    """Plot one row per request from its scheduled start to its last token; None without records."""
    requests, _ = run.requests.get(level.requests_file, (None, None))
    if requests is None or not len(requests.due):
        return None
    assert requests.index is not None
    order = np.lexsort((requests.index, requests.due))
    drawn, fine = order[:MAX_ROWS], requests.fine()
    columns = [
        ((each - requests.due.min()) / 1e9).tolist() for each in (requests.due, requests.first_token, requests.end)
    ]

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        for row, place in enumerate(drawn):
            _bar(axes, row, [column[place] for column in columns], theme, fine=fine[place])
        axis(axes, "", "seconds since the first request", "request")
        axes.set_ylim(len(drawn), -1)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        for x, text, role in ((0.0, "waiting for the first token", "wait"), (0.3, "decoding", "work")):
            axes.annotate(
                f"■ {text}", (x, 1.0), (0, 5), xycoords="axes fraction", textcoords="offset points",
                color=theme[role], fontsize=8.5, fontweight="bold",
            )  # fmt: skip

    failed = int((~fine[drawn]).sum())
    part = f"the first {len(drawn)} of {len(order)}" if len(drawn) < len(order) else f"all {len(order)}"
    return plot(
        name,
        (7.2, 0.9 + 0.052 * max(len(drawn), 20)),
        draw,
        title=f"{run.result.precision}: requests over time at {level.load}",
        caption=(
            f"One row per request ({part}, warm-up included), in the order they were due. Waiting: queue and prefill. "
            f"{'Crosses: failed. ' if failed else ''}Measured: {run_label([run], [level])}."
        ),
        alt=f"Timeline of {count(len(drawn), 'request')} at {level.load}: waiting for the first token, then decoding; "
        f"{failed} failed.",
    )


def _bar(axes: Axes, row: int, times: Sequence[float], theme: Theme, *, fine: bool) -> None:
    begin, first, end = times
    first = end if math.isnan(first) else first
    axes.barh(row, first - begin, left=begin, height=0.72, color=theme["wait"], linewidth=0)
    if end > first:
        axes.barh(row, end - first, left=first, height=0.72, color=theme["work"], linewidth=0)
    if not fine:
        axes.plot([end], [row], marker="x", color=theme["bad"], markersize=5, markeredgewidth=1.4, clip_on=False)
