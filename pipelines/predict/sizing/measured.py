"""`size sizing.measured=FILE`: the fleet from a benchmark, as text and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.document.show import ms, number
from pipelines.domain.errors import UserError
from pipelines.host.machine import Machine
from pipelines.host.text import table
from pipelines.predict.performance.hardware import resolved
from pipelines.predict.performance.read_measured import read_measured
from pipelines.predict.sizing.ask import demand_of
from pipelines.predict.sizing.from_measured import MeasuredAnswer, from_measured, value
from pipelines.predict.sizing.price import Cost, Prices, cost
from pipelines.predict.sizing.words import NO_PRICES, cost_texts, count, fleet_text, pair, whole, wrap
from pipelines.settings.root import Settings


def answer_of(settings: Settings, machine: Machine, path: Path) -> MeasuredAnswer:
    """Size from a benchmark.

    Raises:
        UserError: no load to size for, no benchmark, or none of its loads meets the limits.
    """
    demand, sizing = demand_of(settings), settings.sizing
    if sizing.autoscaling.wanted:
        raise UserError(
            "Replaying a day needs a model, but sizing.measured gives only measured loads.",
            todo="Fit a model to them first: make calibrate.",
        )
    measured = read_measured([path])
    hardware = resolved(settings.hardware, machine)
    each = measured.tp * measured.pp
    return from_measured(
        measured, demand, sizing.slo.to_slo(), sizing.slo.percentile,
        gpus_per_server=hardware.gpus_per_server or each, headroom=sizing.headroom, spare=sizing.spare,
    )  # fmt: skip


def price_of(settings: Settings, machine: Machine, found: MeasuredAnswer) -> Cost | None:
    """Return the cost of the fleet; None without prices."""
    prices = Prices.of(settings.sizing.prices)
    if not prices.given:
        return None
    daily, best = found.demand.requests_per_day, found.best
    return cost(
        prices,
        servers=found.fleet.servers,
        gpus_per_server=found.fleet.gpus_per_server,
        tdp_w=resolved(settings.hardware, machine).tdp_w,
        capacity=found.fleet.instances * best.requests_per_s,
        average=None if daily is None else daily / 86400,
        isl=best.isl,
        osl=best.osl,
        input_share=None,
    )


def words(found: MeasuredAnswer, price: Cost | None, *, gpus_known: bool) -> list[str]:
    """Return all lines of the printed answer."""
    measured, demand, p = found.measured, found.demand, f"P{found.percentile:g}"
    average = "" if demand.average is None else f"{demand.average:,.4g}/s on average, "
    where = measured.gpu or measured.engine or "a server"
    title = f"{measured.model} {measured.precision or ''} TP {measured.tp} on {where}, measured with {measured.tool}"
    lines = [
        pair("measured", title),
        pair("load", f"{average}{demand.peak:,.4g}/s at peak ({demand.how})"),
        "",
    ]
    rows: list[tuple[str, ...] | str] = [("", "requests/s", f"TTFT {p}", f"ITL {p}", "ms")]
    for each in found.levels:
        level = each.level
        mark = "*" if level is found.best else " "
        ttft, itl = (ms(value(each, found.percentile)) for each in (level.ttft_s, level.itl_s))
        rows.append((f"{mark} {level.load}", number(level.requests_per_s), ttft, itl, ""))
        if each.missed:
            rows.append(f"    misses: {each.missed}")
    lines += table(rows, words=(4,))
    lines += ["", pair("fleet", fleet_text(found.fleet))]
    if not gpus_known:
        lines.append(pair("", "each instance counts as one server; set hardware=... for the GPUs per server"))
    lines += [pair("cost", text) for text in ((*cost_texts(price), whole(found.fleet)) if price else (NO_PRICES,))]
    lines.append(pair("checked", _unchecked(found)))
    return [*lines, *(wrap(f"note: {note}", 6) for note in measured.notes)]


def _unchecked(found: MeasuredAnswer) -> str:
    rate = found.demand.peak / found.fleet.needed
    text = (
        f"not simulated; at the peak each of {count(found.fleet.needed, 'instance')} gets {number(rate)} of the "
        f"{number(found.best.requests_per_s)} requests/s measured"
    )
    if found.best.concurrency is not None:
        text += (
            ". Measured in a closed loop, whose queue is shorter than that of real arrivals; make calibrate, "
            "then sizing.fit=FILE, accounts for this"
        )
    return text


def to_json(found: MeasuredAnswer, price: Cost | None) -> dict[str, Any]:
    """Convert to plain JSON values."""
    measured = found.measured
    return {
        "schema": 1,
        "origin": "measured",
        "measured": {
            "tool": measured.tool, "sources": list(measured.sources), "model": measured.model,
            "precision": measured.precision, "gpu": measured.gpu, "tp": measured.tp, "pp": measured.pp,
        },
        "demand": asdict(found.demand),
        "slo": asdict(found.slo) | {"percentile": found.percentile},
        "levels": [
            {"load": each.level.load, "requests_per_s": each.level.requests_per_s, "missed": each.missed or None}
            for each in found.levels
        ],
        "best": found.best.load,
        "fleet": asdict(found.fleet),
        "cost": None if price is None else asdict(price) | {"usd_per_year": price.per_year, "parts": dict(price.parts)},
    }  # fmt: skip
