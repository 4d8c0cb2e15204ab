"""How many requests per second must be served: the average, and the peak that a fleet is sized for.

The peak of Poisson arrivals is the number of requests that one second holds with a given percentage:
peak = smallest k with P(X <= k) >= q, X ~ Poisson(average). Average 64/s: the 95th percentile is 77.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.units import HOUR
from pipelines.settings.sizing import SizingSettings

USUAL_PERCENTILE = 95.0
READING_WORDS_PER_TOKEN = 0.75
"""English, in the tokenizers of today; 500 words a minute are then 90 ms per token."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a fleet.

    Attributes:
        average: requests per second while it is used; None when only the peak is known.
        peak: requests per second it is sized for.
        busy_hours: of a day, in which the average holds.
        how: where the peak comes from, for people.
    """

    average: float | None
    peak: float
    busy_hours: float
    how: str

    @property
    def requests_per_day(self) -> float | None:
        """Requests of a day. 70.7/s over 8 hours: 2,036,160. None when the average is not known."""
        return None if self.average is None else requests_per_day(self.average, self.busy_hours)


def stated_demand(settings: SizingSettings) -> Demand | None:
    """The demand that the settings state; None when they give no rate."""
    average = settings.average
    if settings.peak_rate is not None:
        return Demand(average, settings.peak_rate, settings.busy_hours, "peak as given")
    if average is None:
        return None
    if settings.mode == "offline":
        return Demand(average, average, settings.busy_hours, "the average: offline, requests wait")
    if settings.peak_factor is not None:
        how = f"{settings.peak_factor:g} x the average, as given"
        return Demand(average, average * settings.peak_factor, settings.busy_hours, how)
    percent = settings.peak_percentile or USUAL_PERCENTILE
    peak = max(1, poisson_percentile(average, percent))
    return Demand(average, float(peak), settings.busy_hours, f"P{percent:g} of Poisson arrivals in one second")


def poisson_percentile(average: float, percent: float) -> int:
    """Requests in one second that are not exceeded in `percent` of seconds, with Poisson arrivals.

    Args:
        average: requests per second, above 0.
        percent: between 0 and 100, e.g. 95.
    """
    from math import ceil

    from scipy.special import pdtr, pdtrik  # scipy.stats has this as poisson.ppf, and takes 0.6 s longer to import

    share = percent / 100
    above: int = ceil(pdtrik(share, average))
    return above - 1 if above > 0 and pdtr(above - 1, average) >= share else above


def requests_per_day(rate: float, hours: float = 24.0) -> float:
    """Requests of a day with a rate (per second) over some of its hours."""
    return rate * hours * HOUR


def users_of(daily_requests: float, requests_per_user_day: float) -> float:
    """Daily users that so many requests of a day serve. 2,036,160 at 3 each: 678,720."""
    return daily_requests / requests_per_user_day


def reading_ms_per_token(words_per_minute: float) -> float:
    """Milliseconds per token at which a reader is never kept waiting. 500 words/min: 90; 225: 200."""
    return 60_000 * READING_WORDS_PER_TOKEN / words_per_minute


def equivalent_tokens(prefill_s: float, itl_s: float) -> float:
    """Output tokens that take as long as a prompt. 2.65 s at 26.8 ms: 99."""
    return prefill_s / itl_s
