"""The report's section on fidelity: how far predictions are from the 16-bit model's, with pictures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eval.fidelity.divergence import Figures, LayerErrors
from eval.fidelity.fidelity_text import (
    HEADINGS,
    LAYERS,
    NO_DIRECTION,
    READING,
    SCALED,
    bounds_table,
    figure_rows,
    greedy_text,
    legend,
)
from pipelines.document.blocks import Block, BulletList, Callout, Figure, Fold, Section, Table, groups, left, right
from pipelines.document.canvas import VALUE, Theme, axis, plain_log, plot
from pipelines.document.show import NONE, count
from pipelines.report.data import FormatReport, ReportData, ReportedFidelity

if TYPE_CHECKING:
    from pipelines.document.canvas import Axes, Drawing

MOST_NUMBERS = 12
"""Layers up to which the cells of a heat map have their numbers in them."""
STRONGEST = 0.55
"""Opacity of the largest error: text on it stays readable in both themes."""


def section(data: ReportData) -> Section:
    """Return the section; without blocks if nothing was compared."""
    compared = [(item, item.fidelity) for item in data.formats if item.fidelity]
    several = len(data.models) > 1
    blocks: list[Block] = []
    if compared:
        blocks += [_table(compared, several), Callout("note", NO_DIRECTION), _divergences(compared, several)]
        blocks.append(
            BulletList(tuple(f"{_name(item, several)}: {greedy_text(fidelity.result)}" for item, fidelity in compared))
        )
    if any(fidelity.flips for _, fidelity in compared):
        blocks.append(_flips(compared, several))
    for item, fidelity in compared:
        if layers := fidelity.result.layers:
            blocks.append(Fold(f"By layer: {_name(item, several)}", (_heat_map(item, layers),)))
    for each in data.bounds:
        bounds = bounds_table(each.result)
        blocks.append(replace(bounds, caption=f"{bounds.caption}, measured {each.artifact.created[:10]}"))
    return Section("fidelity", "Fidelity", tuple(blocks))


def _name(item: FormatReport, several: bool) -> str:
    return item.label if several else item.variant


def _table(compared: Sequence[tuple[FormatReport, ReportedFidelity]], several: bool) -> Table:
    rows = [(_name(item, several), *row) for item, fidelity in compared for row in figure_rows(fidelity.result)]
    first = compared[0][1].result
    return Table(
        caption=(
            f"Predictions of the next token beside those of {first.reference} in 16 bit: windows of {first.window} "
            f"tokens, vocabulary of {first.vocabulary:,}, engine {first.engine}, arithmetic {first.arithmetic}"
        ),
        origin="measured",
        columns=(
            *left("format", "text"),
            *right("tokens"),
            *groups("KL divergence, nats", ("mean", *HEADINGS[1:4])),
            *right(*HEADINGS[4:]),
        ),
        rows=tuple(rows),
        notes=(
            READING,
            f"Noise: the 16-bit model against itself in iterations of another size and with another arithmetic "
            f"({first.noise_arithmetic}), on the first part of each text.{legend(rows)}",
        ),
    )


def _flips(compared: Sequence[tuple[FormatReport, ReportedFidelity]], several: bool) -> Table:
    rows = [
        (
            _name(item, several),
            f"{flips.questions:,}",
            *(f"{number:,}" for number in (flips.flipped, flips.to_wrong, flips.to_right, flips.wrong_to_wrong)),
            *(NONE if margin is None else f"{margin:.3f}" for margin in (flips.margin_flipped, flips.margin_kept)),
        )
        for item, fidelity in compared
        if (flips := fidelity.flips)
    ]
    return Table(
        caption="Answers that differ from the 16-bit model's, by direction",
        origin="measured",
        columns=(
            *left("format"),
            *right("questions"),
            *groups("answers that changed", ("all", "right to wrong", "wrong to right", "wrong to wrong")),
            *groups("margin of the 16-bit model", ("changed", "kept")),
        ),
        rows=tuple(rows),
        notes=("Margin: probability of the best choice minus that of the second, among the choices; medians.",),
    )


def _divergences(compared: Sequence[tuple[FormatReport, ReportedFidelity]], several: bool) -> Figure:
    """Plot median, mean, 99th percentile and maximum of the divergence per format, beside the noise."""
    names = [_name(item, several) for item, _ in compared]
    figures = [(fidelity.result.overall, fidelity.result.noise) for _, fidelity in compared]
    values = [value for pair in figures for each in pair for value in (each.kl_median, each.kl_max) if value > 0]
    low, high = min(values, default=1e-9) / 3, max(values, default=1.0) * 3

    def draw(figure: "Drawing", theme: Theme) -> None:
        axes = figure.subplots()
        plain_log(axes, "x", [low, high])
        axes.set_xlim(low, high)
        for at, (ours, noise) in enumerate(figures):
            _spread(axes, ours, at - 0.13, theme["work"], low, names[at])
            _spread(axes, noise, at + 0.2, theme["muted"], low, f"{names[at]}, noise")
            axes.annotate(
                f"{ours.kl_mean:.2g}", (1.01, at - 0.13), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
        axes.set_yticks(range(len(compared)), names)
        axes.tick_params(axis="y", length=0, labelcolor=theme["ink"])
        axes.set_ylim(len(compared) - 0.5, -0.6)
        axis(axes, "", "KL divergence from the 16-bit model, nats per token (log)", "")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)

    return plot(
        "fidelity",
        (7.2, 0.9 + 0.5 * len(compared)),
        draw,
        title="Divergence from the 16-bit model by format",
        caption=(
            "Dot and number: mean; bar: from the median to the 99th percentile; tick: largest. Grey: the 16-bit model "
            f"against itself, the noise. Measured: {count(figures[0][0].tokens, 'token')} of text per format."
        ),
        alt="Mean KL divergence in nats. "
        + "; ".join(
            f"{name} {ours.kl_mean:.2g}, noise {noise.kl_mean:.2g}"
            for name, (ours, noise) in zip(names, figures, strict=True)
        )
        + ".",
        png=True,
    )


def _spread(axes: "Axes", figures: Figures, at: float, colour: str, low: float, name: str) -> None:
    """Draw one row; what is below the axis begins at its edge."""
    begin, mean = max(figures.kl_median, low), max(figures.kl_mean, low)
    axes.plot([begin, max(figures.kl_p99, low)], [at, at], color=colour, linewidth=2.2, solid_capstyle="butt")
    parts = {"mean": figures.kl_mean, "median": figures.kl_median, "p99": figures.kl_p99, "largest": figures.kl_max}
    value = f"{VALUE}{name}: " + ", ".join(f"{part} {number:.2g}" for part, number in parts.items())
    axes.plot([mean], [at], marker="o", color=colour, markersize=5.5, gid=value)
    axes.plot([max(figures.kl_max, low)], [at], marker="|", color=colour, markersize=8, markeredgewidth=1.4)


def _heat_map(item: FormatReport, layers: LayerErrors) -> Figure:
    """Draw the errors of outputs and weights, a row per layer; darker is larger."""
    columns = {"output": layers.blocks, "noise": layers.noise}
    columns |= {name.rpartition(".")[2].removesuffix("_proj"): values for name, values in layers.weights.items()}
    positive = [value for values in columns.values() for value in values if value > 0]
    low, high = min(positive, default=1e-6), max(positive, default=1.0)

    def strength(value: float) -> float:
        if value <= 0:
            return 0.0
        return 0.04 + (STRONGEST - 0.04) * (math.log(value / low) / math.log(high / low) if high > low else 1.0)

    def draw(figure: "Drawing", theme: Theme) -> None:
        axes = figure.subplots()
        for x, values in enumerate(columns.values()):
            for y, value in enumerate(values):
                colour = theme["bad"] if x == 0 else theme["muted"] if x == 1 else theme["work"]
                axes.broken_barh([(x - 0.48, 0.96)], (y - 0.48, 0.96), color=colour, alpha=strength(value), linewidth=0)
                if len(values) <= MOST_NUMBERS:
                    axes.annotate(f"{100 * value:.2g}", (x, y), ha="center", va="center", fontsize=7.5)
        axes.set_xticks(range(len(columns)), list(columns))
        axes.xaxis.tick_top()
        axes.set_xlim(-0.6, len(columns) - 0.4)
        axes.set_ylim(len(layers.blocks) - 0.5, -0.5)
        axes.set_ylabel("layer")
        step = max(1, len(layers.blocks) // MOST_NUMBERS)
        axes.set_yticks(range(0, len(layers.blocks), step))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)

    worst = max(range(len(layers.blocks)), key=lambda layer: layers.blocks[layer])
    return plot(
        f"layers-{item.model}-{item.variant}".replace(".", "_"),
        (7.2, 0.8 + min(0.3 * len(layers.blocks), 7.0)),
        draw,
        title=f"Errors by layer: {item.label}",
        caption=f"{LAYERS} The stronger the colour, the larger.{SCALED if layers.scaled else ''}",
        alt=(
            f"Heat map of errors by layer. The largest output error is {100 * layers.blocks[worst]:.2g} % in layer "
            f"{worst}."
        ),
    )
