"""Print how far predictions are off for measurements that were not fitted to: `python -m scripts.published.judge`.

- Published rows: each predicted by a fit that its configuration was left out of (cross_validation.csv.gz).
- Two replayed traces and full loads of mixtures (`data/kept_apart.csv`), and the 89 stages of `stages`: in no fit.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.errors import UserError
from pipelines.host.screen import table
from pipelines.predict.performance.performance import PerformanceModel
from scripts.published import stages
from scripts.published.cases import PUBLISHED, read_rows
from scripts.published.predict import predict
from scripts.published_fit.accuracy import validated

KEPT = Path(__file__).parent / "data" / "kept_apart.csv"
MODES = {
    "closed loop": ("closed_loop_concurrency",),
    "MLPerf server": ("mlperf_server", "mlperf_interactive"),
    "trace": ("open_loop_trace",),
}
NAMES = {"ttft_ms": "TTFT", "tpot_ms": "ITL", "itl_ms": "ITL", "e2e_ms": "E2E"}
Errors = dict[str, list[tuple[float, bool]]]
"""By name: predicted / measured - 1, and whether the 80 % interval holds the measurement."""


def published() -> Errors:
    """Return the errors of latencies in cross-validation, by mode and metric."""
    by_case, errors = validated(), defaultdict(list)
    for row in read_rows(PUBLISHED):
        mode = next((name for name, modes in MODES.items() if row["mode"] in modes), None)
        if mode and row["metric"] in NAMES and (each := by_case.get(row["case_id"])):
            value, predicted, low, high = map(float, (row["value"], each["predicted"], each["low"], each["high"]))
            errors[f"{mode}, {NAMES[row['metric']]}"].append((predicted / value - 1, low <= value <= high))
    return errors


def repeated() -> list[float]:
    """Return the errors of MLPerf's server TTFT by the median of others with one GPU, count, model and format."""
    alike = defaultdict(list)
    for row in read_rows(PUBLISHED):
        if row["mode"] in MODES["MLPerf server"] and row["metric"] == "ttft_ms":
            key = ("source", "mode", "model", "gpu", "n_gpus", "precision", "stat")
            alike[tuple(row[name] for name in key)].append(float(row["value"]))
    alike = {key: values for key, values in alike.items() if len(values) > 1}
    return [
        abs(np.median([*values[:at], *values[at + 1 :]]) / value - 1)
        for values in alike.values()
        for at, value in enumerate(values)
    ]


def kept_apart() -> tuple[Errors, list[str]]:
    """Return the errors of traces and mixtures that no fit has seen, by metric, and reasons of refused rows."""
    rows, errors = read_rows(KEPT), defaultdict(list)
    predictions = predict(rows)
    for row, each in zip(rows, predictions, strict=True):
        if not each.reason:
            value = float(row["value"])
            whole = row["mode"] == "inflight_maxload"
            name = f"full load, {row['model']}" if whole else f"trace kept apart, {NAMES[row['metric']]}"
            errors[name].append((each.value / value - 1, each.low <= value <= each.high))
    return errors, [each.reason for each in predictions if each.reason]


def open_loop(rows: Iterable[Mapping[str, str]], **options: Any) -> tuple[Errors, list[str]]:
    """Return the errors of stages by metric, and reasons of refused stages."""
    errors, refused, model = defaultdict(list), [], PerformanceModel.load()
    for row in rows:
        try:
            prediction = stages.predict(row, model, **options)
        except UserError as error:
            refused.append(str(error))
            continue
        values = {name: float(row[name]) for name in stages.METRICS}
        # ignore_eos: every answer has the tokens asked for, which the benchmark counts again in the text
        osl = stages.WORKLOADS[row["workload"]].osl
        values["itl_asked"] = (values["e2e_mean"] - values["ttft_mean"]) / (osl - 1)
        for name, value in values.items():
            predicted, low, high = prediction["itl_mean" if name == "itl_asked" else name]
            errors[f"stages, {LABELS[name]}"].append((predicted / value - 1, low <= value <= high))
    return errors, refused


LABELS = {
    "ttft_mean": "TTFT", "ttft_p99": "TTFT P99", "e2e_mean": "E2E", "e2e_p99": "E2E P99",
    "itl_mean": "ITL as published", "itl_asked": "ITL per token asked for",
}  # fmt: skip


def lines(errors: Errors) -> Iterator[tuple[str, ...]]:
    """Return table rows: name, n, median and mean of the absolute error, median error, share in the interval, %."""
    for name, pairs in errors.items():
        off, held = 100 * np.array([error for error, _ in pairs]), 100 * np.mean([inside for _, inside in pairs])
        middle, mean, bias = np.median(abs(off)), np.mean(abs(off)), np.median(off)
        yield name, str(len(off)), f"{middle:.1f}", f"{mean:.1f}", f"{bias:+.1f}", f"{held:.0f}"


def main() -> None:
    """Print the table."""
    rows, spread = stages.rows("judge"), 100 * np.array(repeated())
    kept, refused = kept_apart()
    staged, refused_stages = open_loop(rows)
    head = ("not fitted to", "n", "median", "mean", "bias", "in 80 %")
    text = table([head, *lines({**published(), **kept, **staged})])
    text.append(f"refused: {len(refused)} rows kept apart, {len(refused_stages)} of {len(rows)} stages")
    text += sorted({*refused, *refused_stages})
    text.append(
        f"MLPerf server TTFT by the others with one GPU, count, model and format: {np.median(spread):.1f} / "
        f"{np.mean(spread):.1f} % (median / mean, n = {len(spread)})"
    )
    sys.stdout.write("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
