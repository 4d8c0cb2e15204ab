"""Plots across formats: throughput against latency, accuracy, sizes. Each caption states the `run_label` facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.compare import in_points
from eval.verdict import Verdict
from pipelines.document.blocks import Figure
from pipelines.document.canvas import VALUE, Theme, axis, beside, dash, marker, place, plain_log, plot
from pipelines.document.show import number, span
from pipelines.domain.benchmark import LoadPoint, Summary
from pipelines.domain.metrics import AT_POINT, LATENCY, METRICS, REQUEST_RATE, TOKEN_RATE
from pipelines.domain.units import MIB
from pipelines.report.data import BenchmarkRun, FormatReport, Workload, run_label

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

# Definitions of the report's terms, in one place so that Markdown, HTML and the terminal agree.

_SHOWN = tuple(metric for metric in METRICS if metric.unit in (LATENCY, TOKEN_RATE, REQUEST_RATE))

CONVENTIONS: tuple[tuple[str, str], ...] = (
    ("measured", "Taken from a run on the machine given with it. Nothing in this report is estimated unless it is "
     "marked as modelled; what was not measured is listed as missing."),
    ("ISL, OSL", "Input and output length of a request in tokens, as the engine counts them: mean (min..max)."),
    *((metric.title, metric.definition) for metric in _SHOWN),
    ("tokens/s per user", "1 / ITL: how fast one answer streams."),
    ("p50, p90, p95, p99", "Percentiles over requests, linear between neighbours (numpy's default; trtllm-bench takes "
     "the nearest lower value)."),
    ("closed loop, open loop", "Concurrency keeps a fixed number of requests in flight; a request rate sends on "
     "schedule regardless of the server."),
    ("client-limited", "The load generator itself was the bottleneck. The throughput is a lower bound; latencies "
     "include waiting in the load generator. Such a load, or one that was cut short, is shown but never chosen."),
    ("loss, verdict", "Loss is in percent of the 16-bit baseline's accuracy, or in points of all questions, over the "
     "same questions. GO: it is proven to be below the margin; NO-GO: above; UNDECIDED: neither. "
     "NOT MEASURED: the baseline does not beat guessing by more than the margin, so no loss could show."),
)  # fmt: skip


def what_was_asked(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tasks of comparisons with their worked examples and numbers of questions."""
    tasks: dict[str, list[int]] = {}
    for row in rows:
        tasks.setdefault(f"{row['task']}, {row['shots']}", []).append(row["questions"])
    return "; ".join(f"{task}, {span(questions)} questions" for task, questions in tasks.items())


Point = tuple[float, float, LoadPoint]
Place = Callable[[Summary], tuple[float, float] | None]
"""Where a load stands in a plot."""
WIDE = (7.2, 3.9)


def throughput_latency(workload: Workload, order: Sequence[str], name: str) -> Figure | None:
    """Plot system throughput against speed per user, the usual picture for sizing; None without streaming."""
    curves = [(run, points) for run in workload.runs if (points := _points(run, _user_rate))]
    if not curves:
        return None

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        axis(axes, "", "tokens/s per user (1 / median ITL)  →  faster for each user", "output tokens/s of the system")
        _curves(axes, curves, order, theme, _user_rate)

    return plot(
        name,
        WIDE,
        draw,
        title="System throughput against speed per user",
        caption=f"Each marker is one load; up and to the right is better. {_about(curves)}",
        alt=_in_words(curves, "output tokens/s", "tokens/s per user"),
        png=True,
    )


def ttft_throughput(workload: Workload, order: Sequence[str], name: str) -> Figure | None:
    """Plot time to first token against throughput, medians with whiskers to p95; None without values."""
    curves = [(run, points) for run in workload.runs if (points := _points(run, _first_token))]
    if not curves:
        return None

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        plain_log(axes, "y", [y for _, points in curves for _, y, _ in points])
        axis(axes, "", "output tokens/s of the system", "time to first token, ms (log)")
        if (limit := curves[0][0].result.slo.ttft_ms) is not None:
            axes.axhline(limit, color=theme["bad"], linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                f"limit {limit:g} ms", (0.0, limit), (3, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", color=theme["bad"], fontsize=7.5,
            )  # fmt: skip
        for run, points in curves:
            for x, y, level in points:
                p95 = level.summary.ttft_s.p95
                axes.plot(
                    [x, x],
                    [y, 1000 * p95 if p95 else y],
                    color=theme.series(_index(run, order)),
                    linewidth=1,
                    alpha=0.55,
                )
        _curves(axes, curves, order, theme, _first_token)

    return plot(
        name,
        WIDE,
        draw,
        title="Time to first token against throughput",
        caption=f"Markers are medians, whiskers reach up to p95; down and to the right is better. {_about(curves)}",
        alt=_in_words(curves, "ms to the first token", "output tokens/s"),
    )


def _points(run: BenchmarkRun, place: Place) -> list[Point]:
    """Return (x, y, level) of every level that has them."""
    levels = [level for level in run.result.levels if level.summary.requests]
    return [(*point, level) for level in levels if (point := place(level.summary))]


def _user_rate(summary: Summary) -> tuple[float, float] | None:
    itl = summary.itl_s.p50
    return (1 / itl, summary.output_tokens_per_s) if itl else None


def _first_token(summary: Summary) -> tuple[float, float] | None:
    ttft = summary.ttft_s.p50
    return (summary.output_tokens_per_s, 1000 * ttft) if ttft else None


def _index(run: BenchmarkRun, order: Sequence[str]) -> int:
    return list(order).index(run.result.precision)


def _curves(
    axes: Axes, curves: Sequence[tuple[BenchmarkRun, list[Point]]], order: Sequence[str], theme: Theme, point: Place
) -> None:
    """Draw lines with a marker per level: hollow if the client was the bottleneck, crossed if it was cut short.

    The predictions for the same loads are thin and dotted; `point` says where they are.
    """
    for run, _ in curves:
        modelled = run.modelled.levels if run.modelled else {}
        predicted = [modelled.get(level.requests_file) for level in run.result.levels]
        places = [at for each in predicted if each is not None and (at := point(each))]
        axes.plot(
            [x for x, _ in places], [y for _, y in places], color=theme.series(_index(run, order)), linewidth=1,
            linestyle=(0, (1, 2)), marker=".", markersize=4, zorder=1,
        )  # fmt: skip
    ends, marks = [], []
    for run, points in curves:
        index = _index(run, order)
        colour = theme.series(index)
        xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
        axes.plot(xs, ys, color=colour, linewidth=1.6, linestyle=dash(index), zorder=2)
        for x, y, level in points:
            face = theme["paper"] if level.client.bottleneck else colour
            axes.plot(
                [x], [y], marker=marker(index), markersize=6, color=colour, markerfacecolor=face,
                markeredgewidth=1.3, zorder=3, gid=VALUE + _value(run, level),
            )  # fmt: skip
            if not level.complete:
                axes.plot([x], [y], marker="x", markersize=11, color=theme["bad"], markeredgewidth=1.4, zorder=4)
            marks.append((x, y, level.label))
        ends.append((max(points, key=lambda point: point[0])[:2], run.result.precision, colour))
    axes.margins(0.1)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.04 * axes.get_xlim()[1])
    axes.figure.canvas.draw()  # computes the layout, which determines the positions below
    named = beside(axes, ends, [mark[:2] for mark in marks], theme["muted"])
    place(axes, marks, theme["muted"], named)


def _value(run: BenchmarkRun, level: LoadPoint) -> str:
    rate, *times = ((each, number(each.shown(each.of(level.summary)))) for each in AT_POINT)
    latencies = [f"{each.narrow} {value} {each.metric.unit.shown}" for each, value in times]
    text = ", ".join([f"{rate[1]} {rate[0].title}", *latencies])
    limited = "; the load generator was the bottleneck" if level.client.bottleneck else ""
    return f"{run.result.precision}, {level.load}: {text}{limited}{'' if level.complete else '; cut short'}"


def _about(curves: Sequence[tuple[BenchmarkRun, list[Point]]]) -> str:
    """Return what numbers, marks and dotted lines mean, and what was measured."""
    runs, levels = [run for run, _ in curves], [level for _, points in curves for _, _, level in points]
    closed = any(level.concurrency is not None for level in levels)
    text = "Small numbers: concurrency. " if closed else "Small numbers: requested requests/s. "
    if any(level.client.bottleneck for level in levels):
        text += "Hollow: the load generator was the bottleneck. "
    if any(not level.complete for level in levels):
        text += "Crossed: cut short. "
    if why := "; ".join(dict.fromkeys(f"{run.result.precision} {run.modelled.why}" for run in runs if run.modelled)):
        text += f"Dotted: modelled, not measured ({why}). "
    return f"{text}Measured: {run_label(runs)}; engine {runs[0].result.engine}."


def _in_words(curves: Sequence[tuple[BenchmarkRun, list[Point]]], y_unit: str, x_unit: str) -> str:
    parts = []
    for run, points in curves:
        x, y, level = points[-1]
        parts.append(f"{run.result.precision}: {number(y)} {y_unit} at {number(x)} {x_unit} ({level.load})")
    return "Line plot, one line per format. At the last load, " + "; ".join(parts) + "."


_VERDICT_COLOURS = {Verdict.GO: "work", Verdict.NO_GO: "bad", Verdict.UNDECIDED: "wait", Verdict.NOT_MEASURED: "wait"}


def accuracy_change(formats: Sequence[FormatReport]) -> Figure | None:
    """Plot the change in accuracy with bounds and verdict per format; None if nothing was paired with a baseline."""
    rows = [item.accuracy.row for item in formats if item.accuracy and item.accuracy.row]
    if not rows:
        return None
    several = len({row["model"] for row in rows}) > 1
    names = [f"{row['model']} {row['format']}" if several else str(row["format"]) for row in rows]
    if len({row["task"] for row in rows}) > 1:
        names = [f"{name}, {row['task']}" for name, row in zip(names, rows, strict=True)]
    questions = what_was_asked(rows)
    widest = 100 * max(row["margin"] for row in rows)

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        axes.axvline(0, color=theme["ink"], linewidth=0.9)
        for at, row in enumerate(rows):
            margin = -100 * row["margin"]
            axes.plot([margin] * 2, [at - 0.5, at + 0.5], color=theme["bad"], linewidth=1, linestyle=(0, (4, 3)))
            middle = 100 * row["difference"]
            colour = theme[_VERDICT_COLOURS[row["verdict"]]]
            if row["loss_most"] is not None:
                ends = [-100 * row["loss_most"], -100 * row["loss_least"]]
                axes.plot(ends, [at, at], color=colour, linewidth=2.2, solid_capstyle="butt")
            bounds = "not bounded" if row["loss_most"] is None else f"{ends[0]:+.2f} to {ends[1]:+.2f}"
            value = f"{VALUE}{names[at]}: {middle:+.2f} points ({bounds}), {row['verdict']}"
            axes.plot([middle], [at], marker="o", color=colour, markersize=6, gid=value)
            # Beside the axes: on a line of zero or of the margin, the number would look struck through.
            axes.annotate(
                f"{middle:+.2f}  {row['verdict']}",
                (1.01, at),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0, labelcolor=theme["ink"])
        axes.set_ylim(len(rows) - 0.5, -0.7)
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, -2 * widest) * 1.03, max(high, widest))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("change in accuracy against the 16-bit baseline, percentage points")

    return plot(
        "accuracy",
        (7.2, 0.9 + 0.42 * len(rows)),
        draw,
        title="Change in accuracy by format",
        caption=(
            f"Dot: change; bar: its bounds, each wrong in at most {100 * rows[0]['false_go']:g} % of cases; dashed: "
            f"the margin ({in_points(rows[0]['margin'])} lost). "
            f"Measured: {questions}, engine {rows[0]['engine']}."
        ),
        alt="Change in accuracy in points. "
        + "; ".join(
            f"{label} {100 * row['difference']:+.2f}, {row['verdict']}" for label, row in zip(names, rows, strict=True)
        )
        + ".",
    )


def sizes(formats: Sequence[FormatReport]) -> Figure | None:
    """Plot engine size on disk and peak memory during evaluation, per format; None if no engine was built."""
    rows = [item for item in formats if (build := item.artifact("build")) and build.facts.get("engine_bytes")]
    if not rows:
        return None
    several = len({item.model for item in rows}) > 1
    names = [item.label if several else item.variant for item in rows]
    disk = [float(artifact.facts["engine_bytes"]) / MIB for item in rows if (artifact := item.artifact("build"))]
    evaluated = [item.artifact("evaluate") for item in rows]
    memory = [each.peak_memory_bytes / MIB if each and each.peak_memory_bytes else None for each in evaluated]
    panels = [("Engine on disk, MiB", disk)]
    if any(value is not None for value in memory):
        panels.append(("Peak memory of the evaluating process, MiB", [value or 0.0 for value in memory]))

    def draw(figure: Drawing, theme: Theme) -> None:
        for axes, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.barh(range(len(rows)), values, height=0.58, color=theme["work"])
            for at, value in enumerate(values):
                text = number(value) if value else "not measured"
                axes.annotate(text, (value, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set_title(title)
            axes.set_yticks(range(len(rows)), names if axes is figure.axes[0] else [""] * len(rows))
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xlim(0, 1.2 * max(values))
            axes.set_xticks([])
            axes.tick_params(axis="y", length=0, labelcolor=theme["ink"])
            axes.grid(visible=False)
            axes.spines[["bottom", "left"]].set_visible(False)

    described = "; ".join(f"{label} {number(value)} MiB" for label, value in zip(names, disk, strict=True))
    return plot(
        "sizes",
        (7.2, 0.6 + 0.34 * len(rows)),
        draw,
        title="Engine size and memory by format",
        caption=(
            "Engine: bytes of the engine's files. Memory: highest resident memory of the whole process during the "
            "evaluation, libraries included."
        ),
        alt=f"Bars of the engines' sizes on disk: {described}.",
        origin="recorded",
    )
