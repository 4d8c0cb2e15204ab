"""Robust least squares on logarithms with a hierarchy of parameters, each offset shrunk towards its parent.

Minimised is sum rho(r / scale) + sum (theta - prior)^2 / spread^2, with r = log(predicted / measured) and the soft-l1
rho, by Gauss-Newton steps on reweighted residuals. A model is asked only for log(predicted) and its slope along each
parameter of each row; the chain to shared values and offsets is linear.
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

STALLED = 5e-4
"""Two steps in a row that gain less than this share of the loss end the fit."""
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


def slopes(predict: Predict, values: Mapping[str, Any], here: Any, names: Sequence[str], step: float) -> dict[str, Any]:
    """Differences of log(predicted) along the logarithm of each parameter; `here` is log(predicted) at the values.

    A parameter at its upper bound moves nothing, so only its prior pulls it, back within the bound.
    """
    found = {}
    for name in names:
        moved = np.minimum(values[name] * math.exp(step), PRIORS[name].high)
        found[name] = (predict({**values, name: moved}) - here) / step
    return found


@dataclass(frozen=True)
class Fitted:
    """Outcome of a fit.

    Attributes:
        theta: the vector.
        covariance: of it.
        residuals: log(predicted / measured) of the rows.
        jacobian: slopes of them along the vector, at the step before the last.
    """

    theta: Any
    covariance: Any
    residuals: Any
    jacobian: Any


def fit(
    design: Design,
    predict: Predict,
    measured: Any,
    weights: Any,
    *,
    names: Sequence[str] = tuple(PRIORS),
    start: Any | None = None,
    steps: int = 30,
    difference: float = 0.02,
    tell: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """Find the vector.

    Args:
        design: of the rows.
        predict: the model.
        measured: float64[rows].
        weights: of the rows; 0 leaves a row out.
        names: parameters that matter to the rows; the others stay at their start.
        start: first vector; None is the prior.
        steps: Gauss-Newton steps at most.
        difference: step of the finite differences, in logarithms.
        tell: is told of each step.
    """
    theta = design.mean.copy() if start is None else np.array(start)
    log_measured, damping, stalled = np.log(measured), 1e-2, 0
    residuals = predict(design.values(theta)) - log_measured
    loss = loss_of(design, theta, residuals, weights)
    hessian, jacobian = np.diag(1 / design.spread**2), np.zeros((len(residuals), len(theta)))
    for number in range(steps):
        jacobian = design.jacobian(slopes(predict, design.values(theta), residuals + log_measured, names, difference))
        robust = weights / np.sqrt(1 + (residuals / SCALE) ** 2) / SCALE**2
        hessian = (jacobian * robust[:, None]).T @ jacobian + np.diag(1 / design.spread**2)
        gradient = jacobian.T @ (robust * residuals) + (theta - design.mean) / design.spread**2
        before = loss
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            tried = theta + np.clip(step, -0.7, 0.7)
            found = predict(design.values(tried)) - log_measured
            new = loss_of(design, tried, found, weights)
            if new < loss:
                theta, residuals, loss, damping = tried, found, new, max(damping / 4, 1e-4)
                break
            damping *= 5
        tell(f"step {number + 1}: loss {loss:.2f}, median {np.median(np.abs(residuals[weights > 0])):.4f}")
        stalled = stalled + 1 if before - loss < STALLED * before else 0
        if stalled > 1:
            break
    return Fitted(theta, np.linalg.inv(hessian), residuals, jacobian)


def loss_of(design: Design, theta: Any, residuals: Any, weights: Any) -> float:
    """What is minimised."""
    robust = 2 * (np.sqrt(1 + (residuals / SCALE) ** 2) - 1)
    return float((weights * robust).sum() + (((theta - design.mean) / design.spread) ** 2).sum())
