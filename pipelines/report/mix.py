"""The report's section on a searched mix: which linear got which format, and what the search saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.config_json import LINEARS
from pipelines.document.blocks import LEFT, Block, Column, Figure, Fold, Section, Table, Terms
from pipelines.document.canvas import Theme, plot
from pipelines.document.show import NONE
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.report.data import FormatReport, ReportData

if TYPE_CHECKING:
    from pipelines.document.canvas import Drawing

MOST_NUMBERS = 40
"""Layers up to which the cells of the picture have their bits in them."""
OPACITY = 0.45
"""Of a cell: text on it stays readable in both themes."""


def section(data: ReportData) -> Section:
    """Return the section; without blocks if every linear of each checkpoint has the same format."""
    blocks: list[Block] = []
    for item in data.formats:
        piece = item.piece("quantize")
        search = piece.facts.get("search") if piece else None
        if piece is None or not search:
            continue
        terms = mix_terms(piece.facts)
        blocks.append(Terms((("Checkpoint", item.label), *terms) if len(data.formats) > 1 else terms))
        if formats := piece.facts.get("formats"):
            blocks.append(_picture(item, formats))
        blocks.append(Fold(f"What the search saw: {item.label}", (_scores(item, search),)))
    return Section("mix", "A format for each linear", tuple(blocks))


def mix_terms(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what was asked of a search and what it chose; empty for a single format."""
    search = facts.get("search")
    if not search:
        return ()
    return (
        ("Candidates", f"{', '.join(search['candidates'])}; 16 bit is always a choice"),
        (
            "Effective bits",
            f"{search['effective_bits']:g} per weight of the layers' linears without scales of groups, of at most"
            f" {search['asked_bits']:g}; {facts['bits_per_weight']:.2f} stored, scales included",
        ),
        ("Weights by format", _shares(search["choices"])),
        ("Judged by", f"{search['scoring']} on {search['texts']} texts (ModelOpt's auto_quantize)"),
    )


def _shares(choices: Sequence[Mapping[str, Any]]) -> str:
    whole = sum(choice["weights"] for choice in choices)
    parts = {
        qformat: sum(choice["weights"] for choice in choices if choice["chosen"] == qformat) for qformat in QFormat
    }
    return ", ".join(f"{_shown(qformat)} {100 * part / whole:.0f} %" for qformat, part in parts.items() if part)


def _shown(qformat: str) -> str:
    return "16 bit" if qformat == QFormat.NONE else str(qformat)


def _picture(item: FormatReport, formats: Mapping[str, str]) -> Figure:
    """Draw a cell for each linear of each layer, in the colour of its format."""
    cells = {(int(layer), name): QFormat(f) for key, f in formats.items() for _, layer, name in [key.split(".", 2)]}
    layers, names = 1 + max(layer for layer, _ in cells), [name for name in LINEARS if (0, name) in cells]
    used = [qformat for qformat in QFormat if qformat in cells.values()]

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        for (layer, name), qformat in cells.items():
            row, colour = names.index(name), theme.series(used.index(qformat))
            axes.barh(row, 1, 0.9, left=layer - 0.5, color=colour, alpha=OPACITY, edgecolor=theme["paper"], linewidth=2)
            if layers <= MOST_NUMBERS:
                axes.text(layer, row, str(FORMATS[qformat].weights.bits), ha="center", va="center", fontsize=7)
        for index, qformat in enumerate(used):
            label = f"{_shown(qformat)} ({FORMATS[qformat].weights.bits})"
            axes.barh(0, 0, color=theme.series(index), alpha=OPACITY, label=label)
        figure.legend(loc="outside upper left", ncols=len(used), frameon=False, fontsize=8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(-0.5, layers - 0.5)
        axes.set_xticks(range(0, layers, 1 + layers // 20))
        axes.set_xlabel("decoder layer")
        axes.tick_params(length=0, labelcolor=theme["ink"])
        axes.grid(visible=False)
        axes.spines[["bottom", "left"]].set_visible(False)

    return plot(
        f"mix-{item.model}-{item.variant}",
        (7.2, 2.3),
        draw,
        title=f"Format of each linear: {item.label}",
        caption="Number and colour: bits per weight and format. q, k and v share a format, and so do fc and gate,"
        " because TensorRT-LLM computes them together.",
        alt="; ".join(f"{_shown(f)}: {', '.join(k for k, g in formats.items() if g == f)}" for f in used) + ".",
        origin="recorded",
        png=True,
    )


def _scores(item: FormatReport, search: Mapping[str, Any]) -> Table:
    """Return the estimated damage of each format to each group of linears."""
    tried = [name for name in search["candidates"] if any(name in choice["scores"] for choice in search["choices"])]
    unit = "squared gradient times error of the output" if search["scoring"] == "gradient" else "KL divergence, summed"
    return Table(
        caption=f"Estimated damage of each format: {item.label}, {unit}; 16 bit does none",
        origin="recorded",
        columns=(
            Column("linears", right=LEFT),
            Column("weights"),
            *(Column(name) for name in tried),
            Column("chosen", right=LEFT),
        ),
        rows=tuple(
            (
                _together(choice["linears"]),
                f"{choice['weights']:,}",
                *(f"{choice['scores'][name]:.3g}" if name in choice["scores"] else NONE for name in tried),
                _shown(choice["chosen"]),
            )
            for choice in search["choices"]
        ),
        notes=("Scores compare formats and linears within one search; they are not losses of accuracy.",),
    )


def _together(linears: Sequence[str]) -> str:
    """Return names of linears without what they share: model.layers.0.self_attn.q_proj, k_proj."""
    first, *others = linears
    return ", ".join((first.removeprefix("model."), *(other.rpartition(".")[2] for other in others)))
