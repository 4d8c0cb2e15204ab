"""The report's section on recovery training: what was trained, and how the loss fell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.document.blocks import Block, Figure, Section, Terms
from pipelines.document.canvas import Theme, axis, plain_log, plot
from pipelines.report.data import FormatReport, ReportData

if TYPE_CHECKING:
    from pipelines.document.canvas import Drawing

LOSSES = {
    "finetune": "cross entropy, in nats per token",
    "distill": "KL divergence from the teacher, in nats per token",
}


def section(data: ReportData) -> Section:
    """Return the section; without blocks if nothing was trained."""
    blocks: list[Block] = []
    for item in data.formats:
        if piece := item.piece("recover"):
            terms = recovery_terms(piece.facts)
            blocks.append(Terms((("Model", item.label), *terms) if len(data.formats) > 1 else terms))
            blocks.append(_picture(item, piece.facts))
    return Section("recovery", "Recovery training", tuple(blocks))


def recovery_terms(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what was trained, and what came of it; empty without training."""
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


def _picture(item: FormatReport, facts: Mapping[str, Any]) -> Figure:
    """Draw both losses over the steps."""
    trained, held_out = facts["losses"], facts["held_out_losses"]

    def draw(figure: Drawing, theme: Theme) -> None:
        axes = figure.subplots()
        for index, (name, points) in enumerate((("trained on", trained), ("held out", held_out))):
            steps, losses = zip(*points, strict=True) if points else ((), ())
            axes.plot(steps, losses, color=theme.series(index), linewidth=2, marker="o", markersize=3, label=name)
        axes.axvline(facts["best_step"], color=theme["ink"], linewidth=0.8, linestyle=":")
        plain_log(axes, "y", [loss for _, loss in (*trained, *held_out)])
        axis(axes, "", "step", "loss (log)")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)

    shown = ", ".join(f"{loss:.3g} at step {step}" for step, loss in held_out)
    return plot(
        f"recovery-{item.model}-{item.variant}",
        (7.2, 2.6),
        draw,
        title=f"Loss while training: {item.label}",
        caption=f"Mean {LOSSES[facts['method']]}. The dotted line is the step whose weights are kept.",
        alt=f"Held-out loss: {shown}.",
        origin="recorded",
        png=True,
    )
