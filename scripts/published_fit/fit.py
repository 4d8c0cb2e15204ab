"""Robust least squares on logarithms with a hierarchy of parameters, each offset shrunk towards its parent.

`scipy.optimize.least_squares` minimises sum rho(r / scale) + sum (theta - prior)^2 / spread^2, with
r = log(predicted / measured) and the soft-l1 rho. A model has to provide only log(predicted), whose slope along each
parameter is taken for each row; the chain to shared values and offsets is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.predict.performance.physics import BOUNDS, Parameters
from scripts.published_fit.priors import EXPECTED, PRIORS

SCALE = 0.1
"""Residual above which a row counts as an outlier: there soft-l1 changes from squares to absolute values."""

STALLED = 1e-4
"""A step that reduces the loss by less than this share ends the fit."""
Predict = Callable[[Mapping[str, Any]], Any]
"""Parameter values (arrays with one element per row) -> log(predicted), float64[rows]."""


@dataclass(frozen=True)
class Design:
    """The mapping from the fitted vector to parameter values per row.

    Attributes:
        columns: (parameter, label) of each element; label "" is the shared value.
        members: the rows that each element affects, bool[elements, rows].
        mean: prior of each element (logarithm of the shared value, 0 for an offset).
        spread: standard deviation of each prior.
        fixed: logarithms by parameter to add to what the elements give, float64[rows]; nothing if all are fitted.
    """

    columns: tuple[tuple[str, str], ...]
    members: Any
    mean: Any
    spread: Any
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, labels: Sequence[Sequence[str]]) -> Design:
        """Make the design for rows with these labels."""
        names = sorted({label for each in labels for label in each})
        has = {label: np.array([label in each for each in labels]) for label in names}
        columns, members, mean, spread = [], [], [], []
        for name, prior in PRIORS.items():
            columns.append((name, ""))
            members.append(np.ones(len(labels), bool))
            mean.append(math.log(prior.value))
            spread.append(prior.spread)
            for label in names:
                if width := prior.levels.get(label.split("=")[0]):
                    columns.append((name, label))
                    members.append(has[label])
                    expected, sure = EXPECTED.get((name, label), (0.0, width))
                    mean.append(expected)
                    spread.append(sure)
        return cls(tuple(columns), np.array(members), np.array(mean), np.array(spread))

    def values(self, theta: Any) -> dict[str, Any]:
        """Return the value of every parameter for each row, within its bounds."""
        values = {}
        for name, bounds in BOUNDS.items():
            mine = [index for index, (each, _) in enumerate(self.columns) if each == name]
            values[name] = np.clip(np.exp(theta[mine] @ self.members[mine] + self.fixed.get(name, 0.0)), *bounds)
        return values

    def only(self, chosen: Any, theta: Any) -> Design:
        """Return the design of the chosen elements, bool[elements]; the others keep the values of `theta`."""
        fixed = {}
        for name in BOUNDS:
            rest = [index for index, (each, _) in enumerate(self.columns) if each == name and not chosen[index]]
            fixed[name] = theta[rest] @ self.members[rest]
        columns = tuple(column for column, one in zip(self.columns, chosen, strict=True) if one)
        return Design(columns, self.members[chosen], self.mean[chosen], self.spread[chosen], fixed)

    def jacobian(self, slopes: Mapping[str, Any]) -> Any:
        """Convert slopes along parameters per row to slopes along the elements, float64[rows, elements]."""
        nothing = np.zeros(self.members.shape[1])
        return np.array(
            [slopes.get(name, nothing) * rows for (name, _), rows in zip(self.columns, self.members, strict=True)]
        ).T

    def parameters(self, theta: Any) -> Parameters:
        """Convert the vector to parameters."""
        shared: dict[str, float] = {}
        offsets: dict[str, dict[str, float]] = {name: {} for name in PRIORS}
        for (name, label), value in zip(self.columns, theta, strict=True):
            if label:
                offsets[name][label] = float(value)
            else:
                shared[name] = float(np.exp(value))
        return Parameters(shared, offsets, {})

    def theta(self, parameters: Parameters) -> Any:
        """Convert parameters to the vector; elements that they lack are set to their priors."""
        return np.array(
            [
                parameters.offsets.get(name, {}).get(label, 0.0)
                if label
                else math.log(parameters.shared.get(name, PRIORS[name].value))
                for name, label in self.columns
            ]
        )


def slopes(predict: Predict, values: Mapping[str, Any], step: float, moving: Container[str] = BOUNDS) -> dict[str, Any]:
    """Return central differences of log(predicted) along the logarithm of each moving parameter.

    The step is wide because a simulated closed loop is not smooth: a request that arrives a moment later joins another
    iteration. A parameter at its upper bound has slope zero, so that only its prior pulls it back within the bound.
    """
    result = {}
    for name, (low, high) in BOUNDS.items():
        if name not in moving:
            continue
        value = values[name]
        above = predict({**values, name: np.minimum(value * math.exp(step), high)})
        below = predict({**values, name: np.maximum(value * math.exp(-step), low)})
        result[name] = np.where(value < high, (above - below) / (2 * step), 0.0)
    return result


@dataclass(frozen=True)
class Fitted:
    """Result of a fit."""

    theta: Any
    covariance: Any
    residuals: Any
    jacobian: Any
    loss: float


def fit(
    design: Design,
    predict: Predict,
    measured: Any,
    *,
    start: Any | None = None,
    steps: int = 30,
    difference: float = 0.04,
    tell: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Fit the vector to the measurements.

    Args:
        design: the design of the rows.
        predict: the model.
        measured: measured values, float64[rows].
        start: the vector to start from; None is the prior.
        steps: maximum number of steps.
        difference: half the width of the central differences, in logarithms.
        tell: receives a line of progress for each evaluation.
    """
    log_measured = np.log(measured)
    latest = np.zeros((len(log_measured), len(design.mean)))

    def jacobian(theta: Any) -> Any:
        moving = {name for name, _ in design.columns}
        latest[:] = design.jacobian(slopes(predict, design.values(theta), difference, moving))
        tell("slopes computed")
        return latest

    def residuals(theta: Any) -> Any:
        errors = predict(design.values(theta)) - log_measured
        tell(f"loss {loss_of(design, theta, errors):.2f}, median {np.median(np.abs(errors)):.4f}")
        return errors

    begin = design.mean if start is None else start
    theta, solution, last = solve(design, residuals, jacobian, begin, np.ones(len(log_measured), bool), steps)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac)
    return Fitted(theta, covariance, last, latest, 2 * float(solution.cost))


def solve(
    design: Design,
    residuals: Callable[[Any], Any],
    jacobian: Callable[[Any], Any],
    start: Any,
    kept: Any,
    steps: int,
) -> tuple[Any, Any, Any]:
    """Minimise the loss over the kept rows.

    The solver works on offsets from the start, so that its first step is at most one standard deviation of the priors
    long: a full Gauss-Newton step overshoots in a model that is not smooth.

    Args:
        design: the design of the rows.
        residuals: log(predicted / measured) of all rows for a vector.
        jacobian: slopes of the residuals for a vector, float64[rows, elements].
        start: the vector to start from.
        kept: rows that are fitted to, bool[rows].
        steps: maximum number of steps.

    Returns:
        the vector, scipy's result, and log(predicted / measured) of all rows at that vector.
    """
    from scipy.optimize import least_squares

    rows, prior = int(kept.sum()), np.diag(1 / design.spread)
    seen: dict[bytes, Any] = {}

    def scaled(way: Any) -> Any:
        theta = start + way
        seen[way.tobytes()] = errors = residuals(theta)
        return np.concatenate([errors[kept] / SCALE, (theta - design.mean) / design.spread])

    def loss(squares: Any) -> Any:
        """Return value, first and second derivative: soft l1 for the rows, squares for the priors."""
        value, first, second = squares.copy(), np.ones(len(squares)), np.zeros(len(squares))
        root = np.sqrt(1 + squares[:rows])
        value[:rows], first[:rows], second[:rows] = 2 * (root - 1), 1 / root, -0.5 / root**3
        return np.stack([value, first, second])

    solution = least_squares(
        scaled,
        np.zeros(len(start)),
        jac=lambda way: np.concatenate([jacobian(start + way)[kept] / SCALE, prior]),
        loss=loss,
        x_scale=design.spread,
        ftol=STALLED,
        max_nfev=steps + 1,  # the first evaluation is at the start
    )
    return start + solution.x, solution, seen[solution.x.tobytes()]


def loss_of(design: Design, theta: Any, residuals: Any) -> float:
    """Return the loss that is minimised."""
    robust = 2 * (np.sqrt(1 + (residuals / SCALE) ** 2) - 1)
    return float(robust.sum() + (((theta - design.mean) / design.spread) ** 2).sum())
