"""Instances, GPUs and servers for a peak, from the rate of one instance. Fractions appear only where labelled as such.

raw      = peak / (rate of an instance x (1 - headroom))
needed   = raw, rounded up;  instances = needed + spare
servers  = instances / (whole instances that one server holds), rounded up
         = instances x (whole servers of one instance)   when an instance is larger than a server
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        spare: additional instances.
        raw: instances, not rounded, without spares.
        needed: `raw` rounded up.
        instances: including spares.
        gpus: GPUs that run them.
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
