"""Fit the kernels of `scripts.published.predict` to the errors of measured cases."""

from typing import Any

import numpy as np

from scripts.published.predict import LIMIT, Kernel, Points

LENGTHS = (1.5, 1.5, 1.0, 1.5)
ALIKE = (1.5, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0)
PRIOR_WIDTH = np.array([1.0, 1.0, 1.0, *[0.7] * 4, *[1.0] * 7])
"""Start of a kernel's fit and widths of its priors: lengths in logarithms, correlations as logits."""


def fit_kernel(measured: Points, errors: Any) -> Kernel:
    """Return the most likely kernel for the errors, with weak priors (marginal likelihood, L-BFGS)."""
    from scipy.optimize import minimize

    start = np.array([*np.log([0.01, 0.005, 0.003]), *np.log(LENGTHS), *ALIKE])
    clipped = np.clip(errors, -LIMIT, LIMIT)

    def loss(vector: Any) -> float:
        kernel = _kernel(vector)
        covariance = kernel.between(measured, measured) + kernel.noise * np.eye(len(clipped))
        lower = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(clipped)))
        white = np.linalg.solve(lower, clipped)
        prior = ((vector - start) / PRIOR_WIDTH) ** 2
        return float(0.5 * white @ white + np.log(np.diag(lower)).sum() + 0.5 * prior.sum())

    return _kernel(minimize(loss, start, method="L-BFGS-B", options={"maxiter": 20}).x)


def _kernel(vector: Any) -> Kernel:
    near, far, noise = np.exp(vector[:3])
    lengths, alike = np.exp(vector[3:7]), 1 / (1 + np.exp(-vector[7:]))
    return Kernel(float(near), float(far), float(noise), tuple(map(float, lengths)), tuple(map(float, alike)))
