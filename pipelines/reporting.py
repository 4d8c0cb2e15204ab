"""Writes reports for the commands: of one model, of some or all of its formats."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.artifacts import Store
from pipelines.compose import relative_to_cwd
from pipelines.report.collect import collect
from pipelines.report.data import ReportData
from pipelines.report.write import write_report
from pipelines.screen import say
from pipelines.settings import Settings


def write(settings: Settings, store: Store, model: str, variants: Sequence[str] | None) -> ReportData:
    """Collect, write Markdown and HTML, and say where they are, the HTML last.

    Args:
        settings: where to, and what loss of accuracy is acceptable.
        store: what to report from.
        model: label.
        variants: formats in the order to show; None is every one there is.

    Raises:
        UserError: there is nothing to report, or the folder cannot be written.
    """
    data = collect(store, model, variants)
    paths = write_report(data, settings.report.folder / model, settings.report.max_accuracy_loss_percent)
    say(f"\nreport: {relative_to_cwd(paths.markdown.absolute())}")
    say(f"report: {relative_to_cwd(paths.html.absolute())}")
    return data
