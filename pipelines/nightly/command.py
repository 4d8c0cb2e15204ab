"""`nightly`: measure the matrix, judge it by its history, write the report, and say what got worse.

Exit codes: 0 nothing got worse; 3 a regression; 1 a cell failed, or none could be measured; 2 a fault of the input.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pipelines.cli.commands import load
from pipelines.domain.errors import UserError
from pipelines.host.paths import relative_to_cwd
from pipelines.host.screen import say
from pipelines.nightly.changes import changes
from pipelines.nightly.finding import Finding
from pipelines.nightly.history import History
from pipelines.nightly.matrix import cells, own_overrides
from pipelines.nightly.verdict import Verdict, judge
from pipelines.run.console import WIDTH


def run(overrides: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    from pipelines.document.write import write_document
    from pipelines.nightly.trend import trend_document

    settings = load(own_overrides(overrides))
    history = History(settings.nightly.history)
    if settings.nightly.measure:
        from pipelines.nightly.night import measure

        run_id = measure(settings, cells(settings.nightly, overrides))
        read = history.read()
    else:
        read = history.read()
        if not read.records:
            raise UserError(
                f"nightly.history='{settings.nightly.history}' holds no result.",
                todo="Measure first (make nightly), or give the folder of a history: nightly.history=/some/folder",
            )
        run_id = read.records[-1].run
    verdict = judge(read.records, run_id, settings.nightly)
    folder = settings.report.folder / f"nightly-{settings.nightly.name}"
    paths = write_document(trend_document(history, read, verdict, settings.nightly), folder)
    for note in read.notes:
        say(f"note: {note}")
    say("\n" + "\n".join(words(history, verdict)))
    say(f"\nhistory: {relative_to_cwd(history.file)}")
    say(f"report: {relative_to_cwd(paths.markdown.absolute())}")
    say(f"report: {relative_to_cwd(paths.html.absolute())}")
    return verdict.exit_code


def words(history: History, verdict: Verdict) -> list[str]:
    """The verdict for a terminal."""
    lines = [f"REGRESSION  {line}" for found in verdict.regressions for line in [finding_text(history, found)]]
    lines += [f"FAILED  {cell}: {reason}" for cell, reason in verdict.failures]
    lines.append(headline(verdict))
    return [textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines]


def headline(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    count = {status: sum(r.status == status for r in verdict.records) for status in ("done", "failed", "not possible")}
    parts = [f"{count['done']} cell{'' if count['done'] == 1 else 's'} measured"]
    parts += [f"{count[status]} {status}" for status in ("failed", "not possible") if count[status]]
    learning = sum(line.judged[-1].state == "learning" for line in verdict.series)
    if learning:
        parts.append(f"{learning} of {len(verdict.series)} series still too short to know their noise")
    worse = len(verdict.regressions)
    parts.append(f"{worse} regression{'' if worse == 1 else 's'}" if worse else "nothing got worse")
    return f"{'; '.join(parts)}."


def finding_text(history: History, found: Finding) -> str:
    """Cell, metric, before, now, threshold, since which commit, and what changed then."""
    from pipelines.nightly.shown import shown

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
    return f"{text} Changed in between: {'; '.join(different) or 'nothing that is recorded'}."
