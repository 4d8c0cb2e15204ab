"""The answer as a report, built from the blocks that all reports share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.document.blocks import Block, Callout, Card, Column, Document, Figure, Section, Table, Terms, left, right
from pipelines.document.canvas import Theme, axis, beside, dash, marker, plot
from pipelines.document.show import NONE, count, number
from pipelines.predict.sizing.answer import FleetOption, refusals
from pipelines.predict.sizing.instance import LoadOutcome
from pipelines.predict.sizing.question import Question
from pipelines.predict.sizing.result import Day, Result
from pipelines.predict.sizing.words import (
    answer_terms,
    binds,
    day_lines,
    fleet_text,
    length_text,
    limits_text,
    question_terms,
    trial_text,
    whole,
)

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

# Pareto front of points in two dimensions.


def front(points: Sequence[tuple[float, float]], *, less_x: bool = False) -> list[int]:
    """Return the indices of the points (x, y) that no other point beats, by ascending x.

    More is better; with `less_x` a lower x is (a latency). Equal points are all on the front.
    """
    sign = -1 if less_x else 1
    order = sorted(range(len(points)), key=lambda index: (-sign * points[index][0], -points[index][1]))
    indexes: list[int] = []
    best = float("-inf")
    for index in order:
        if points[index][1] > best or (indexes and points[index] == points[indexes[-1]]):
            indexes.append(index)
            best = points[index][1]
    return sorted(indexes, key=lambda index: points[index][0])


# Pictures of an answer: Pareto front, a day.

XOf = Callable[[LoadOutcome], float]


def pareto(result: Result, run_label: str) -> Figure:
    """Draw requests per second per GPU against TTFT, and against the speed for each user."""
    question = result.answer.question
    percent = f"P{question.percentile:g}"

    def draw(figure: Drawing, theme: Theme) -> None:
        left, right = figure.subplots(1, 2)
        axis(left, "Time to first token", f"TTFT {percent}, ms", "requests/s per GPU")
        slo, itl = question.slo, question.slo.itl_ms
        _panel(left, result, theme, lambda seen: 1000 * seen.at(question.percentile)["ttft"], slo.ttft_ms, less_x=True)
        axis(right, "Speed for each user", f"tokens/s per user (1 / ITL {percent})", "")
        least = None if itl is None else 1000 / itl
        _panel(right, result, theme, lambda seen: 1 / seen.at(question.percentile)["itl"], least, less_x=False)

    best = result.answer.chosen
    return plot(
        "pareto",
        (7.2, 3.7),
        draw,
        title="Throughput per GPU against responsiveness",
        caption=(
            "Each line is one configuration from almost no load to its rate within the limits. Filled markers: no "
            f"other point is better in both (Pareto front). Ring: recommended ({best.label}). {run_label}"
        ),
        alt="; ".join(
            f"{option.label}: {option.per_gpu:.3g} requests/s per GPU at TTFT "
            f"{1000 * option.capacity.seen.at(question.percentile)['ttft']:.0f} ms"
            for option in result.answer.options[: len(result.ladders)]
        ),
        origin="modelled",
        png=True,
    )  # fmt: skip


def _panel(axes: Axes, result: Result, theme: Theme, x_of: XOf, limit: float | None, *, less_x: bool) -> None:
    options = result.answer.options[: len(result.ladders)]
    curves = [
        [(x, one.rate / option.gpus) for one in seen if math.isfinite(x := x_of(one))]
        for option, seen in zip(options, result.ladders, strict=True)
    ]
    every = [point for points in curves for point in points]
    if not every:
        axes.set_axis_off()
        return
    best = {every[index] for index in front(every, less_x=less_x)}
    ends = []
    for index, (option, points) in enumerate(zip(options, curves, strict=True)):
        colour = theme.series(index)
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.5, linestyle=dash(index), zorder=2)
        for x, y in points:
            face = colour if (x, y) in best else theme["paper"]
            axes.plot([x], [y], marker=marker(index), markersize=5, color=colour, markerfacecolor=face, zorder=3)
        ends.append((points[-1], option.label, colour))
    x, y = curves[0][-1]
    axes.plot(
        [x], [y], marker="o", markersize=13, color=theme["ink"], markerfacecolor="none", markeredgewidth=1.4, zorder=4
    )
    axes.set_ylim(0, 1.18 * max(y for _, y in every))
    axes.set_xlim(0, 1.12 * max(x for x, _ in every))
    if limit is not None:
        _limit(axes, limit, theme, side="right" if less_x else "left")
    axes.figure.canvas.draw()  # the final limits, which determine the positions of the names
    if less_x:  # both panels use the same colours
        beside(axes, ends, every, theme["muted"])


def _limit(axes: Axes, value: float, theme: Theme, side: str) -> None:
    axes.set_xlim(right=max(axes.get_xlim()[1], 1.06 * value))
    axes.axvline(value, color=theme["bad"], linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "limit", (value, 1.0), (-3 if side == "right" else 3, -8), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha=side, color=theme["bad"], fontsize=7.5,
    )  # fmt: skip


def day_picture(result: Result, day: Day, run_label: str) -> Figure:
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
            f" {100 * moving.over:.2f} % versus {100 * day.fixed.over:.2f} % of requests over a limit. {run_label}"
        ),
        alt=f"Between {moving.ready.min()} and {moving.ready.max()} instances over the day, {moving.starts} starts.",
        origin="modelled",
        png=True,
    )


def _smooth(values: Any) -> Any:
    """Average over at least half a minute, so that the plot shows a line instead of a band."""
    width = max(1, len(values) // 480)
    return np.convolve(np.pad(values, width // 2, mode="edge"), np.ones(width) / width, mode="same")[
        width // 2 : width // 2 + len(values)
    ]


def document(result: Result) -> Document:
    """Build the report."""
    answer = result.answer
    question, best = answer.question, answer.chosen
    where = run_label(result)
    sections = [
        Section("options", "Configurations tried", tuple(_options(result, where))),
        Section("check", "Simulated at the peak", tuple(_check(result))),
        Section("changes", "Effect of one change", tuple(_changes(result))),
    ]
    if result.day is not None:
        sections.append(
            Section(
                "day",
                "A day",
                (day_picture(result, result.day, where), *(Callout("note", line) for line in day_lines(result))),
            )
        )
    sections.append(Section("terms", "The question and its assumptions", (Terms(_terms(result)),)))
    return Document(
        title=f"{question.model.name} on {question.gpu.gpu}",
        subtitle=f"{question.demand.peak:,.4g} requests/s at peak; limits: {limits_text(question)}",
        cards=_cards(result),
        lead=(Callout("good", f"{best.label}: {fleet_text(best.fleet)}. Because {answer.reason}."),),
        sections=tuple(sections),
        kind="Sizing",
        source="a model of the engine, not measurements",
    )


def run_label(result: Result) -> str:
    """Return the conditions that accompany every number: model, precision, ISL, OSL, load, TP."""
    question = result.answer.question
    options = result.answer.options
    formats = ", ".join(dict.fromkeys(option.instance.setup.qformat.value for option in options))
    tps = ", ".join(dict.fromkeys(str(option.instance.setup.tp) for option in options))
    return (
        f"Modelled: model {question.model.name}; precision {formats}; ISL {length_text(question.isl)}; OSL "
        f"{length_text(question.osl)}; {question.arrivals} arrivals; TP {tps}; {question.gpu.gpu}."
    )


def _cards(result: Result) -> tuple[Card, ...]:
    best = result.answer.chosen
    fleet = best.fleet
    rounded = f"{fleet.servers_raw:.2f} before rounding; {whole(fleet)}"
    cards = [
        Card("Servers", f"{fleet.servers:,}", "", rounded, "modelled"),
        Card("GPUs", f"{fleet.gpus:,}", "", f"{count(fleet.instances, 'instance')} of {best.label}", "modelled"),
        Card("An instance serves", number(best.capacity.rate), "requests/s", f"{binds(best)} binds", "modelled"),
    ]
    if best.cost is not None:
        cards.append(Card("A year", f"{best.cost.per_year:,.0f}", "USD", "whole servers, prices as given", "modelled"))
    return tuple(cards)


def _options(result: Result, where: str) -> list[Block]:
    question, options = result.answer.question, result.answer.options
    percent = f"P{question.percentile:g}, ms"
    columns = (
        *left("configuration"),
        Column("each", "requests/s"), Column("per GPU", "requests/s"), Column("8 of 10 cases", "requests/s"),
        Column("TTFT", percent), Column("ITL", percent), Column("E2E", percent),
        Column("instances", "fleet"), Column("GPUs", "fleet"), Column("servers", "fleet"), Column("raw", "fleet"),
        *left("binds"), *right("KV tokens", "at a time"), *left("rests on"),
    )  # fmt: skip
    rows = tuple(_row(option, question) for option in options)
    blocks: list[Block] = [
        pareto(result, where),
        Table(f"Best first. {where}", "modelled", columns, rows, 0, ("Raw: servers before rounding, without spares.",)),
    ]
    if result.answer.refused:
        titles = left("configuration", "why not")
        refused = tuple(refusals(result.answer.refused))
        blocks.append(Table("Configurations that do not qualify", "modelled", titles, refused))
    return blocks


def _row(option: FleetOption, question: Question) -> tuple[str, ...]:
    seen = option.capacity.seen.at(question.percentile)
    fleet, one = option.fleet, option.instance
    together = one.placed.concurrency
    low = "out of reach" if option.low is None else number(option.low)
    return (
        option.label, number(option.capacity.rate), number(option.per_gpu), f"{low} to {number(option.high)}",
        *(NONE if math.isnan(seen[name]) else number(1000 * seen[name]) for name in ("ttft", "itl", "e2e")),
        f"{fleet.instances:,}", f"{fleet.gpus:,}", f"{fleet.servers:,}", f"{fleet.servers_raw:.2f}",
        binds(option), f"{one.kv_tokens:,}", f"{together.requests:,} ({together.binds})", one.costed.provenance,
    )  # fmt: skip


def _check(result: Result) -> list[Block]:
    question, check = result.answer.question, result.check
    blocks: list[Block] = [Callout("good" if check.fleet.meets else "warning", trial_text(question, check.fleet))]
    if check.fewer is not None:
        blocks.append(Callout("note", trial_text(question, check.fewer)))
    return [*blocks, Callout("note", check.why)]


def _changes(result: Result) -> list[Block]:
    columns = (*left("change"), *right("instances", "GPUs", "GPUs, change", "servers"), *left("note"))
    now, rows = result.answer.chosen.fleet.gpus, []
    for change in result.changes:
        more = NONE if change.gpus is None else f"{change.gpus - now:+,}" if change.gpus != now else "0"
        one, gpus, servers = (
            NONE if size is None else f"{size:,}" for size in (change.instances, change.gpus, change.servers)
        )
        rows.append((change.what, one, gpus, more, servers, change.why))
    caption = f"All else equal; the recommended fleet has {count(now, 'GPU')}. {run_label(result)}"
    return [Table(caption, "modelled", columns, tuple(rows))]


def _terms(result: Result) -> tuple[tuple[str, str], ...]:
    question = result.answer.question
    return (
        *question_terms(question),
        ("headroom, spares", f"{100 * question.headroom:g} %, {question.spare}"),
        *((word, text.replace("\n", "; ")) for word, text in answer_terms(result)),
        ("TTFT", "request sent to first token, including queue, prefill, network and tokenizer"),
        ("ITL", "(E2E - TTFT) / (output tokens - 1) per request"),
    )
