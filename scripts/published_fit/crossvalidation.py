"""Cross-validation: the errors of predictions for measurements that were left out of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.published.bench import StackedCases
from scripts.published.predict import KINDS, SMOOTH, Kernel, Points, block_of, correct, points
from scripts.published_fit.fit import Design, Fitted, solve
from scripts.published_fit.kernels import fit_kernel

FOLDS = 5
KERNEL_ROWS = 700
"""Maximum number of rows of a block used to fit its kernel; more take much longer and change little."""
ENOUGH_ROWS = 20
"""Blocks with fewer rows are not corrected."""


def folds(groups: Sequence[str]) -> Any:
    """Return the fold of each row, int64[rows]; rows of a group share a fold, whatever their order."""
    names = sorted(set(groups))
    order = np.random.default_rng(0).permutation(len(names))
    of_group = {names[index]: number % FOLDS for number, index in enumerate(order)}
    return np.array([of_group[group] for group in groups])


def refit(design: Design, bench: StackedCases, fitted: Fitted, log_measured: Any, kept: Any, steps: int = 4) -> Any:
    """Return log(predicted / measured) of all rows by the formula fitted only to the kept rows.

    Parameters that no kept row determines return to their priors. A few steps from the fit to all rows, with its
    slopes, are enough, because the minimum without a few rows is near.

    Args:
        design: the design of the fit.
        bench: the cases of its rows.
        fitted: the fit to all rows.
        log_measured: logarithms of the measured values, float64[rows].
        kept: rows that are used, bool[rows].
        steps: maximum number of steps.
    """
    unknown = ~(design.members & kept).any(axis=1)
    start = np.where(unknown, design.mean, fitted.theta)
    _, _, residuals = solve(
        design,
        lambda theta: bench.log_predicted(design.values(theta)) - log_measured,
        lambda _: fitted.jacobian,
        start,
        kept,
        steps,
    )
    return residuals


@dataclass(frozen=True)
class Neighbours:
    """Blocks of cases with the kernels that correct their predictions."""

    block: Any
    points: Points
    kernels: Mapping[str, Kernel]

    @classmethod
    def fit(cls, bench: StackedCases, errors: Any) -> Neighbours:
        """Fit a kernel per block to log(measured / predicted)."""
        block = np.array([block_of(case) for case in bench.cases])
        fitted = points(bench.cases, {})
        kernels = {}
        for name in sorted(set(block) - {""}):
            rows = np.flatnonzero(block == name)
            if len(rows) < ENOUGH_ROWS:
                noise = float(np.mean(errors[rows] ** 2))
                kernels[name] = Kernel(0.0, 0.0, noise, (1.0,) * len(SMOOTH), (0.0,) * len(KINDS))
                continue
            rows = np.sort(np.random.default_rng(0).permutation(rows)[:KERNEL_ROWS])
            kernels[name] = fit_kernel(fitted.rows(rows), errors[rows])
        return cls(block, fitted, kernels)

    def correct(self, residuals: Any, kept: Any) -> tuple[Any, Any]:
        """Correct the rows not kept; return log(predicted / measured) and its expected standard deviation."""
        corrected, spread = residuals.copy(), np.full(len(residuals), np.nan)
        for name, kernel in self.kernels.items():
            measured, targets = (self.block == name) & kept, np.flatnonzero((self.block == name) & ~kept)
            if len(targets):
                of_known = self.points.rows(np.flatnonzero(measured))
                mean, variance = correct(kernel, of_known, -residuals[measured], self.points.rows(targets))
                corrected[targets] = residuals[targets] + mean
                spread[targets] = np.sqrt(variance)
        return corrected, spread


def score(residuals: Any, predicted: Any, measured: Any, covered: Any | None = None) -> dict[str, float]:
    """Return n, median, mean and 90th percentile of absolute errors, signed median (%), rank correlation, coverage."""
    errors = 100 * (np.exp(residuals) - 1)
    first, second = (np.argsort(np.argsort(each)) for each in (predicted, measured))
    correlation = float(np.corrcoef(first, second)[0, 1]) if len(errors) > 2 else float("nan")
    result = {
        "n": len(errors),
        "median": float(np.median(np.abs(errors))),
        "mape": float(np.mean(np.abs(errors))),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.median(errors)),
        "rank": correlation,
    }
    if covered is not None:
        result["covered"] = float(100 * np.mean(covered))
    return {key: value if key == "n" else round(value, 3) for key, value in result.items()}
