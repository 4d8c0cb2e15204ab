"""Instances, GPUs and servers for a peak, from the rate of one instance, and their cost, from prices that are given.

raw      = peak / (rate of an instance x (1 - headroom))
needed   = raw, rounded up;  instances = needed + spare
servers  = instances / (whole instances that one server holds), rounded up
         = instances x (whole servers of one instance)   when an instance is larger than a server

server and year = price / years + licence x GPUs + hosting + power        (bought)
                = USD per GPU-hour x GPUs x 8,760                         (rented)
power           = TDP x GPUs x PUE x 8,760 h x USD per kWh                GPUs only, at their full power
per token       = fleet and year x share of the time / tokens of a year, at the stated utilisation

Fractions appear only where labelled as such. A year has 365 days, and a price that is not given is not counted. The
cost follows NVIDIA's TCO calculation ("LLM Inference Benchmarking: How Much Does Your LLM Inference Cost?",
developer.nvidia.com/blog/benchmarking-llm-inference-costs-for-smarter-scaling-and-deployment).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.domain.units import DAY
from pipelines.predict.config import PriceSettings

YEAR, HOURS = 365 * DAY, 365 * 24
"""Seconds and hours of a year."""
ROUNDING = 1e-9
"""Anything this close to a whole number counts as whole: 3 x 0.1 / 0.1 must not become 4."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of instances on servers; one spans several servers only if it is larger than one.

    Attributes:
        gpus_per_instance: TP x PP.
        gpus_per_server: GPUs of one machine.
    """

    gpus_per_instance: int
    gpus_per_server: int

    @property
    def instances_per_server(self) -> int:
        """Whole instances that fit on one server; 0 when an instance needs several."""
        return self.gpus_per_server // self.gpus_per_instance

    @property
    def servers_per_instance(self) -> int:
        """Whole servers that one instance needs."""
        return -(-self.gpus_per_instance // self.gpus_per_server)

    def servers(self, instances: int) -> int:
        """Return the servers needed for a number of instances."""
        if self.instances_per_server:
            return -(-instances // self.instances_per_server)
        return instances * self.servers_per_instance


@dataclass(frozen=True, slots=True)
class PeakFleet:
    """Fleet for a peak.

    Attributes:
        peak: requests per second.
        rate: requests per second that one instance serves within the limits.
        headroom: share of that rate kept free.
        raw: instances, not rounded, without spares.
        needed: `raw` rounded up.
        instances: including spares.
        servers_raw: `raw` in servers, not rounded, without spares.
        servers: whole servers that hold them.
        gpus_per_server: GPUs of one machine; those left over on the last server stay idle.
    """

    peak: float
    rate: float
    headroom: float
    spare: int
    raw: float
    needed: int
    instances: int
    gpus: int
    servers_raw: float
    servers: int
    gpus_per_server: int


def ceil(value: float) -> int:
    """Round up, ignoring floating-point error."""
    return math.ceil(value * (1 - ROUNDING))


def fleet(peak: float, rate: float, layout: Layout, *, headroom: float = 0.0, spare: int = 0) -> PeakFleet:
    """Size a fleet. 31 requests/s at 2.4 per server: 12.92 raw, 13 servers.

    Args:
        peak: requests per second to serve, above 0.
        rate: requests per second of one instance, above 0.
        layout: GPUs per instance and per server.
        headroom: share of an instance's rate kept free, below 1.
        spare: additional instances (N + spare).

    Raises:
        ValueError: a rate is not positive, or the headroom leaves nothing.
    """
    if not (peak > 0 and rate > 0 and 0 <= headroom < 1 and spare >= 0):
        raise ValueError(f"peak {peak}, rate {rate}, headroom {headroom}, spare {spare}")
    raw = peak / (rate * (1 - headroom))
    needed = max(1, ceil(raw))
    instances = needed + spare
    each = layout.instances_per_server
    return PeakFleet(
        peak=peak,
        rate=rate,
        headroom=headroom,
        spare=spare,
        raw=raw,
        needed=needed,
        instances=instances,
        gpus=instances * layout.gpus_per_instance,
        servers_raw=raw / each if each else raw * layout.servers_per_instance,
        servers=layout.servers(instances),
        gpus_per_server=layout.gpus_per_server,
    )


# Cost.


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
    utilisation: float | None = None
    per_1k_requests: float | None = None
    per_million_input: float | None = None
    per_million_output: float | None = None

    @property
    def per_year(self) -> float:
        """USD per year for the whole fleet."""
        return sum(amount for _, amount in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        return asdict(self) | {"usd_per_year": self.per_year, "parts": dict(self.parts)}


def server_year(prices: PriceSettings, gpus: int, tdp_w: float | None) -> tuple[list[tuple[str, float]], list[str]]:
    """Return (item, USD) of one server for a year, and the items without a price; `tdp_w` is of one GPU."""
    rent, server = prices.gpu_hour_usd, prices.server_usd
    assert not isinstance(rent, dict), "prices of one GPU"
    assert not isinstance(server, dict), "prices of one GPU"
    if rent is not None:
        return [("rent", rent * gpus * HOURS)], []
    assert server is not None
    assert prices.years is not None
    power = None
    if prices.kwh_usd is not None and prices.pue is not None and tdp_w is not None:
        power = tdp_w / 1000 * gpus * prices.pue * HOURS * prices.kwh_usd
    costs = (
        ("servers", server / prices.years),
        ("licences", None if prices.licence_usd is None else prices.licence_usd * gpus),
        ("hosting", prices.hosting_usd),
        ("power", power),
    )
    return [(what, usd) for what, usd in costs if usd is not None], [what for what, usd in costs if usd is None]


def cost(
    prices: PriceSettings, fleet: PeakFleet, *, tdp_w: float | None, requests_per_day: float | None,
    isl: float = math.nan, osl: float = math.nan, input_share: float | None = None,
) -> Cost | None:  # fmt: skip
    """Compute the cost of a fleet; None if the GPUs themselves have no price.

    Args:
        prices: as given.
        fleet: all GPUs of its servers are paid for, idle ones too.
        tdp_w: TDP of one GPU, W.
        requests_per_day: None when only the peak is known.
        isl: mean input tokens.
        osl: mean output tokens.
        input_share: share of the engine's time spent on prompts; None if not known, then there is no cost per token.
    """
    if prices.server_usd is None and prices.gpu_hour_usd is None:
        return None
    each, missing = server_year(prices, fleet.gpus_per_server, tdp_w)
    parts, capacity = tuple((what, fleet.servers * usd) for what, usd in each), fleet.instances * fleet.rate
    utilisation = prices.utilisation
    if utilisation is None and requests_per_day is not None:
        utilisation = requests_per_day / DAY / capacity
    if utilisation is None:
        return Cost(parts, tuple(missing))
    requests = utilisation * capacity * YEAR
    total = fleet.servers * sum(usd for _, usd in each)
    each_1k = 1e3 * total / requests
    if input_share is None:
        return Cost(parts, tuple(missing), utilisation, each_1k)
    return Cost(
        parts,
        tuple(missing),
        utilisation,
        per_1k_requests=each_1k,
        per_million_input=1e6 * total * input_share / (requests * isl),
        per_million_output=1e6 * total * (1 - input_share) / (requests * osl),
    )
