"""What an iteration costs, by the settings."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.predict.performance.performance import Costed, PerformanceModel, Setup
from pipelines.settings.root import Settings


def costs(settings: Settings) -> Callable[[Setup], Costed]:
    """What an iteration of a setup costs: the performance model, moved by the calibration that is named.

    Raises:
        UserError: it cannot be read; also when it is called with a setup that the calibration does not speak of.
    """
    model = PerformanceModel.load()
    if settings.sizing.calibration is None:
        return model.cost
    from pipelines.predict.performance.fitted import load_calibration

    calibration = load_calibration(settings.sizing.calibration)
    return lambda setup: calibration.cost(setup, model.cost(setup))
