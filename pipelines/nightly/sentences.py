"""The verdict of a night as sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelines.nightly.changes import changes
from pipelines.nightly.history import History
from pipelines.nightly.regression import Regression
from pipelines.nightly.shown import named, shown
from pipelines.nightly.verdict import NightVerdict


@dataclass(frozen=True, slots=True)
class Cause:
    """Regressions that began in the same night after the same changes.

    Attributes:
        since: first bad and last good commit, and what changed in between.
        regressions: what got worse.
    """

    since: str
    regressions: tuple[Regression, ...]

    @property
    def text(self) -> str:
        """Describe the cause; a single regression is described in full."""
        if len(self.regressions) == 1:
            return f"{finding_text(self.regressions[0])}. {self.since}"
        cells = dict.fromkeys(found.cell for found in self.regressions)
        where = next(iter(cells)) if len(cells) == 1 else f"{len(cells)} cells"
        return f"{where}: {len(self.regressions)} metrics got worse together. {self.since}"

    @property
    def items(self) -> tuple[str, ...]:
        """Describe each of several regressions."""
        return tuple(map(finding_text, self.regressions)) if len(self.regressions) > 1 else ()


def headline(verdict: NightVerdict) -> str:
    """Summarize the verdict in one sentence."""
    count = {status: sum(r.status == status for r in verdict.records) for status in ("done", "failed", "not possible")}
    parts = [f"{count['done']} cell{'' if count['done'] == 1 else 's'} measured"]
    parts += [f"{count[status]} {status}" for status in ("failed", "not possible") if count[status]]
    learning = sum(line.judged[-1].state == "learning" for line in verdict.series)
    if learning:
        parts.append(f"{learning} of {len(verdict.series)} series still too short to estimate their noise")
    if verdict.unmeasured:
        why = "no questions, or a baseline that does not beat guessing"
        parts.append(f"accuracy NOT MEASURED in {', '.join(verdict.unmeasured)}: {why}")
    worse = len(verdict.regressions)
    parts.append(f"{worse} regression{'' if worse == 1 else 's'}" if worse else "nothing got worse")
    return f"{'; '.join(parts)}."


def causes(history: History, regressions: Sequence[Regression]) -> list[Cause]:
    """Join regressions with the same first bad night, the same last good one and the same changes in between."""
    joined: dict[str, list[Regression]] = {}
    for found in regressions:
        joined.setdefault(_since(history, found), []).append(found)
    return [Cause(since, tuple(each)) for since, each in joined.items()]


def finding_text(found: Regression) -> str:
    """Describe a regression: cell, metric, before, now, limit, and why it counts."""
    return (
        f"{found.cell}: {named(found.metric)}: {shown(found.metric, found.before)} before, "
        f"{shown(found.metric, found.now)} now ({found.change_percent:+.1f} %), "
        f"limit {shown(found.metric, found.limit)} ({found.reason})"
    )


def _since(history: History, found: Regression) -> str:
    """Describe the first bad commit, the last good one, and what changed between them."""
    text = f"Since {found.first.commit[:12]} of {found.first.at[:10]}"
    if found.last_good is None:
        return f"{text}."
    text += f"; last good {found.last_good.commit[:12]} of {found.last_good.at[:10]}."
    different = changes(history, found.last_good, found.first)
    return f"{text} Changed in between: {'; '.join(different) or 'nothing recorded'}."


def by_reason(cells: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join cells that share a reason: ("cell, cell", reason)."""
    joined: dict[str, list[str]] = {}
    for cell, reason in cells:
        joined.setdefault(reason, []).append(cell)
    return [(", ".join(names), reason) for reason, names in joined.items()]
