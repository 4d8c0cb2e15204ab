"""The verdict of a night as sentences, for the terminal and the report."""

from __future__ import annotations

from pipelines.nightly.changes import changes
from pipelines.nightly.history import History
from pipelines.nightly.regression import Regression
from pipelines.nightly.shown import shown
from pipelines.nightly.verdict import NightVerdict


def headline(verdict: NightVerdict) -> str:
    """Summarize the verdict in one sentence."""
    count = {status: sum(r.status == status for r in verdict.records) for status in ("done", "failed", "not possible")}
    parts = [f"{count['done']} cell{'' if count['done'] == 1 else 's'} measured"]
    parts += [f"{count[status]} {status}" for status in ("failed", "not possible") if count[status]]
    learning = sum(line.judged[-1].state == "learning" for line in verdict.series)
    if learning:
        parts.append(f"{learning} of {len(verdict.series)} series still too short to estimate their noise")
    worse = len(verdict.regressions)
    parts.append(f"{worse} regression{'' if worse == 1 else 's'}" if worse else "nothing got worse")
    return f"{'; '.join(parts)}."


def finding_text(history: History, found: Regression) -> str:
    """Describe a regression: cell, metric, before, now, limit, first bad commit, and what changed with it."""
    text = (
        f"{found.cell}: {found.metric} {shown(found.metric, found.before)} before, "
        f"{shown(found.metric, found.now)} now ({found.change_percent:+.1f} %), "
        f"limit {shown(found.metric, found.limit)} ({found.reason}). "
        f"Since {found.first.commit[:12]} of {found.first.at[:10]}"
    )
    if found.last_good is None:
        return f"{text}."
    text += f"; last good {found.last_good.commit[:12]} of {found.last_good.at[:10]}."
    different = changes(history, found.last_good, found.first)
    return f"{text} Changed in between: {'; '.join(different) or 'nothing recorded'}."
