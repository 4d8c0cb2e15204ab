"""Cost of an iteration, as the settings choose it."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.predict.performance.performance import Costed, PerformanceModel, Setup
from pipelines.settings.root import Settings


def costs(settings: Settings) -> Callable[[Setup], Costed]:
    """Return the cost function of a setup: the performance model, adjusted by the named fit.

    Raises:
        UserError: the fit cannot be read; also raised by the returned function for a setup that the fit does not cover.
    """
    model = PerformanceModel.load()
    if settings.sizing.fit is None:
        return model.cost
    from pipelines.predict.performance.fit_file import load_fit

    fitted = load_fit(settings.sizing.fit)
    return lambda setup: fitted.cost(setup, model.cost(setup))
