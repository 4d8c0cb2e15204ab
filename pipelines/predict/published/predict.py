"""Predict published measurements: `python -m pipelines.predict.published.predict --cases FILE.csv --out FILE.csv`.

Reads the columns of `data/published.csv.gz` and writes them with predicted, low and high (an interval
that held 80 % of measurements in cross-validation, same unit as the metric), provenance (fitted, transferred,
datasheet) and reason (why a row was refused; its prediction is then empty). Rows keep their order. The measured `value`
is not read.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.errors import UserError
from pipelines.host.files import replacing
from pipelines.predict.performance.parameters import PRIORS, Parameters
from pipelines.predict.performance.performance import SPREAD, WIDER, PerformanceModel
from pipelines.predict.published.bench import SIMULATED, StackedCases
from pipelines.predict.published.cases import PUBLISHED, PublishedCase, case_of, read_rows
from pipelines.predict.published.neighbours import NORMAL_80, Kernel, block_of, correct, points

ADDED = ("predicted", "low", "high", "provenance", "reason")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for one row; NaN and a reason if the row is refused."""

    value: float
    low: float
    high: float
    provenance: str
    reason: str


def predict(rows: Sequence[Mapping[str, str]], tell: Callable[[], None] = lambda: None) -> list[Prediction]:
    """Predict each row.

    Args:
        rows: rows of a CSV file, see `pipelines.predict.published.cases.COLUMNS`.
        tell: called after each simulated row.
    """
    nothing = float("nan")
    found: list[Prediction | None] = [None] * len(rows)
    cases: dict[int, PublishedCase] = {}
    for index, row in enumerate(rows):
        try:
            cases[index] = case_of(row)
        except UserError as error:
            found[index] = Prediction(nothing, nothing, nothing, "", str(error))
    if cases:
        model = PerformanceModel.load()
        logs, spread = predict_cases(list(cases.values()), model.parameters, tell)
        for (index, case), log, width in zip(cases.items(), logs, spread, strict=True):
            low, value, high = np.exp([log - NORMAL_80 * width, log, log + NORMAL_80 * width])
            found[index] = Prediction(float(value), float(low), float(high), model.provenance(case.setup)[0], "")
    return [each for each in found if each is not None]


def predict_cases(cases: Sequence[PublishedCase], parameters: Parameters, tell: Callable[[], None]) -> tuple[Any, Any]:
    """Return log(predicted) of each case and its standard deviation, float64[cases] each."""
    bench = StackedCases(cases, tell)
    logs = bench.log_predicted(values_of(bench, parameters))
    spread = np.array([_usual(case) for case in cases])
    neighbours: Mapping[str, Any] = parameters.document.get("neighbours", {})
    blocks = np.array([block_of(case) for case in cases])
    measured = published() if neighbours else {}
    for block, taught in neighbours.items():
        asked = np.flatnonzero(blocks == block)
        if not len(asked):
            continue
        codes: dict[tuple[int, str], int] = {}
        known = points([measured[name] for name in taught["errors"]], codes)
        errors = np.array(list(taught["errors"].values()))
        mean, variance = correct(Kernel(**taught["kernel"]), known, errors, points([cases[i] for i in asked], codes))
        logs[asked] += mean
        spread[asked] = taught["scale"] * np.sqrt(variance)
    return logs, spread


def values_of(bench: StackedCases, parameters: Parameters) -> dict[str, Any]:
    """Return the parameters of each case as arrays."""
    each = {labels: parameters.values(labels) for labels in set(bench.labels)}
    return {name: np.array([each[labels][name] for labels in bench.labels]) for name in PRIORS}


def published() -> dict[str, PublishedCase]:
    """Return the public cases by id; the measured values in the file are not used."""
    return {row["case_id"]: case_of(row) for row in read_rows(PUBLISHED)}


def _usual(case: PublishedCase) -> float:
    metric = {"ttft_ms": "ttft", "tpot_ms": "itl", "itl_ms": "itl"}.get(case.metric, "throughput")
    return SPREAD[metric] * WIDER["transferred"]


def write(path: Path, rows: Sequence[Mapping[str, str]], predictions: Sequence[Prediction]) -> None:
    """Write rows and predictions; the file appears only when it is complete."""
    columns = [name for name in rows[0] if name not in ADDED] if rows else []
    with replacing(path) as fresh, fresh.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, [*columns, *ADDED], extrasaction="ignore")
        writer.writeheader()
        for row, each in zip(rows, predictions, strict=True):
            numbers = {"predicted": each.value, "low": each.low, "high": each.high}
            shown = {name: "" if np.isnan(number) else f"{number:.6g}" for name, number in numbers.items()}
            writer.writerow({**row, **shown, "provenance": each.provenance, "reason": each.reason})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.predict.published.predict", description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="CSV file of what was measured")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.cases)
        if not options.out.parent.is_dir():
            raise UserError(f"There is no folder {options.out.parent} to write {options.out.name} in.")
        with _bar(sum(1 for row in rows if row["mode"] in SIMULATED)) as tell:
            predictions = predict(rows, tell)
        write(options.out, rows, predictions)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    refused = sum(1 for each in predictions if each.reason)
    sys.stdout.write(f"{len(rows)} rows, {len(rows) - refused} predicted, {refused} refused: {options.out}\n")
    return 0


class _bar:  # noqa: N801
    """Show a progress bar on stderr if that is a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.task = self.progress.add_task("simulating", total=total)

    def __enter__(self) -> Callable[[], None]:
        self.progress.start()
        return lambda: self.progress.advance(self.task)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


if __name__ == "__main__":
    raise SystemExit(main())
