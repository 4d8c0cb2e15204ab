"""Predict published measurements: `python -m scripts.published.predict --cases FILE.csv --out FILE.csv`.

Reads the columns of `data/published.csv.gz` and writes them with predicted, low and high (an interval
that held 80 % of measurements in cross-validation, same unit as the metric), provenance (fitted, transferred,
datasheet) and reason (why a row was refused; its prediction is then empty). Rows keep their order. The measured `value`
is not read.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from pipelines.domain.errors import UserError
from pipelines.host.files import replacing
from pipelines.predict.performance.performance import MIXTURES_OF, SPREAD, WIDER, PerformanceModel, Provenance
from pipelines.predict.performance.physics import BOUNDS, Parameters
from scripts.published.bench import SIMULATED, StackedCases
from scripts.published.cases import PublishedCase, case_of, published_cases, read_rows

# Correct a prediction with the errors of similar measurements, fading with distance.
#
# Similar cases share errors that the formula of `performance.physics` leaves: a kernel that is slow at one shape, a
# scheduler's habit. This is Gaussian-process regression ("kriging") of log(measured / predicted): the correction of a
# case is a weighted mean of the errors of measured cases of the same kind, with weights that fall with the distance in
# log(input tokens), log(output tokens), log(ranks), log(requests together) and with each of framework, GPU, model and
# format that differs. Far from all measurements it is 0, and the interval is as wide as without correction.

VALIDATION = Path(__file__).parents[1] / "published_fit" / "validation.json"
"""What scripts/published_fit found beside the parameters: kernels of neighbours, errors of what was left out."""
SMOOTH = ("isl", "osl", "tp", "load")
"""Features compared by distance, as logarithms."""
KINDS = ("framework", "family", "gpu", "model", "form", "metric", "mode")
"""Features compared for equality."""
MIXTURES = "full load, mixtures"
"""The block of cases that are predicted by the formula alone."""
LIMIT = 1.5
"""Upper bound on errors: those beyond a factor of 4.5 are outliers and count as 4.5."""
NORMAL_80 = 1.2816
"""Half-width of the interval that holds 80 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class Points:
    """Cases as features for the kernel.

    Attributes:
        smooth: float64[n, 4], logarithms of `SMOOTH`.
        kinds: int64[n, 7], codes of `KINDS`.
    """

    smooth: Any
    kinds: Any

    def rows(self, index: Any) -> Points:
        """Select rows."""
        return Points(self.smooth[index], self.kinds[index])


@dataclass(frozen=True, slots=True)
class Kernel:
    """Similarity of two cases.

    Attributes:
        near: variance that fades with the distance.
        far: variance that depends only on what is equal.
        noise: variance of a single measurement.
        lengths: length scales of `SMOOTH`, in logarithms.
        alike: for each of `KINDS`, the correlation that remains when it differs.
    """

    near: float
    far: float
    noise: float
    lengths: tuple[float, ...]
    alike: tuple[float, ...]

    def between(self, left: Points, right: Points) -> Any:
        """Compute covariances, float64[left, right]."""
        scaled = [points.smooth / np.array(self.lengths) for points in (left, right)]
        square = ((scaled[0][:, None, :] - scaled[1][None, :, :]) ** 2).sum(-1)
        equal = np.ones(square.shape)
        for index, share in enumerate(self.alike):
            equal *= np.where(left.kinds[:, None, index] == right.kinds[None, :, index], 1.0, share)
        return equal * (self.near * np.exp(-0.5 * square) + self.far)


def correct(kernel: Kernel, measured: Points, errors: Any, cases: Points) -> tuple[Any, Any]:
    """Return the expected error and its variance (of the case, measurement noise included), float64[cases] each.

    `errors` are log(measured / predicted) of the measured cases.
    """
    clipped = np.clip(errors, -LIMIT, LIMIT)
    covariance = kernel.between(measured, measured) + kernel.noise * np.eye(len(clipped))
    cross = kernel.between(cases, measured)
    weights = np.linalg.solve(covariance, np.column_stack([clipped, cross.T]))
    mean = cross @ weights[:, 0]
    variance = kernel.near + kernel.far + kernel.noise - (cross * weights[:, 1:].T).sum(1)
    return mean, np.maximum(variance, kernel.noise)


def block_of(case: PublishedCase) -> str:
    """Return the block of a case. Errors within a block are of one kind; nothing is learnt across blocks.

    Full loads: by runtime. Static batches: by source and by whether they prefill. Closed loops: by framework family,
    fixed or drawn lengths, and metric. MLPerf: by metric. Traces have none, because two configurations teach nothing.
    """
    rate = case.metric in ("output_tok_s", "output_tok_s_per_gpu", "requests_s")
    framework = case.setup.runs_on
    if case.mode == "open_loop_trace":
        return ""
    if case.mode == "inflight_maxload":
        # the formula of mixtures is fitted to mixtures, and the errors of dense models say nothing about it
        mixtures = framework.family == MIXTURES_OF and case.setup.model.num_experts > 1
        return MIXTURES if mixtures else f"full load, {framework.engine}"
    if case.mode == "static_batch":
        if case.source == "splitwise-sim":
            return "static, Splitwise"
        return "static, prefill" if case.metric in ("ttft_ms", "prefill_batch_ms") else "static, rate"
    kind = {"ttft_ms": "TTFT", "e2e_ms": "E2E"}.get(case.metric, "rate" if rate else "ITL")
    if case.mode == "closed_loop_concurrency":
        return f"closed loop, {framework.family}, {'drawn' if case.randomised else 'fixed'} lengths, {kind}"
    return f"MLPerf, {kind}"


def points(cases: Sequence[PublishedCase], codes: dict[tuple[int, str], int]) -> Points:
    """Convert cases to features; `codes` numbers the words and grows."""
    smooth = [[case.isl, case.osl, case.setup.tp, case.users or case.batch or 1] for case in cases]
    kinds = [[codes.setdefault((at, word), len(codes)) for at, word in enumerate(_words(case))] for case in cases]
    return Points(np.log(np.array(smooth, float)).reshape(-1, len(SMOOTH)), np.array(kinds).reshape(-1, len(KINDS)))


def _words(case: PublishedCase) -> tuple[str, ...]:
    setup = case.setup
    same = {"itl_ms": "tpot_ms", "output_tok_s_per_gpu": "output_tok_s", "requests_s": "output_tok_s"}
    metric = f"{same.get(case.metric, case.metric)} {'p99' if case.stat == 'p99' else ''}"
    form = setup.qformat.value
    return (setup.runs_on.name, setup.runs_on.family, setup.gpu.name, setup.model.name, form, metric, case.mode)


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
    """Predict each row of a CSV file with `cases.COLUMNS`; `tell` is called after each simulated row."""
    nothing = float("nan")
    predictions: list[Prediction | None] = [None] * len(rows)
    cases: dict[int, PublishedCase] = {}
    for index, row in enumerate(rows):
        try:
            cases[index] = case_of(row)
        except UserError as error:
            predictions[index] = Prediction(nothing, nothing, nothing, "", str(error))
    if cases:
        model = PerformanceModel.load()
        logs = predict_cases(list(cases.values()), model, tell)
        for (index, case), log in zip(cases.items(), np.transpose(logs), strict=True):
            value, low, high = np.exp(log)
            predictions[index] = Prediction(float(value), float(low), float(high), model.provenance(case.setup)[0], "")
    return [each for each in predictions if each is not None]


def predict_cases(
    cases: Sequence[PublishedCase], model: PerformanceModel, tell: Callable[[], None]
) -> tuple[Any, Any, Any]:
    """Return log(predicted) of each case, and of the ends of its interval, float64[cases] each."""
    bench = StackedCases(cases, tell)
    logs = bench.log_predicted(values_of(bench, model.parameters))
    usual = {"ttft_ms": SPREAD["ttft"], "tpot_ms": SPREAD["itl"], "itl_ms": SPREAD["itl"]}
    spread = np.array([usual.get(case.metric, SPREAD["throughput"]) * WIDER["transferred"] for case in cases])
    blocks = np.array([block_of(case) for case in cases])
    spread[blocks == MIXTURES] = model.mixtures["spread"]
    _, published, measured = published_cases()
    public = np.array([block_of(case) for case in published])
    for block, fitted in json.loads(VALIDATION.read_text(encoding="utf-8"))["neighbours"].items():
        indices, known = np.flatnonzero(blocks == block), np.flatnonzero(public == block)
        if not len(indices):
            continue
        near, codes = StackedCases([published[index] for index in known]), dict[tuple[int, str], int]()
        errors = np.log(measured[known]) - near.log_predicted(values_of(near, model.parameters))
        kernel, those = Kernel(**fitted["kernel"]), points([cases[index] for index in indices], codes)
        mean, variance = correct(kernel, points(near.cases, codes), errors, those)
        logs[indices] += mean
        spread[indices] = fitted["scale"] * np.sqrt(variance)
    low, high = logs - NORMAL_80 * spread, logs + NORMAL_80 * spread
    traces = np.flatnonzero(blocks == "")
    if len(traces):
        some = [cases[index] for index in traces]
        low[traces], high[traces] = trace_interval(some, model, [model.provenance(case.setup)[0] for case in some])
    return logs, low, high


def trace_interval(
    cases: Sequence[PublishedCase], model: PerformanceModel, provenances: Sequence[Provenance]
) -> tuple[Any, Any]:
    """Return logarithms of the ends of the intervals of traces, float64[cases] each.

    They are what a faster and a slower engine would give, off by the model's usual error in ITL: the nearer to
    saturation, the more the queue makes of it.
    """
    usual = [
        model.spread(each, case.setup.runs_on.family)["itl"] for each, case in zip(provenances, cases, strict=True)
    ]
    ends = []
    for side in (-1, 1):
        bench = StackedCases(cases, slower=np.exp(side * NORMAL_80 * np.array(usual)))
        ends.append(bench.log_predicted(values_of(bench, model.parameters)))
    return ends[0], ends[1]


def values_of(bench: StackedCases, parameters: Parameters) -> dict[str, Any]:
    """Return the parameters of each case as arrays."""
    each = {labels: parameters.values(labels) for labels in set(bench.labels)}
    return {name: np.array([each[labels][name] for labels in bench.labels]) for name in BOUNDS}


def write(path: Path, rows: Sequence[Mapping[str, str]], predictions: Sequence[Prediction]) -> None:
    """Write rows and predictions; the file appears only when it is complete."""
    columns = [name for name in rows[0] if name not in ADDED] if rows else []
    with replacing(path) as fresh, fresh.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, [*columns, *ADDED], extrasaction="ignore")
        writer.writeheader()
        for row, each in zip(rows, predictions, strict=True):
            numbers = {"predicted": each.value, "low": each.low, "high": each.high}
            cells = {name: "" if np.isnan(number) else f"{number:.6g}" for name, number in numbers.items()}
            writer.writerow({**row, **cells, "provenance": each.provenance, "reason": each.reason})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.published.predict", description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="CSV file of what was measured")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.cases)
        if not options.out.parent.is_dir():
            raise UserError(f"There is no folder {options.out.parent} to write {options.out.name} in.")
        bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        with bar:
            task = bar.add_task("simulating", total=sum(row["mode"] in SIMULATED for row in rows))
            predictions = predict(rows, lambda: bar.advance(task))
        write(options.out, rows, predictions)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    refused = sum(1 for each in predictions if each.reason)
    sys.stdout.write(f"{len(rows)} rows, {len(rows) - refused} predicted, {refused} refused: {options.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
