"""What an iteration costs, by the settings."""

from __future__ import annotations

from collections.abc import Callable

from pipelines.predict.performance.performance import Costed, PerformanceModel, Setup
from pipelines.settings.root import Settings


def costs(settings: Settings) -> Callable[[Setup], Costed]:
    """What an iteration of a setup costs: the performance model, moved by the fit that is named.

    Raises:
        UserError: it cannot be read; also when it is called with a setup that the fit does not cover.
    """
    model = PerformanceModel.load()
    if settings.sizing.fit is None:
        return model.cost
    from pipelines.predict.performance.fit_file import load_fit

    fitted = load_fit(settings.sizing.fit)
    return lambda setup: fitted.cost(setup, model.cost(setup))
