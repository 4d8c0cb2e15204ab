"""The command `report`, and the functions that write reports for other commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.verdict import Criteria
from pipelines.document.write import ReportPaths, write_document
from pipelines.domain.errors import UserError
from pipelines.host.paths import check_folders, relative_to_cwd
from pipelines.host.screen import say
from pipelines.report.collect import collect
from pipelines.report.compare import comparison
from pipelines.report.compare_text import comparison_text
from pipelines.report.data import ReportData
from pipelines.report.mlflow_runs import log_runs, mlflow_fault
from pipelines.report.model_card import write_model_cards
from pipelines.report.modelled import with_models
from pipelines.report.sections import document
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.measurements import recover
from pipelines.store.store import Store


def report(overrides: Sequence[str]) -> int:
    """Write the report of a model from the results in the store."""
    settings = load(overrides)
    if fault := mlflow_fault(settings.report.mlflow):
        raise UserError.of([fault])
    check_folders(settings.report.written, read={"paths.store": settings.paths.store})
    store = Store(settings.paths.store)
    recover(store)
    write(settings, store, settings.model.label, None)
    return 0


def write(
    settings: Settings, store: Store, model: str, variants: Sequence[str] | None, *, compared: bool = False
) -> None:
    """Collect results, write the report and the model cards, log them to MLflow, and print the paths, the HTML last.

    Args:
        settings: the report's folder, and the acceptable loss of accuracy.
        store: contains the results.
        model: label of the model.
        variants: formats in the order to show; None is every format in the store.
        compared: whether to print the comparison of the formats too.

    Raises:
        UserError: there is nothing to report, or the folder or the store of MLflow cannot be written.
    """
    loss = settings.report.max_accuracy_loss_percent
    data = with_models(collect(store, model, variants, Criteria.of(settings.eval)), settings, store.root)
    folder = settings.report.folder / model
    paths, cards = write_report(data, folder, loss), write_model_cards(data, folder)
    if compared:
        say("\n" + comparison_text(comparison(data, loss)))
    say(f"\nreport: {relative_to_cwd(paths.markdown.absolute())}")
    for card in cards.values():
        say(f"model card: {relative_to_cwd(card.absolute())}")
    if settings.report.mlflow is not None:
        for line in log_runs(data, settings.report.mlflow, (paths.markdown, paths.html, *paths.plots), cards):
            say(line)
    say(f"report: {relative_to_cwd(paths.html.absolute())}")


def write_report(data: ReportData, folder: Path, max_accuracy_loss_percent: float = 1.0) -> ReportPaths:
    """Write the report of a store.

    Args:
        data: result of `pipelines.report.collect`.
        folder: is created if necessary.
        max_accuracy_loss_percent: a format that loses more is not recommended.

    Raises:
        UserError: the folder cannot be written.
    """
    return write_document(document(data, max_accuracy_loss_percent), folder)
