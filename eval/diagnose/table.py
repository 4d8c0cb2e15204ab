"""A diagnosis as text for a terminal."""

from __future__ import annotations

from eval.diagnose.result import StageDiagnosis, StageResult
from pipelines.host.text import table, wrapped

MOST_FINDINGS = 3
"""Further differences that are listed; all of them are in the artifact."""


def diagnosis_text(result: StageDiagnosis) -> str:
    """Return one row per stage, what was compared, and the outcome in a sentence."""
    rows = [("stage", "worst", "noise", "verdict")]
    rows += [(each.stage, each.worst or "-", each.noise or "-", each.verdict) for each in result.stages]
    lines = [f"{result.model} {result.variant}, {result.items}:", "", *table(rows, words=(1, 2, 3)), ""]
    lines += [wrapped(f"{each.stage}: {_said(each)}", 2) for each in result.stages if _said(each)]
    lines += ["", wrapped(result.sentence(), 0)]
    if (accused := result.accused) and len(accused.findings) > 1:
        more = accused.findings[1 : MOST_FINDINGS + 1]
        rest = len(accused.findings) - 1 - len(more)
        shown = "; ".join(f"{each.tensor} ({each.figure})" for each in more)
        lines.append(wrapped(f"Also: {shown}" + (f"; and {rest} more." if rest else "."), 0))
    return "\n".join(lines)


def _said(stage: StageResult) -> str:
    compared = f"against {stage.against}" if stage.against else ""
    return "; ".join(part for part in (compared, stage.note) if part)
