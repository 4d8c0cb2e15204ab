"""Draw simulated runs: slots over time with the queue and latencies below, and curves against the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.document.blocks import Figure
from pipelines.document.canvas import Theme, axis, dash, marker, plain_log, plot
from pipelines.document.show import count
from pipelines.predict.simulator.interface import CONTEXT, EOS, GEN, NAMES, NOOP, Box, boxes, with_gaps

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing
    from pipelines.predict.simulator.interface import SimulatedRun

MAX_SLOTS = 12
"""Upper bound on slots drawn: more rows are not readable."""
ROLE = {CONTEXT: "wait", GEN: "work", EOS: "s3", NOOP: "muted"}
"""Colours of the cells."""
MIN_CELL = 4.0
"""Width of an iteration below which its tokens are not drawn separately, points."""
LETTER = 5.0
"""Width of a letter in a cell, points."""
LATENCY = {"ticks": ("ticks", 1.0), "s": ("ms", 1000.0)}
"""Format of latencies, by unit of time."""
WIDTH = 10.0
"""Size of the picture of the slots, inches."""


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run to draw.

    Attributes:
        name: e.g. "static".
        overhead: time a request spends on its way to the engine and back; part of its latencies.
    """

    name: str
    run: SimulatedRun
    slots: int
    overhead: float = 0.0

    @property
    def used(self) -> int:
        """Return the number of slots ever in use; they are the first ones, because the lowest free slot is taken."""
        assert self.run.stays is not None  # requested by the caller
        return int(self.run.stays.slot.max(initial=0)) + 1

    @property
    def rows(self) -> int:
        """Return the number of slots to draw: all if there are few, otherwise those in use."""
        return self.slots if self.slots <= MAX_SLOTS else min(self.used, MAX_SLOTS)


def slots_picture(runs: Sequence[DrawnRun], *, unit: str, until: float, caption: str) -> Figure:
    """Draw each slot over time, as in the classic drawing of batching, with the queue and all latencies below.

    The runs are simulated with iterations; `unit` is "ticks" or "s", `until` the end of the time axis.
    """
    rows = [run.rows for run in runs]
    heights = [max(0.24 * count, 0.5) for count in rows] + [0.7, 1.3]

    def draw(figure: Drawing, theme: Theme) -> None:
        _said(figure, caption, theme)
        panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        for run, height, axes in zip(runs, rows, panels[: len(runs)], strict=True):
            _slots(axes, run, height, until, theme)
        _legend(panels[0], theme)
        _queue(panels[-2], runs, until, theme)
        _latencies(panels[-1], runs, until, unit, theme)
        panels[-1].set_xlim(0, until)

    return plot(
        "slots",
        (WIDTH, sum(heights) + 0.5 * len(heights) + 0.4),
        draw,
        title="Slots over time",
        caption=caption,
        alt=_in_words(runs, unit),
        origin="modelled",
        png=True,
    )


def _said(figure: Drawing, caption: str, theme: Theme) -> None:
    """Write the caption above everything, because the picture is also shown on its own."""
    figure.suptitle(f"Simulated: {caption}", x=0.01, ha="left", fontsize=8.5, color=theme["muted"])


def _slots(axes: Axes, drawn: DrawnRun, count: int, until: float, theme: Theme) -> None:
    """Draw one row per slot, first slot on top; neighbouring cells of one request and kind form one box."""
    tiles = with_gaps(boxes(drawn.run), count, until)
    points = 72 * (WIDTH - 0.8) / until
    for kind, role in ROLE.items():
        of_kind = [box for box in tiles if box.kind == kind]
        face = "none" if kind == NOOP else theme[role]
        axes.bar(
            [box.start for box in of_kind], 0.84, [box.end - box.start for box in of_kind],
            [box.slot - 0.42 for box in of_kind], align="edge", color=face, linewidth=0.6,
            edgecolor=theme["grid"] if kind == NOOP else theme["paper"],
        )  # fmt: skip
    for box in tiles:
        _label(axes, box, min(box.end, until), points, theme)
    _tokens(axes, drawn.run, tiles, points, theme)
    axes.set_title(f"{drawn.name}{_of_slots(drawn)}")
    axes.set_yticks(range(count), [str(slot + 1) for slot in range(count)])
    axes.set_ylabel("slot")
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _of_slots(drawn: DrawnRun) -> str:
    if drawn.rows == drawn.slots:
        return ""
    first = f"first {drawn.rows} of " if drawn.rows < drawn.used else ""
    return f" ({first}{count(drawn.used, 'slot')}{' in use' if drawn.used < drawn.slots else ''})"


def _tokens(axes: Axes, run: SimulatedRun, tiles: Sequence[Box], points: float, theme: Theme) -> None:
    """Draw thin lines between the tokens of a box, if an iteration is wide enough for them to be seen."""
    assert run.iterations is not None  # requested by the caller
    starts = np.asarray(run.iterations.start)
    if not len(starts) or points * float(np.median(run.iterations.seconds)) < MIN_CELL:
        return
    marks = [
        (time, box.slot)
        for box in tiles
        if box.kind == GEN
        for time in starts[(starts > box.start) & (starts < box.end)].tolist()
    ]
    rows = np.array([slot for _, slot in marks], dtype=float)
    axes.vlines([time for time, _ in marks], rows - 0.42, rows - 0.26, color=theme["paper"], linewidth=0.5, alpha=0.7)
    axes.vlines([time for time, _ in marks], rows + 0.26, rows + 0.42, color=theme["paper"], linewidth=0.5, alpha=0.7)


def _label(axes: Axes, box: Box, end: float, points: float, theme: Theme) -> None:
    """Write the longest text that fits the visible part of a box; `points` is the width of a unit of time."""
    room = (end - box.start) * points
    word = NAMES[box.kind]
    number = "" if box.request is None else str(box.request + 1)
    texts = [f"{word} {number}", number] if box.kind == CONTEXT else [word, word[0]]
    text = next((text for text in texts if text and LETTER * len(text) + 2 <= room), None)
    if text is not None:
        ink = theme["muted"] if box.kind == NOOP else theme["paper"]
        at = (box.start + end) / 2, box.slot
        axes.text(*at, text, color=ink, fontsize=7.5, ha="center", va="center_baseline", clip_on=True)


def _legend(axes: Axes, theme: Theme) -> None:
    entries = (("prompt", CONTEXT), ("a token", GEN), ("the last token", EOS), ("nothing", NOOP))
    for place, (text, kind) in zip((0.46, 0.61, 0.745, 0.91), entries, strict=True):
        axes.annotate(
            f"{'□' if kind == NOOP else '■'} {NAMES[kind]}: {text}", (place, 1.0), (0, 5), color=theme[ROLE[kind]],
            xycoords="axes fraction", textcoords="offset points", fontsize=8.5,
        )  # fmt: skip


def _queue(axes: Axes, runs: Sequence[DrawnRun], until: float, theme: Theme) -> None:
    for index, drawn in enumerate(runs):
        iterations = drawn.run.iterations
        assert iterations is not None  # requested by the caller
        seen = np.asarray(iterations.start) < until
        times = [0.0, *np.asarray(iterations.start)[seen], min(until, drawn.run.end)]
        waiting = [0, *np.asarray(iterations.queue)[seen]]
        axes.plot(
            times, [*waiting, waiting[-1]], drawstyle="steps-post", color=theme.series(index),
            linestyle=dash(index), linewidth=1.6, label=drawn.name,
        )  # fmt: skip
    axis(axes, "Queue", "", "requests")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _latencies(axes: Axes, runs: Sequence[DrawnRun], until: float, unit: str, theme: Theme) -> None:
    """Draw a point per request and latency: TTFT when its first token came, E2E when its last one came."""
    latency, scale = LATENCY[unit]
    for index, drawn in enumerate(runs):
        rows, colour = drawn.run.requests, theme.series(index)
        kinds = (("TTFT", np.asarray(rows.first_token), "o", "none"), ("E2E", np.asarray(rows.end), "s", colour))
        for name, times, form, face in kinds:
            seen = times <= until  # NaN (did not happen) compares as false
            axes.plot(
                times[seen], scale * (times - np.asarray(rows.arrival) + drawn.overhead)[seen], form, color=colour,
                markersize=4, markerfacecolor=face, label=f"{drawn.name}, {name}",
            )  # fmt: skip
    axis(
        axes, "Latency of each request, at the time its first and its last token came", f"time, {unit}",
        f"latency, {latency}",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="best", ncols=2)


def _in_words(runs: Sequence[DrawnRun], unit: str) -> str:
    parts = [f"{drawn.name}: {count(int(np.isfinite(drawn.run.requests.end).sum()), 'request')} done" for drawn in runs]
    return f"Activity of each slot over time in {unit}, one panel per policy. " + "; ".join(parts) + "."


@dataclass(frozen=True, slots=True)
class Point:
    """One load of a curve.

    Attributes:
        load: concurrency, or requests per unit of time.
        requests: per second, or per 1,000 ticks.
        tokens: output tokens, per the same unit.
        ttft: (p50, p95), or None when no request got a first token.
        e2e: (p50, p95), or None when no request finished.
    """

    load: float
    requests: float
    tokens: float
    ttft: tuple[float, float] | None
    e2e: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """A policy over several loads."""

    name: str
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self)


def curves_picture(curves: Sequence[PolicyCurve], *, unit: str, rate_unit: str, load: str, caption: str) -> Figure:
    """Draw throughput, TTFT and E2E against the load, one line per policy, all over the same loads."""
    latency, scale = LATENCY[unit]

    def draw(figure: Drawing, theme: Theme) -> None:
        _said(figure, f"{caption}; line: median, upper edge of the band: p95", theme)
        panels = figure.subplots(1, 3)
        loads = [point.load for curve in curves for point in curve.points]
        for axes in panels:
            plain_log(axes, "x", loads)
            axes.set_xticks(sorted(set(loads)))
            axes.minorticks_off()
        for index, curve in enumerate(curves):
            _line(panels[0], index, [(p.load, p.tokens) for p in curve.points], theme, curve.name)
            _band(panels[1], index, [(p.load, p.ttft) for p in curve.points], scale, theme)
            _band(panels[2], index, [(p.load, p.e2e) for p in curve.points], scale, theme)
        axis(panels[0], "Throughput", load, f"output tokens per {rate_unit}")
        axis(panels[1], "Time to first token", load, f"{latency}, p50 and p95")
        axis(panels[2], "End to end", load, f"{latency}, p50 and p95")
        for axes in panels:
            axes.set_ylim(bottom=0)
        panels[0].legend(frameon=False, fontsize=8.5, loc="best")

    return plot(
        "curves",
        (WIDTH, 3.3),
        draw,
        title=f"Throughput and latency against {load}",
        caption=caption,
        alt=_curves_in_words(curves, rate_unit, load),
        origin="modelled",
        png=True,
    )


def _line(axes: Axes, index: int, points: Sequence[tuple[float, float]], theme: Theme, name: str = "") -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(
        xs, ys, color=theme.series(index), linestyle=dash(index), marker=marker(index), markersize=4.5,
        linewidth=1.6, label=name,
    )  # fmt: skip


def _band(
    axes: Axes, index: int, points: Sequence[tuple[float, tuple[float, float] | None]], scale: float, theme: Theme
) -> None:
    bands = [(x, both) for x, both in points if both is not None]
    xs = [x for x, _ in bands]
    low, high = [scale * both[0] for _, both in bands], [scale * both[1] for _, both in bands]
    axes.fill_between(xs, low, high, color=theme.series(index), alpha=0.15, linewidth=0)
    _line(axes, index, list(zip(xs, low, strict=True)), theme)


def _curves_in_words(curves: Sequence[PolicyCurve], rate_unit: str, load: str) -> str:
    parts = [
        f"{curve.name}: {curve.points[-1].tokens:,.4g} output tokens per {rate_unit} at {curve.points[-1].load:g}"
        for curve in curves
    ]
    return f"Three line plots against {load}, one line per policy. At the highest load, " + "; ".join(parts) + "."
