"""Robust least squares on logarithms with a hierarchy of parameters, each offset shrunk towards its parent.

Minimised is sum rho(r / scale) + sum (theta - prior)^2 / spread^2, with r = log(predicted / measured) and the soft-l1
rho, by `scipy.optimize.least_squares`. A model is asked only for log(predicted) and its slope along each parameter of
each row; the chain to shared values and offsets is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.predict.performance.parameters import EXPECTED, PRIORS, Parameters

SCALE = 0.1
"""Residual from which a row counts as an outlier: soft-l1 goes from squares to absolute values there."""

STALLED = 1e-4
"""A step that gains less than this share of the loss ends the fit."""
Predict = Callable[[Mapping[str, Any]], Any]
"""Parameter values, arrays of one per row -> log(predicted), float64[rows]."""


@dataclass(frozen=True)
class Design:
    """How values per row come from the vector that is fitted.

    Attributes:
        columns: (parameter, label) of each element; label "" is the shared value.
        members: of each element the rows that it moves, bool[elements, rows].
        mean: prior of each element (logarithm of the shared value, 0 for an offset).
        spread: its standard deviation.
    """

    columns: tuple[tuple[str, str], ...]
    members: Any
    mean: Any
    spread: Any

    @classmethod
    def of(cls, labels: Sequence[Sequence[str]]) -> Design:
        """For rows with these labels."""
        known = sorted({label for each in labels for label in each})
        has = {label: np.array([label in each for each in labels]) for label in known}
        columns, members, mean, spread = [], [], [], []
        for name, prior in PRIORS.items():
            columns.append((name, ""))
            members.append(np.ones(len(labels), bool))
            mean.append(math.log(prior.value))
            spread.append(prior.spread)
            for label in known:
                if width := prior.levels.get(label.split("=")[0]):
                    columns.append((name, label))
                    members.append(has[label])
                    expected, sure = EXPECTED.get((name, label), (0.0, width))
                    mean.append(expected)
                    spread.append(sure)
        return cls(tuple(columns), np.array(members), np.array(mean), np.array(spread))

    def values(self, theta: Any) -> dict[str, Any]:
        """Values of every parameter per row, within bounds."""
        found = {}
        for name, prior in PRIORS.items():
            mine = [index for index, (each, _) in enumerate(self.columns) if each == name]
            found[name] = np.clip(np.exp(theta[mine] @ self.members[mine]), prior.low, prior.high)
        return found

    def jacobian(self, slopes: Mapping[str, Any]) -> Any:
        """Slopes along parameters per row -> slopes along the elements, float64[rows, elements]."""
        nothing = np.zeros(self.members.shape[1])
        return np.array(
            [slopes.get(name, nothing) * rows for (name, _), rows in zip(self.columns, self.members, strict=True)]
        ).T

    def parameters(self, theta: Any) -> Parameters:
        """The vector as parameters."""
        shared: dict[str, float] = {}
        offsets: dict[str, dict[str, float]] = {name: {} for name in PRIORS}
        for (name, label), value in zip(self.columns, theta, strict=True):
            if label:
                offsets[name][label] = float(value)
            else:
                shared[name] = float(np.exp(value))
        return Parameters(shared, offsets, {})

    def theta(self, parameters: Parameters) -> Any:
        """Parameters as the vector; what they do not know is at its prior."""
        return np.array(
            [
                parameters.offsets.get(name, {}).get(label, 0.0)
                if label
                else math.log(parameters.shared.get(name, PRIORS[name].value))
                for name, label in self.columns
            ]
        )


def slopes(predict: Predict, values: Mapping[str, Any], step: float) -> dict[str, Any]:
    """Central differences of log(predicted) along the logarithm of each parameter.

    The step is wide because a simulated closed loop is rough: a request that arrives a moment later joins another
    iteration. A parameter at its upper bound moves nothing, so only its prior pulls it, back within the bound.
    """
    found = {}
    for name, prior in PRIORS.items():
        value = values[name]
        above = predict({**values, name: np.minimum(value * math.exp(step), prior.high)})
        below = predict({**values, name: np.maximum(value * math.exp(-step), prior.low)})
        found[name] = np.where(value < prior.high, (above - below) / (2 * step), 0.0)
    return found


@dataclass(frozen=True)
class Fitted:
    """Outcome of a fit.

    Attributes:
        theta: the vector.
        covariance: of it.
        residuals: log(predicted / measured) of the rows.
        jacobian: slopes of them along the vector.
        loss: what was minimised.
    """

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
    """Find the vector.

    Args:
        design: of the rows.
        predict: the model.
        measured: float64[rows].
        start: first vector; None is the prior.
        steps: that are tried at most.
        difference: half the step of the differences, in logarithms.
        tell: is told of each vector whose slopes are taken.
    """
    log_measured = np.log(measured)
    latest = np.zeros((len(log_measured), len(design.mean)))

    def jacobian(theta: Any) -> Any:
        latest[:] = design.jacobian(slopes(predict, design.values(theta), difference))
        tell("slopes taken")
        return latest

    def residuals(theta: Any) -> Any:
        found = predict(design.values(theta)) - log_measured
        tell(f"loss {loss_of(design, theta, found):.2f}, median {np.median(np.abs(found)):.4f}")
        return found

    begin = design.mean if start is None else start
    theta, found, last = solve(design, residuals, jacobian, begin, np.ones(len(log_measured), bool), steps)
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return Fitted(theta, covariance, last, latest, 2 * float(found.cost))


def solve(
    design: Design,
    residuals: Callable[[Any], Any],
    jacobian: Callable[[Any], Any],
    start: Any,
    kept: Any,
    steps: int,
) -> tuple[Any, Any, Any]:
    """Minimise the loss of some rows; the vector, scipy's result, and log(predicted / measured) of all rows there.

    Vectors are counted from the start, so that the first step is at most one deviation of the priors long: a full step
    of Gauss and Newton overshoots in a model that is not smooth.

    Args:
        design: of the rows.
        residuals: log(predicted / measured) of all rows for a vector.
        jacobian: slopes of them, float64[rows, elements].
        start: first vector.
        kept: bool[rows], those that are fitted to.
        steps: that are tried at most.
    """
    from scipy.optimize import least_squares

    rows, prior = int(kept.sum()), np.diag(1 / design.spread)
    seen: dict[bytes, Any] = {}

    def scaled(way: Any) -> Any:
        theta = start + way
        seen[way.tobytes()] = found = residuals(theta)
        return np.concatenate([found[kept] / SCALE, (theta - design.mean) / design.spread])

    def loss(squares: Any) -> Any:
        """Soft l1 for the rows, squares for the priors: value, first and second derivative of each."""
        value, first, second = squares.copy(), np.ones(len(squares)), np.zeros(len(squares))
        root = np.sqrt(1 + squares[:rows])
        value[:rows], first[:rows], second[:rows] = 2 * (root - 1), 1 / root, -0.5 / root**3
        return np.stack([value, first, second])

    found = least_squares(
        scaled,
        np.zeros(len(start)),
        jac=lambda way: np.concatenate([jacobian(start + way)[kept] / SCALE, prior]),
        loss=loss,
        x_scale=design.spread,
        ftol=STALLED,
        max_nfev=steps + 1,  # the first evaluation is of the start
    )
    return start + found.x, found, seen[found.x.tobytes()]


def loss_of(design: Design, theta: Any, residuals: Any) -> float:
    """What is minimised."""
    robust = 2 * (np.sqrt(1 + (residuals / SCALE) ** 2) - 1)
    return float(robust.sum() + (((theta - design.mean) / design.spread) ** 2).sum())
