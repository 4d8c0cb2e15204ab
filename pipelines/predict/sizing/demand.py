"""Requests per second to serve: the average, and the peak that a fleet is sized for.

The peak of Poisson arrivals is the number of requests that one second does not exceed with a given probability:
peak = smallest k with P(X <= k) >= q, X ~ Poisson(average). Average 64/s: the 95th percentile is 77.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.units import HOUR
from pipelines.settings.sizing import SizingSettings

USUAL_PERCENTILE = 95.0
"""Percentile of Poisson arrivals that is the peak if nothing else states one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand on a fleet.

    Attributes:
        average: requests per second during the busy hours; None when only the peak is known.
        peak: requests per second that the fleet is sized for.
        busy_hours: hours of a day in which the average holds.
        how: how the peak was obtained, for people.
    """

    average: float | None
    peak: float
    busy_hours: float
    how: str

    @property
    def requests_per_day(self) -> float | None:
        """Requests per day. 70.7/s over 8 hours: 2,036,160. None when the average is not known."""
        return None if self.average is None else requests_per_day(self.average, self.busy_hours)


def stated_demand(settings: SizingSettings) -> Demand | None:
    """Return the demand that the settings state; None when they state no rate."""
    average = settings.average
    if settings.peak_rate is not None:
        return Demand(average, settings.peak_rate, settings.busy_hours, "peak as given")
    if average is None:
        return None
    if settings.mode == "offline":
        return Demand(average, average, settings.busy_hours, "the average: offline requests can wait")
    if settings.peak_factor is not None:
        how = f"{settings.peak_factor:g} x the average, as given"
        return Demand(average, average * settings.peak_factor, settings.busy_hours, how)
    percent = settings.peak_percentile or USUAL_PERCENTILE
    peak = max(1, poisson_percentile(average, percent))
    return Demand(average, float(peak), settings.busy_hours, f"P{percent:g} of Poisson arrivals in one second")


def poisson_percentile(average: float, percent: float) -> int:
    """Return the number of requests that `percent` of seconds do not exceed, with Poisson arrivals.

    Args:
        average: requests per second, above 0.
        percent: between 0 and 100, e.g. 95.
    """
    from math import ceil

    from scipy.special import pdtr, pdtrik  # scipy.stats has this as poisson.ppf, but takes 0.6 s longer to import

    share = percent / 100
    above: int = ceil(pdtrik(share, average))
    return above - 1 if above > 0 and pdtr(above - 1, average) >= share else above


def requests_per_day(rate: float, hours: float = 24.0) -> float:
    """Return requests per day from a rate (per second) over some hours of the day."""
    return rate * hours * HOUR
