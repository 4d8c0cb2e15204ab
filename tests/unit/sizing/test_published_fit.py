"""The solver that fits the performance model to published measurements."""

import numpy as np
import pytest

from pipelines.predict.performance.physics import BOUNDS, Parameters
from scripts.published_fit.fit import Design, fit
from scripts.published_fit.priors import PRIORS

ROWS = 60
LABELS = [("family=vllm", "gpu=h100_sxm") if row % 2 else ("family=nim", "gpu=l40s") for row in range(ROWS)]
SIZE = np.geomspace(20, 2000, ROWS)


def predict(values):
    """log(seconds) of something that takes a constant and a share per size."""
    return np.log(values["t0"] + values["t_seq"] * SIZE)


def measured(noise=0.0, seed=0):
    true = {"t0": 0.002, "t_seq": 0.000045}
    per_row = {name: np.where(np.arange(ROWS) % 2, 1.5, 1.0) * value for name, value in true.items()}
    return np.exp(predict(per_row) + np.random.default_rng(seed).normal(0, noise, ROWS))


def test_values_come_back_from_exact_measurements():
    """Shared values and the offset of a family; what nothing was measured of stays at its prior."""
    design = Design.of(LABELS)
    found = fit(design, predict, measured())
    assert np.abs(found.residuals).max() < 0.02
    values = design.values(found.theta)
    assert values["t0"][1] / values["t0"][0] == pytest.approx(1.5, rel=0.1)
    parameters = design.parameters(found.theta)
    assert parameters.shared["e_c"] == pytest.approx(PRIORS["e_c"].value)


def test_an_outlier_moves_nothing():
    """Soft l1: one measurement that is a hundred times too large leaves the others as well met as before."""
    design = Design.of(LABELS)
    spoilt = measured(0.01)
    spoilt[7] *= 100
    found = fit(design, predict, spoilt)
    others = np.delete(found.residuals, 7)
    assert np.abs(others).max() < 0.06
    assert found.residuals[7] == pytest.approx(-np.log(100), abs=0.06)


def test_a_fit_starts_where_the_last_one_ended():
    """From its own minimum it goes nowhere, and a vector survives being written as parameters."""
    design = Design.of(LABELS)
    first = fit(design, predict, measured(0.05))
    again = design.theta(design.parameters(first.theta))
    np.testing.assert_allclose(again, first.theta, atol=1e-12)
    second = fit(design, predict, measured(0.05), start=again)
    assert second.loss == pytest.approx(first.loss, rel=2e-3)
    assert second.loss <= first.loss


def test_the_shipped_parameters_are_a_start():
    assert Parameters.load().shared.keys() == PRIORS.keys() == BOUNDS.keys()
