"""The report's section on pruning: what was removed, and how much of the model is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.document.blocks import Block, Section, Terms
from pipelines.domain.units import show_bytes
from pipelines.report.data import ReportData

WORDS = {"layers": "layers", "mlp": "MLP channels", "heads": "query heads", "kv_heads": "KV heads"}


def section(data: ReportData) -> Section:
    """Return the section; without blocks if nothing was pruned."""
    blocks: list[Block] = []
    for item in data.formats:
        if piece := item.piece("prune_model"):
            terms = pruning_terms(piece.facts)
            blocks.append(Terms((("Model", item.label), *terms) if len(data.formats) > 1 else terms))
    return Section("pruning", "Pruning", tuple(blocks))


def pruning_terms(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what was removed, and by what it was chosen."""
    before, after = facts["sizes_before"], facts["sizes_after"]
    sizes = [f"{before[key]:,} -> {after[key]:,} {word}" for key, word in WORDS.items() if before[key] != after[key]]
    whole, left, text = facts["parameters_before"], facts["parameters_after"], facts["calibration"]
    return (
        ("Pruned", f"{facts['method']}: {', '.join(sizes)}"),
        ("Parameters", f"{whole:,} before, {left:,} after ({100 * left / whole:.1f} %)"),
        ("Weights on disk", f"{show_bytes(facts['source_bytes'])} before, {show_bytes(facts['total_bytes'])} after"),
        ("Judged on", f"{text['tokens']:,} tokens in {text['sequences']:,} texts"),
        _chosen(facts),
    )


def _chosen(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Say what the choice cost: the loss without the layers, or the share of importance in the weakest layer."""
    if facts["method"] == "depth":
        dropped = ", ".join(
            f"{loss:.4g} without layer {layer}" for layer, loss in zip(facts["dropped"], facts["losses"], strict=True)
        )
        return "Loss on these texts", f"{facts['loss_before']:.4g} before; then {dropped} (nats per token)"
    shares = ", ".join(
        f"{100 * min(shares):.1f} % of {WORDS[what]}" for what, shares in sorted(facts["importance_kept"].items())
    )
    return "Squared activation x weight norm that stays", f"at least {shares} in every layer"
