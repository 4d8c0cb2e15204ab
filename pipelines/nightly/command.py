"""The command `nightly`: measure the matrix, judge it by its history, write the report, and list the regressions.

Exit codes: 0 nothing got worse; 3 a regression; 1 a cell failed, or none could be measured; 2 invalid input.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.domain.errors import UserError
from pipelines.host.paths import check_folders, relative_to_cwd
from pipelines.host.screen import say
from pipelines.host.text import wrapped
from pipelines.nightly.history import History
from pipelines.nightly.matrix import cells, own_overrides
from pipelines.nightly.sentences import by_reason, causes, headline
from pipelines.nightly.verdict import NightVerdict, judge
from pipelines.settings.compose import load


def run(overrides: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    from pipelines.document.write import write_document
    from pipelines.nightly.trend import trend_document

    settings = load(own_overrides(overrides))
    check_folders({"nightly.history": settings.nightly.history, "report.folder": settings.report.folder})
    history = History(settings.nightly.history)
    if settings.nightly.measure:
        from pipelines.nightly.night import measure

        run_id = measure(settings, cells(settings.nightly, overrides))
        read = history.read()
    else:
        read = history.read()
        if not read.records:
            raise UserError(
                f"nightly.history='{settings.nightly.history}' contains no results.",
                todo="Measure first (make nightly), or choose the folder of a history: nightly.history=/some/folder",
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


def words(history: History, verdict: NightVerdict) -> list[str]:
    """Render the verdict for a terminal."""
    lines = []
    for cause in causes(history, verdict.regressions):
        lines += [f"REGRESSION  {cause.text}", *(f"- {item}" for item in cause.items)]
    lines += [f"FAILED  {cells}: {reason}" for cells, reason in by_reason(verdict.failures)]
    lines.append(headline(verdict))
    return [wrapped(line) for line in lines]
