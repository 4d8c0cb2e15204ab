"""Fit the performance model to the published measurements, cross-validate it, and write the result.

    python -m scripts.published_fit --transfer                 # everything: about half an hour on one core
    python -m scripts.published_fit --steps 1                  # change the fit very little, validate again
    python -m scripts.published_fit.accuracy_docs              # docs/sizing.md from the result

Reads scripts/published/data/published.csv.gz (public measurements, each with its source) and the current
pipelines/predict/performance/parameters.json (the starting point of the fit). Writes that file, which sizing and
`python -m scripts.published.predict` use, and next to this script cross_validation.csv.gz and validation.json.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pipelines.host.files import write_bytes, write_json
from pipelines.predict.performance.performance import WIDER, PerformanceModel
from pipelines.predict.performance.physics import BOUNDS, FILE, Parameters
from scripts.published.bench import StackedCases
from scripts.published.cases import PUBLISHED, PublishedCase, published_cases
from scripts.published.predict import NORMAL_80, VALIDATION, trace_interval, values_of
from scripts.published_fit.accuracy import ENOUGH_ROWS_OF_FAMILY, VALIDATED
from scripts.published_fit.crossvalidation import Neighbours, folds, refit, score
from scripts.published_fit.fit import Design, Fitted, fit
from scripts.published_fit.priors import PRIORS

STEP = 0.04
"""Step of the finite differences: simulated closed loops are not smooth at smaller steps."""
LEAST_GPUS = 3
"""GPUs from which a family has a spread of its own."""
KINDS_LEFT_OUT = ("gpu", "model", "version")
PROFILED = "llmservingsim-profile"
"""Source of rows that are sums of kernels: no server was measured, so they say nothing about the errors of one."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfer", action="store_true", help="to unseen models and versions too, not only GPUs")
    parser.add_argument("--steps", type=int, default=8, help="maximum number of steps of the fit")
    parser.add_argument(
        "--only", metavar="PATTERN", help="fit only what matches PARAMETER LABEL; the rest stays as it is"
    )
    return parser.parse_args()


def main() -> None:
    """Fit, validate and write the result."""
    options = arguments()
    rows, cases, measured = published_cases()
    bench = StackedCases(cases)
    design = Design.of(bench.labels)
    began = time.monotonic()

    def tell(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:6.0f} s  {text}\n")

    fitted = fit_of(options, design, bench, measured, tell)
    errors = -fitted.residuals
    neighbours = Neighbours.fit(bench, errors)
    tell("kernels fitted")
    fold = folds([row["group_id"] for row in rows])
    physics, corrected, spread = validate(design, bench, fitted, neighbours, np.log(measured), fold, tell)
    scale = scales(neighbours.block, corrected, spread)
    spread *= np.array([scale.get(name, 1.0) for name in neighbours.block])
    log_measured = np.log(measured)
    kinds = KINDS_LEFT_OUT if options.transfer else ("gpu",)  # intervals need the GPUs
    scores, unseen = transfer(design, bench, fitted, neighbours, log_measured, kinds, tell)
    scores = json.loads(VALIDATION.read_text(encoding="utf-8"))["transfer"] | scores
    usual = spreads(bench, physics, unseen)
    low, high = (corrected + side * NORMAL_80 * spread for side in (-1, 1))
    model = PerformanceModel(replace(design.parameters(fitted.theta), document={"spread": usual}))
    traces = np.flatnonzero(neighbours.block == "")
    for end, ratios in zip((low, high), trace_ratios([cases[index] for index in traces], model), strict=True):
        end[traces] = corrected[traces] + ratios
    document = {
        "made_by": "scripts/published_fit",
        "data": {
            "file": PUBLISHED.name,
            "sha256": hashlib.sha256(PUBLISHED.read_bytes()).hexdigest(),
            "rows": len(rows),
        },
        "parameters": parameters_of(design, fitted),
        "labels": labels_of(bench, [row["group_id"] for row in rows]),
        "spread": usual,
        "mixtures": Parameters.load().document["mixtures"],
    }
    write_json(FILE, document, sort_keys=False)
    validation = {
        "neighbours": {
            name: {"kernel": asdict(kernel), "scale": scale[name]} for name, kernel in neighbours.kernels.items()
        },
        "transfer": scores,
        "of_an_earlier_fit": [] if options.transfer else ["transfer"],
    }
    write_json(VALIDATION, validation, sort_keys=False)
    write_validated(rows, measured, np.exp([physics, corrected, low, high]))
    tell(f"wrote {FILE}")


def fit_of(options: argparse.Namespace, design: Design, bench: StackedCases, measured: Any, tell: Any) -> Fitted:
    """Fit from the current parameters; with `--only`, the rest stays as it is."""
    start, steps = design.theta(Parameters.load()), options.steps
    if options.only:
        chosen = np.array([bool(re.search(options.only, " ".join(column))) for column in design.columns])
        part, begin = design.only(chosen, start), start[chosen]
        some = fit(part, bench.log_predicted, measured, start=begin, steps=steps, difference=STEP, tell=tell)
        start[chosen], steps = some.theta, 0
    return fit(design, bench.log_predicted, measured, start=start, steps=steps, difference=STEP, tell=tell)


def validate(
    design: Design, bench: StackedCases, fitted: Fitted, neighbours: Neighbours, log_measured: Any, fold: Any, tell: Any
) -> tuple[Any, Any, Any]:
    """Return log(predicted / measured) by the formula and with neighbours, and its expected spread.

    Each row is predicted by a fit that it was left out of.
    """
    physics, corrected, spread = (np.zeros(len(fold)) for _ in range(3))
    for number in sorted(set(fold)):
        kept = fold != number
        residuals = refit(design, bench, fitted, log_measured, kept)
        correction, width = neighbours.correct(residuals, kept)
        physics[~kept], corrected[~kept], spread[~kept] = residuals[~kept], correction[~kept], width[~kept]
        tell(f"fold {number} left out")
    return physics, corrected, spread


def trace_ratios(cases: Sequence[PublishedCase], model: PerformanceModel) -> tuple[Any, Any]:
    """Return the logarithms of the ends of the intervals of traces over what is predicted, float64[cases] each.

    In cross-validation their GPU is left out with them.
    """
    bench = StackedCases(cases)
    value = bench.log_predicted(values_of(bench, model.parameters))
    low, high = trace_interval(cases, model, ["transferred"] * len(cases))
    return low - value, high - value


def scales(block: Any, corrected: Any, spread: Any) -> dict[str, float]:
    """Return by block the factor with which the expected spread covers 80 % of the errors in cross-validation."""
    names = sorted(set(block) - {""})
    return {name: round(of_80(corrected[block == name] / spread[block == name]), 4) for name in names}


def of_80(errors: Any) -> float:
    """Return the standard deviation with which a normal 80 % interval holds the next error in eight of ten cases.

    That is split conformal prediction: a quantile a little above 80 %, because the errors are few.
    """
    level = min(np.ceil(0.8 * (len(errors) + 1)) / len(errors), 1.0)
    return float(np.quantile(np.abs(errors), level, method="higher")) / NORMAL_80


def parameters_of(design: Design, fitted: Fitted) -> dict[str, Any]:
    """Return shared values with 90 % intervals (from the covariance of the fit) and offsets."""
    parameters, before = design.parameters(fitted.theta), Parameters.load().shared
    # fitted on their own afterwards (mixtures.py), to rows that are not in this design
    fitted_here = {label for _, label in design.columns}
    of_mixtures = {
        name: {label: value for label, value in offsets.items() if label not in fitted_here}
        for name, offsets in Parameters.load().offsets.items()
    }
    same = {
        name: before[name]
        for name, value in parameters.shared.items()
        if math.isclose(value, before.get(name, math.nan), rel_tol=1e-12)
    }
    parameters = replace(parameters, shared={**parameters.shared, **same})  # not rounded again by the logarithm
    width = dict(zip(design.columns, 1.645 * np.sqrt(np.diag(fitted.covariance)), strict=True))
    return {
        name: {
            "value": parameters.shared[name],
            "low": max(BOUNDS[name][0], parameters.shared[name] * float(np.exp(-width[name, ""]))),
            "high": min(BOUNDS[name][1], parameters.shared[name] * float(np.exp(width[name, ""]))),
            "about": prior.about,
            "offsets": {
                **of_mixtures.get(name, {}),
                **{label: round(value, 4) for label, value in parameters.offsets[name].items() if abs(value) > 5e-4},
            },
        }
        for name, prior in PRIORS.items()
    }


def labels_of(bench: StackedCases, groups: Sequence[str]) -> dict[str, int]:
    """Count rows by label; served configurations by GPU and family, and by mixture or dense and family, together."""
    counts = Counter(label for labels in bench.labels for label in labels)
    both = {
        (f"{own}+family={case.setup.runs_on.family}", group)
        for case, group in zip(bench.cases, groups, strict=True)
        for own in (f"gpu={case.setup.gpu.name}", case.setup.kind)
        if case.source != PROFILED
    }
    counts.update(label for label, _ in both)
    return dict(sorted(counts.items()))


def spreads(bench: StackedCases, physics: Any, unseen: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Return by family ("all": of any), metric and provenance the spread of log(predicted / measured), formula alone.

    A family that has too few rows of a metric, or was measured on too few GPUs, has none of it. Errors on a GPU that
    was left out are alike, so that every GPU counts the same, however many rows it has.
    """
    of = {"ttft": ("ttft_ms", "prefill_batch_ms"), "itl": ("tpot_ms", "itl_ms")}
    of["throughput"] = ("output_tok_s", "output_tok_s_per_gpu", "requests_s")
    family = np.array([case.setup.runs_on.family for case in bench.cases])
    gpu = np.array([case.setup.gpu.name for case in bench.cases])
    # what submitters chose is not known, and the times of a saturated trace are mostly its queue's
    steady = ~np.isin(bench.mode, ("mlperf_server", "mlperf_interactive"))
    steady &= np.array([case.source != PROFILED for case in bench.cases])  # a server's time is more than its kernels
    steady &= (bench.mode != "open_loop_trace") | (bench.metric == "tpot_ms")
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, metrics in of.items():
        for each in ("all", *sorted(set(family))):
            at = np.isin(bench.metric, metrics) & steady & ((family == each) | (each == "all"))
            if at.sum() < ENOUGH_ROWS_OF_FAMILY:
                continue
            rows = Counter(gpu[at])
            if len(rows) < LEAST_GPUS:
                continue
            order = np.argsort(np.abs(unseen[at]))
            share = np.cumsum([1 / rows[one] / len(rows) for one in gpu[at][order]])
            other = float(np.abs(unseen[at])[order][np.searchsorted(share, 0.8)]) / NORMAL_80
            fitted = of_80(physics[at])
            kinds = {"fitted": round(fitted, 4), "transferred": round(max(other, fitted), 4)}
            kinds["datasheet"] = round(kinds["transferred"] * WIDER["datasheet"] / WIDER["transferred"], 4)
            result.setdefault(each, {})[name] = kinds
    return result


def transfer(
    design: Design, bench: StackedCases, fitted: Fitted, neighbours: Neighbours, log_measured: Any,
    kinds: Sequence[str], tell: Any,
) -> tuple[dict[str, dict[str, dict[str, float]]], Any]:  # fmt: skip
    """Score rows whose whole GPU, model or version was left out; also return the formula's errors on unseen GPUs."""
    setups = [case.setup for case in bench.cases]
    all_of = {
        "gpu": [setup.gpu.name for setup in setups],
        "model": [setup.model.name for setup in setups],
        "version": [setup.runs_on.name for setup in setups],
    }
    of = {kind: all_of[kind] for kind in kinds}
    scores: dict[str, dict[str, dict[str, float]]] = {}
    unseen = np.zeros(len(log_measured))
    value = np.exp(log_measured)
    for kind, words in of.items():
        names, scores[kind], errors = np.array(words), {}, np.zeros(len(log_measured))
        for name in sorted(set(words)):
            left = names == name
            residuals = refit(design, bench, fitted, log_measured, ~left)
            corrected, _ = neighbours.correct(residuals, ~left)
            errors[left] = corrected[left]
            scores[kind][name] = score(corrected[left], value[left] * np.exp(corrected[left]), value[left])
            unseen[left] = residuals[left] if kind == "gpu" else unseen[left]
            tell(f"{name} left out: median {scores[kind][name]['median']:.1f}")
        scores[kind]["all"] = score(errors, value * np.exp(errors), value)
    return scores, unseen


def write_validated(rows: Any, measured: Any, ratios: Any) -> None:
    """Write one row per case with its cross-validated predictions.

    Args:
        rows: the cases.
        measured: float64[cases].
        ratios: by the formula, with neighbours, and ends of the interval, over the measured value, float64[4, cases].
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case_id", "measured", "formula", "predicted", "low", "high"])
    for row, value, numbers in zip(rows, measured, (ratios * measured).T, strict=True):
        writer.writerow([row["case_id"], value, *(f"{number:.5g}" for number in numbers)])
    write_bytes(VALIDATED, gzip.compress(text.getvalue().encode(), mtime=0))


if __name__ == "__main__":
    main()
