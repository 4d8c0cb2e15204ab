"""Cost of a fleet, from prices that the user gives. Nothing is assumed: a price that is not given is not counted.

    server and year = price / years + licence x GPUs + hosting + power        (bought)
                    = USD per GPU-hour x GPUs x 8,760                         (rented)
    power           = TDP x GPUs x PUE x 8,760 h x USD per kWh                GPUs only, at their full power
    per token       = fleet and year x share of the time / tokens of a year, at the stated utilisation

The formula follows NVIDIA's TCO calculation ("LLM Inference Benchmarking: How Much Does Your LLM Inference Cost?",
developer.nvidia.com/blog/benchmarking-llm-inference-costs-for-smarter-scaling-and-deployment). A year has 365 days.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.units import DAY
from pipelines.predict.config import PriceSettings

DAYS = 365
HOURS = DAYS * 24
SECONDS = DAYS * DAY


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in USD; None means not given.

    Attributes:
        server: price of one server with its GPUs.
        years: years over which it is written off.
        licence: per GPU and year.
        hosting: per server and year.
        kwh: price of a kWh of electricity.
        pue: power of the building / power of the machines.
        gpu_hour: rent of one GPU for an hour, everything included.
        utilisation: share of the fleet's capacity used over the year; None derives it from the average.
    """

    server: float | None = None
    years: float | None = None
    licence: float | None = None
    hosting: float | None = None
    kwh: float | None = None
    pue: float | None = None
    gpu_hour: float | None = None
    utilisation: float | None = None

    @classmethod
    def of(cls, settings: PriceSettings) -> Prices:
        """Read the prices from the settings."""
        return cls(
            server=settings.server_usd,
            years=settings.years,
            licence=settings.licence_usd,
            hosting=settings.hosting_usd,
            kwh=settings.kwh_usd,
            pue=settings.pue,
            gpu_hour=settings.gpu_hour_usd,
            utilisation=settings.utilisation,
        )

    @property
    def given(self) -> bool:
        """Whether the GPUs themselves have a price; without one no cost is given."""
        return self.server is not None or self.gpu_hour is not None


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a fleet.

    Attributes:
        parts: (item, USD per year) for the whole fleet.
        missing: items without a price, which are not included.
        utilisation: utilisation behind the costs per token; None when not known, and then they are None too.
        per_1k_requests: USD.
        per_million_input: USD per million input tokens, by the share of time spent on prompts.
        per_million_output: USD per million output tokens.
    """

    parts: tuple[tuple[str, float], ...]
    missing: tuple[str, ...]
    utilisation: float | None
    per_1k_requests: float | None
    per_million_input: float | None
    per_million_output: float | None

    @property
    def per_year(self) -> float:
        """USD per year for the whole fleet."""
        return sum(amount for _, amount in self.parts)


def server_year(prices: Prices, gpus: int, tdp_w: float | None) -> tuple[list[tuple[str, float]], list[str]]:
    """Return (item, USD) of one server for a year, and the items without a price.

    Args:
        prices: with the price of a server or of a GPU-hour.
        gpus: GPUs of the server.
        tdp_w: TDP of one GPU, W; None if not known.
    """
    if prices.gpu_hour is not None:
        return [("rent", prices.gpu_hour * gpus * HOURS)], []
    assert prices.server is not None
    assert prices.years is not None
    power = None
    if prices.kwh is not None and prices.pue is not None and tdp_w is not None:
        power = tdp_w / 1000 * gpus * prices.pue * HOURS * prices.kwh
    asked = (
        ("servers", prices.server / prices.years),
        ("licences", None if prices.licence is None else prices.licence * gpus),
        ("hosting", prices.hosting),
        ("power", power),
    )
    return [(what, usd) for what, usd in asked if usd is not None], [what for what, usd in asked if usd is None]


def cost(
    prices: Prices, *, servers: int, gpus_per_server: int, tdp_w: float | None, capacity: float,
    average: float | None, isl: float, osl: float, input_share: float | None,
) -> Cost:  # fmt: skip
    """Compute the cost of a fleet.

    Args:
        prices: with the price of a server or of a GPU-hour.
        servers: whole servers.
        gpus_per_server: all are paid for, idle ones too.
        tdp_w: TDP of one GPU, W.
        capacity: requests per second that the fleet serves within the limits.
        average: requests per second over the whole year; None when only the peak is known.
        isl: mean input tokens.
        osl: mean output tokens.
        input_share: share of the engine's time spent on prompts; None if not known, then there is no cost per token.
    """
    each, missing = server_year(prices, gpus_per_server, tdp_w)
    parts = tuple((what, servers * usd) for what, usd in each)
    utilisation = prices.utilisation
    if utilisation is None and average is not None:
        utilisation = average / capacity
    if utilisation is None:
        return Cost(parts, tuple(missing), None, None, None, None)
    requests = utilisation * capacity * SECONDS
    total = servers * sum(usd for _, usd in each)
    each_1k = 1e3 * total / requests
    if input_share is None:
        return Cost(parts, tuple(missing), utilisation, each_1k, None, None)
    return Cost(
        parts,
        tuple(missing),
        utilisation,
        per_1k_requests=each_1k,
        per_million_input=1e6 * total * input_share / (requests * isl),
        per_million_output=1e6 * total * (1 - input_share) / (requests * osl),
    )
