"""The commands `sweep` and `compare`: run the cells, then show one table. A failed cell does not stop the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.config import EvalSettings
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_json
from pipelines.host.screen import say, table
from pipelines.run.console import ResultTable, comparison, unasked_table
from pipelines.settings.compose import load
from pipelines.store.store import Store, recover
from pipelines.sweep.cells import SweepCell
from pipelines.sweep.launch import run_cells

CRITERIA = ("eval.baseline=", "eval.margin_points=", "eval.false_go=", "eval.power=")
"""Overrides that say what a table compares with, and when a loss is acceptable."""


def sweep(overrides: Sequence[str]) -> int:
    """Evaluate every combination and print one table.

    Returns:
        0, 1 when a cell failed, or 4 when a loss could not be measured.

    Raises:
        UserError: Hydra cannot compose the combinations.
    """
    settings = load(_single(overrides))
    folder, cells = run_cells("evaluate", overrides)
    good = [cell for cell in cells if cell.state == "done"]
    table = _judged(good, settings.eval)
    say("\n" + table.text if good else "\nNo cell finished.")
    write_json(folder / "accuracy.json", table.rows)
    return _close(folder, cells) or table.exit_code


def compare(overrides: Sequence[str]) -> int:
    """Run everything for each combination, then show one table, one plot and one report per model.

    Returns:
        0, 1 when a cell failed, or 4 when a loss could not be measured.
    """
    from pipelines.report.report_command import write
    from pipelines.report.stored import earlier_numbers

    settings = load(_single(overrides))
    check_folders(settings.report.written)
    earlier_numbers(settings.report.against)
    folder, cells = run_cells("all", overrides)
    store = Store(settings.paths.store)
    recover(store)
    measured = [cell for cell in cells if cell.artifacts]
    code = _close(folder, cells)
    for model in dict.fromkeys(cell.model for cell in measured):
        variants = dict.fromkeys(cell.variant for cell in measured if cell.model == model)
        write(settings, store, model, list(variants), compared=True)
    if unasked := [(cell.model, cell.variant) for cell in measured if cell.is_unasked]:
        say("\n" + unasked_table(unasked).text)
    return code or _judged(measured, settings.eval).exit_code


def _judged(cells: Sequence[SweepCell], settings: EvalSettings) -> ResultTable:
    unasked = [(cell.model, cell.variant) for cell in cells if cell.is_unasked]
    pairs = [(cell.baseline, cell.after) for cell in cells if "evaluate" in cell.artifacts]
    tables = [comparison(pairs, settings)] if pairs or not unasked else []
    tables += [unasked_table(unasked)] if unasked else []
    return ResultTable.joined(tables)


def _single(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have a single value: folders and criteria are the same for every cell."""
    return [text for text in overrides if text.startswith(("paths.", "report.", "sizing.prices.", *CRITERIA))]


def _close(folder: Path, cells: Sequence[SweepCell]) -> int:
    failed = [cell for cell in cells if cell.state == "failed"]
    if failed:
        logs = [(cell, cell.log(folder)) for cell in failed]
        rows = [
            (
                f"[{cell.number}] {cell.words}",
                f"{cell.reason}; log: {relative_to_cwd(log)}" if log.is_file() else cell.reason,
            )
            for cell, log in logs
        ]
        say("\nfailed cells:\n" + "\n".join(table(rows, text_columns=(1,))))
        say("Run the same command again to finish what is missing.")
    say(f"\nsweep: {relative_to_cwd(folder)}")
    return 1 if failed else 0
