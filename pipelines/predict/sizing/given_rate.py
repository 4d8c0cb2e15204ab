"""`size sizing.rate=...`: the fleet from a rate that is known without a file, e.g. from a slide or a colleague."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.document.show import count, number
from pipelines.domain.errors import UserError
from pipelines.host.machine import Machine
from pipelines.predict.performance.gpus import TELL, resolved, told
from pipelines.predict.performance.measured import Served
from pipelines.predict.sizing.fleet import Layout, PeakFleet, fleet
from pipelines.predict.sizing.measured import fleet_lines, gpus_text, load_text
from pipelines.predict.sizing.price import Cost
from pipelines.predict.sizing.question import Demand, demand_of
from pipelines.predict.sizing.words import pair
from pipelines.settings.root import Settings


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """A fleet sized from a known rate. `served`: GPUs that it belongs to."""

    rate: float
    served: Served
    demand: Demand
    fleet: PeakFleet


def answer_of(settings: Settings, machine: Machine, rate: float) -> RateAnswer:
    """Size from a known rate.

    Raises:
        UserError: no load to size for, GPUs that nobody names, or a day to replay.
    """
    demand, served, sizing = demand_of(settings), told(settings), settings.sizing
    if served.gpus is None:
        raise UserError(f"sizing.rate={rate:g} does not say how many GPUs serve it.", todo=TELL)
    if sizing.autoscaling.wanted:
        raise UserError(
            f"Replaying a day needs a model, but sizing.rate={rate:g} is only one rate.", todo="Leave one of them out."
        )
    hardware = resolved(settings.hardware, machine)
    layout = Layout(served.gpus, hardware.gpus_per_server or served.gpus)
    sized = fleet(demand.peak, rate, layout, headroom=sizing.headroom, spare=sizing.spare)
    return RateAnswer(rate, served, demand, sized)


def words(found: RateAnswer, price: Cost | None, *, gpus_known: bool) -> list[str]:
    """Return all lines of the printed answer."""
    each = found.demand.peak / found.fleet.needed
    lines = [
        pair("rate", f"{found.rate:g} requests/s an instance, as given"),
        pair("GPUs", gpus_text(found.served)),
        pair("load", load_text(found.demand)),
        "",
        *fleet_lines(found.fleet, price, gpus_known=gpus_known),
    ]
    unchecked = (
        f"nothing is measured or simulated: the rate counts as served within your limits; at the peak each of "
        f"{count(found.fleet.needed, 'instance')} gets {number(each)} requests/s"
    )
    return [*lines, pair("checked", unchecked)]


def to_json(found: RateAnswer, price: Cost | None) -> dict[str, Any]:
    """Convert to plain JSON values."""
    return {
        "schema": 1,
        "origin": "given",
        "requests_per_s": found.rate,
        "served": {"gpus": found.served.gpus, "tp": found.served.tp, "pp": found.served.pp},
        "demand": asdict(found.demand),
        "fleet": asdict(found.fleet),
        "cost": None if price is None else asdict(price) | {"usd_per_year": price.per_year, "parts": dict(price.parts)},
    }
