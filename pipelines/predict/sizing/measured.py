"""`size sizing.measured=FILE` or `sizing.rate=...`: the fleet from a benchmark or a known rate, as text and JSON."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.document.show import count, ms, number
from pipelines.domain.benchmark import Distribution, Slo
from pipelines.domain.errors import UserError
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import runs_on_cpu
from pipelines.host.machine import Machine
from pipelines.host.screen import table, wrapped
from pipelines.predict.config import SizingSettings, price_text
from pipelines.predict.performance.gpus import TELL, resolved, stated_gpus, with_gpus
from pipelines.predict.performance.measured import Measured, MeasuredLevel, Served
from pipelines.predict.performance.read_measured import read_measured
from pipelines.predict.sizing.answer import WORDS, over_limit
from pipelines.predict.sizing.fleet import Cost, Layout, PeakFleet, cost, fleet
from pipelines.predict.sizing.question import Demand, demand_of
from pipelines.predict.sizing.words import NO_PRICES, cost_texts, fleet_text, load_text, pair, whole
from pipelines.settings.root import Settings

# Size a fleet from a benchmark instead of a model: the highest measured load that meets the limits.
#
# Nothing is interpolated, because nothing was measured between two loads. A closed loop sends the next request when
# one ends, so its queue is shorter than that of real arrivals at the same rate; a fit (`make calibrate`) accounts for
# that.

KNOWN = {50.0: "p50", 90.0: "p90", 95.0: "p95", 99.0: "p99"}
"""Percentiles stored in benchmarks."""


@dataclass(frozen=True, slots=True)
class JudgedLoad:
    """A measured load. `missed` names the limits it misses; empty when it meets all."""

    level: MeasuredLevel
    missed: str


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAnswer:
    """A fleet sized from a measurement.

    Attributes:
        measured: the benchmark.
        demand: requests per second.
        percentile: percentile that is compared with them.
        levels: all loads, by rate.
        best: load that the fleet is sized with.
    """

    measured: Measured
    demand: Demand
    slo: Slo
    percentile: float
    levels: tuple[JudgedLoad, ...]
    best: MeasuredLevel
    fleet: PeakFleet


def from_measured(measured: Measured, demand: Demand, sizing: SizingSettings, layout: Layout) -> MeasuredAnswer:
    """Size a fleet of copies of what was measured.

    Raises:
        UserError: the benchmark lacks the percentile or the metric of a limit, or no load meets the limits.
    """
    slo, percentile = sizing.slo.to_slo(), sizing.slo.percentile
    if percentile not in KNOWN:
        raise UserError(
            f"sizing.slo.percentile={percentile:g} is not stored in a benchmark.",
            allowed=f"Stored are {', '.join(f'{each:g}' for each in KNOWN)}.",
        )
    ordered = sorted(measured.levels, key=lambda level: level.requests_per_s)
    judged = tuple(JudgedLoad(level, _missed(level, slo, percentile)) for level in ordered)
    good = [each.level for each in judged if not each.missed]
    if not good:
        nearest = judged[0]
        raise UserError(
            f"No load of {', '.join(measured.sources)} meets the limits: at the lowest ({nearest.level.load}) "
            f"{nearest.missed}.",
            todo="Measure a lower load, or set a higher limit.",
        )
    best = good[-1]
    sized = fleet(demand.peak, best.requests_per_s, layout, headroom=sizing.headroom, spare=sizing.spare)
    return MeasuredAnswer(measured, demand, slo, percentile, judged, best, sized)


def value(distribution: Distribution, percentile: float) -> float | None:
    """Return a percentile in seconds."""
    quantile = getattr(distribution, KNOWN[percentile])
    return None if quantile is None else float(quantile)


def _missed(level: MeasuredLevel, slo: Slo, percentile: float) -> str:
    wrong = []
    for metric, limit in slo.limits.items():
        name, seconds = WORDS[metric], value(getattr(level, f"{metric}_s"), percentile)
        if seconds is None:
            raise UserError(
                f"The benchmark has no P{percentile:g} of {name} at {level.load}, but a limit is set for it.",
                todo="Take another percentile (sizing.slo.percentile), or measure with streaming and this percentile.",
            )
        if seconds > limit / 1000:
            wrong.append(over_limit(metric, percentile, seconds, limit))
    return "; ".join(wrong)


NO_GPUS = {"gpus": 0, "gpus_per_server": 0}
ONE_SERVER = "each instance counts as one server; set hardware=... for the GPUs per server"


def answer_of(settings: Settings, machine: Machine, path: Path) -> MeasuredAnswer:
    """Size from a benchmark.

    Raises:
        UserError: no load to size for, no benchmark, GPUs that nobody names, or no load that meets the limits.
    """
    demand, sizing = demand_of(settings.sizing, settings.workload), settings.sizing
    if sizing.autoscaling.wanted:
        raise UserError(
            "Replaying a day needs a model, but sizing.measured gives only measured loads.",
            todo="Fit a model to them first: make calibrate.",
        )
    measured = with_gpus(read_measured([path]), settings)
    cpu, prices = runs_on_cpu(measured.engine), sizing.prices
    if cpu and (per_gpu := prices.gpu_hour_usd or prices.licence_usd):
        raise UserError(
            f"A price per GPU is set ({price_text(per_gpu)} USD), but {measured.sources[0]} was measured on a CPU "
            "server.",
            todo="Give sizing.prices.server_usd and sizing.prices.years instead.",
        )
    gpus = 1 if cpu else measured.served.gpus or 1  # a CPU server counts as one
    per_server = None if cpu else resolved(settings.hardware, machine).gpus_per_server
    return from_measured(measured, demand, sizing, Layout(gpus, per_server or gpus))


def words(answer: MeasuredAnswer, price: Cost | None, *, gpus_known: bool) -> list[str]:
    """Return all lines of the printed answer."""
    measured, demand, p = answer.measured, answer.demand, f"P{answer.percentile:g}"
    where = measured.gpu or measured.engine or "a server"
    what = f"{measured.model} {measured.precision}" if measured.precision else measured.model
    title = f"{what} on {where}, measured with {measured.tool}"
    lines = [
        pair("measured", title),
        pair("GPUs", gpus_text(measured.served, cpu=runs_on_cpu(measured.engine))),
        pair("load", load_text(demand)),
        "",
    ]
    rows: list[tuple[str, ...] | str] = [("", "requests/s", f"TTFT {p}", f"ITL {p}", "ms")]
    for each in answer.levels:
        level = each.level
        mark = "*" if level is answer.best else " "
        ttft, itl = (ms(value(each, answer.percentile)) for each in (level.ttft_s, level.itl_s))
        rows.append((f"{mark} {level.load}", number(level.requests_per_s), ttft, itl, ""))
        if each.missed:
            rows.append(f"    misses: {each.missed}")
    lines += table(rows, text_columns=(4,))
    lines += ["", *fleet_lines(answer.fleet, price, cpu=runs_on_cpu(measured.engine), gpus_known=gpus_known)]
    lines.append(pair("checked", _unchecked(answer)))
    return [*lines, *(wrapped(f"note: {note}", 6) for note in measured.notes)]


def fleet_lines(sized: PeakFleet, price: Cost | None, *, gpus_known: bool, cpu: bool = False) -> list[str]:
    """Return the lines on a fleet of known rate and on what it costs."""
    lines = [pair("fleet", fleet_text(sized, gpus=not cpu))]
    if not gpus_known and not cpu:
        lines.append(pair("", ONE_SERVER))
    billed = () if cpu or not gpus_known else (whole(sized),)
    return lines + [pair("cost", text) for text in ((*cost_texts(price), *billed) if price else (NO_PRICES,))]


def gpus_text(served: Served, *, cpu: bool = False) -> str:
    """Describe the GPUs of an instance, as they were measured."""
    if cpu:
        return "none: an instance is one CPU server"
    split = f" (TP {served.tp}, PP {served.pp})" if served.tp and served.pp else ""
    return f"{served.gpus:,} an instance{split}: {served.source}"


def _unchecked(answer: MeasuredAnswer) -> str:
    rate = answer.demand.peak / answer.fleet.needed
    text = (
        f"not simulated; at the peak each of {count(answer.fleet.needed, 'instance')} gets {number(rate)} of the "
        f"{number(answer.best.requests_per_s)} requests/s measured"
    )
    if answer.best.concurrency is not None:
        text += (
            ". Measured in a closed loop, whose queue is shorter than that of real arrivals; make calibrate, "
            "then sizing.fit=FILE, accounts for this"
        )
    return text


def to_json(answer: MeasuredAnswer, price: Cost | None) -> dict[str, Any]:
    """Convert to plain JSON values."""
    measured = answer.measured
    return {
        "schema": 1,
        "origin": "measured",
        "measured": {
            "tool": measured.tool, "sources": list(measured.sources), "model": measured.model,
            "precision": measured.precision, "gpu": measured.gpu, "gpus": measured.served.gpus,
            "tp": measured.served.tp, "pp": measured.served.pp,
        },
        "demand": asdict(answer.demand),
        "slo": asdict(answer.slo) | {"percentile": answer.percentile},
        "levels": [
            {"load": each.level.load, "requests_per_s": each.level.requests_per_s, "missed": each.missed or None}
            for each in answer.levels
        ],
        "best": answer.best.load,
        "fleet": asdict(answer.fleet) | (NO_GPUS if runs_on_cpu(measured.engine) else {}),
        "cost": None if price is None else price.to_json(),
    }  # fmt: skip


# Size from a rate that is known without a file, e.g. from a slide or a colleague.


def _from_rate(
    settings: Settings, hardware: HardwareSettings, rate: float, priced: Callable[[Demand, PeakFleet], Cost | None]
) -> tuple[list[str], dict[str, Any]]:
    """Size from a known rate; return the printed lines, and plain JSON values."""
    demand, served, sizing = demand_of(settings.sizing, settings.workload), stated_gpus(settings), settings.sizing
    if served.gpus is None:
        raise UserError(f"sizing.rate={rate:g} does not say how many GPUs serve it.", todo=TELL)
    if sizing.autoscaling.wanted:
        raise UserError(
            f"Replaying a day needs a model, but sizing.rate={rate:g} is only one rate.", todo="Leave one of them out."
        )
    layout = Layout(served.gpus, hardware.gpus_per_server or served.gpus)
    sized = fleet(demand.peak, rate, layout, headroom=sizing.headroom, spare=sizing.spare)
    price = priced(demand, sized)
    unchecked = (
        f"nothing is measured or simulated: the rate counts as served within your limits; at the peak each of "
        f"{count(sized.needed, 'instance')} gets {number(demand.peak / sized.needed)} requests/s"
    )
    lines = [
        pair("rate", f"{rate:g} requests/s an instance, as given"),
        pair("GPUs", gpus_text(served)),
        pair("load", load_text(demand)),
        "",
        *fleet_lines(sized, price, gpus_known=hardware.gpus_per_server is not None),
        pair("checked", unchecked),
    ]
    values = {
        "schema": 1,
        "origin": "given",
        "requests_per_s": rate,
        "served": {"gpus": served.gpus, "tp": served.tp, "pp": served.pp},
        "demand": asdict(demand),
        "fleet": asdict(sized),
        "cost": None if price is None else price.to_json(),
    }
    return lines, values


def without_model(settings: Settings, machine: Machine) -> tuple[str, list[str], dict[str, Any]]:
    """Size from `sizing.rate` or `sizing.measured`.

    Returns:
        Name of the answer's folder, the printed lines, and plain JSON values.
    """
    sizing, hardware = settings.sizing, resolved(settings.hardware, machine)

    def priced(demand: Demand, fleet: PeakFleet) -> Cost | None:
        return cost(
            sizing.prices.of(hardware.name), fleet, tdp_w=hardware.tdp_w, requests_per_day=demand.requests_per_day
        )

    if sizing.rate is not None:
        return "rate", *_from_rate(settings, hardware, sizing.rate, priced)
    assert sizing.measured is not None
    answer = answer_of(settings, machine, sizing.measured)
    price = priced(answer.demand, answer.fleet)
    name = f"measured-{answer.measured.model.replace('/', '--')}"
    return name, words(answer, price, gpus_known=hardware.gpus_per_server is not None), to_json(answer, price)
