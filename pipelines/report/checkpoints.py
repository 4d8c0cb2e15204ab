"""Sections on how checkpoints were made: a searched mix of formats, pruning, recovery training."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.config_json import LINEARS
from pipelines.document.blocks import Block, Figure, Fold, Section, Table, Terms, left, right
from pipelines.document.canvas import Theme, axis, plain_log, plot
from pipelines.document.show import NONE
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.units import show_bytes
from pipelines.report.data import FormatReport, ReportData

if TYPE_CHECKING:
    from pipelines.document.canvas import Drawing

MOST_NUMBERS = 40
"""Layers up to which the cells of the picture of a mix have their bits in them."""
OPACITY = 0.45
"""Of a cell: text on it stays readable in both themes."""
PRUNED = {"layers": "layers", "mlp": "MLP channels", "heads": "query heads", "kv_heads": "KV heads"}
LOSSES = {
    "finetune": "cross entropy, in nats per token",
    "distill": "KL divergence from the teacher, in nats per token",
}
Facts = Mapping[str, Any]


def sections(data: ReportData) -> tuple[Section, ...]:
    """Return the three sections; without blocks where no checkpoint was made like that."""
    return (
        Section("mix", "A format for each linear", _blocks(data, "quantize", "Checkpoint", mix_terms, _mix)),
        Section("pruning", "Pruning", _blocks(data, "prune_model", "Model", pruning_terms)),
        Section("recovery", "Recovery training", _blocks(data, "recover", "Model", recovery_terms, _losses)),
    )


def _blocks(
    data: ReportData,
    stage: str,
    title: str,
    terms_of: Callable[[Facts], tuple[tuple[str, str], ...]],
    more: Callable[[FormatReport, Facts], list[Block]] = lambda *_: [],
) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for item in data.formats:
        artifact = item.artifact(stage)
        if artifact and (terms := terms_of(artifact.facts)):
            blocks.append(Terms(((title, item.label), *terms) if len(data.formats) > 1 else terms))
            blocks += more(item, artifact.facts)
    return tuple(blocks)


def mix_terms(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return the settings and the result of a search; empty for a single format."""
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


def _mix(item: FormatReport, facts: Facts) -> list[Block]:
    scores = Fold(f"What the search saw: {item.label}", (_scores(item, facts["search"]),))
    return [_mix_picture(item, formats), scores] if (formats := facts.get("formats")) else [scores]


def _mix_picture(item: FormatReport, formats: Mapping[str, str]) -> Figure:
    """Draw a cell for each linear of each layer, in the colour of its format."""
    cells = {(int(layer), name): QFormat(f) for key, f in formats.items() for _, layer, name in [key.split(".", 2)]}
    layers, names = 1 + max(layer for layer, _ in cells), [name for name in LINEARS if (0, name) in cells]
    used = [qformat for qformat in QFormat if qformat in cells.values()]

    def draw(figure: "Drawing", theme: Theme) -> None:
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
    tried = [name for name in search["candidates"] if any(name in choice["scores"] for choice in search["choices"])]
    unit = "squared gradient times error of the output" if search["scoring"] == "gradient" else "KL divergence, summed"
    return Table(
        caption=f"Estimated damage of each format: {item.label}, {unit}; 16 bit does none",
        origin="recorded",
        columns=(*left("linears"), *right("weights", *tried), *left("chosen")),
        rows=tuple(
            (
                ", ".join(
                    linear.rpartition(".")[2] if at else linear.removeprefix("model.")
                    for at, linear in enumerate(choice["linears"])
                ),
                f"{choice['weights']:,}",
                *(f"{choice['scores'][name]:.3g}" if name in choice["scores"] else NONE for name in tried),
                _shown(choice["chosen"]),
            )
            for choice in search["choices"]
        ),
        notes=("Scores compare formats and linears within one search; they are not losses of accuracy.",),
    )


def pruning_terms(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return the removed parts and the criterion."""
    before, after = facts["sizes_before"], facts["sizes_after"]
    sizes = [f"{before[key]:,} -> {after[key]:,} {word}" for key, word in PRUNED.items() if before[key] != after[key]]
    whole, left, text = facts["parameters_before"], facts["parameters_after"], facts["calibration"]
    return (
        ("Pruned", f"{facts['method']}: {', '.join(sizes)}"),
        ("Parameters", f"{whole:,} before, {left:,} after ({100 * left / whole:.1f} %)"),
        ("Weights on disk", f"{show_bytes(facts['source_bytes'])} before, {show_bytes(facts['total_bytes'])} after"),
        ("Judged on", f"{text['tokens']:,} tokens in {text['sequences']:,} texts"),
        _chosen(facts),
    )


def _chosen(facts: Facts) -> tuple[str, str]:
    """Say what the choice cost: the loss without the layers, or the share of importance in the weakest layer."""
    if facts["method"] == "depth":
        dropped = ", ".join(
            f"{loss:.4g} without layer {layer}" for layer, loss in zip(facts["dropped"], facts["losses"], strict=True)
        )
        return "Loss on these texts", f"{facts['loss_before']:.4g} before; then {dropped} (nats per token)"
    shares = ", ".join(
        f"{100 * min(shares):.1f} % of {PRUNED[what]}" for what, shares in sorted(facts["importance_kept"].items())
    )
    return "Squared activation x weight norm that stays", f"at least {shares} in every layer"


def recovery_terms(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return the settings and the result of training; empty without training."""
    if "held_out_losses" not in facts:
        return ()
    fell = f"{facts['loss_before']:.4g} before, {facts['loss_after']:.4g} after"
    steps = f"{facts['steps']:,} steps; the weights of step {facts['best_step']:,} are kept"
    sparse, lora = facts.get("sparse"), facts.get("lora")
    return (
        ("Training", f"{facts['method']}, {steps}"),
        *((("Trained", f"matrices of rank {lora['rank']} beside {', '.join(lora['targets'])}"),) if lora else ()),
        ("Text", f"{facts['tokens']:,} tokens in {facts['sequences']:,} sequences"),
        ("Loss on held-out text", f"{fell} ({LOSSES[facts['method']]})"),
        *((("Zeros after training", f"{100 * sparse['zero_fraction']:.1f} % of the linears"),) if sparse else ()),
    )


def _losses(item: FormatReport, facts: Facts) -> list[Block]:
    trained, held_out = facts["losses"], facts["held_out_losses"]

    def draw(figure: "Drawing", theme: Theme) -> None:
        axes = figure.subplots()
        for index, (name, points) in enumerate((("trained on", trained), ("held out", held_out))):
            steps, losses = zip(*points, strict=True) if points else ((), ())
            axes.plot(steps, losses, color=theme.series(index), linewidth=2, marker="o", markersize=3, label=name)
        axes.axvline(facts["best_step"], color=theme["ink"], linewidth=0.8, linestyle=":")
        plain_log(axes, "y", [loss for _, loss in (*trained, *held_out)])
        axis(axes, "", "step", "loss (log)")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)

    texts = ", ".join(f"{loss:.3g} at step {step}" for step, loss in held_out)
    picture = plot(
        f"recovery-{item.model}-{item.variant}",
        (7.2, 2.6),
        draw,
        title=f"Loss while training: {item.label}",
        caption=f"Mean {LOSSES[facts['method']]}. The dotted line is the step whose weights are kept.",
        alt=f"Held-out loss: {texts}.",
        origin="recorded",
        png=True,
    )
    return [picture]
