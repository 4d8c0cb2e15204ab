"""`size hardware=[...]`: the fleet on each of several GPUs, the cheapest first, and why some of them do not qualify."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.document.show import NONE, number
from pipelines.domain.errors import Fault, UserError
from pipelines.host.machine import Machine
from pipelines.host.screen import table, wrapped
from pipelines.predict.performance.deployment import costs
from pipelines.predict.performance.placement import Judge
from pipelines.predict.sizing.answer import FleetOption, answer, check
from pipelines.predict.sizing.fleet import YEAR
from pipelines.predict.sizing.question import Question, ask
from pipelines.predict.sizing.words import NO_PRICES, pair, question_terms
from pipelines.settings.root import Settings

SEVERAL = re.compile(r"\+{0,2}hardware=\[(.*)\]")


def several_gpus(overrides: Sequence[str]) -> list[list[str]] | None:
    """Return the overrides for each GPU of `hardware=[...]`; None where one GPU is asked for.

    Raises:
        UserError: a name in the list is empty.
    """
    lists = [match[1] for text in overrides if (match := SEVERAL.fullmatch(text))]
    if not lists:
        return None
    others = [text for text in overrides if not SEVERAL.fullmatch(text)]
    names = lists[-1].replace(" ", "").split(",")
    if "" in names:
        raise UserError(
            f"'hardware=[{lists[-1]}]' has {'an empty name in it' if any(names) else 'no GPU in it'}.",
            todo="Name those to choose among: hardware=[h100_sxm,l40s].",
        )
    return [[*others, f"hardware={name}"] for name in dict.fromkeys(names)]


@dataclass(frozen=True, slots=True, eq=False)
class GpuRow:
    """One GPU: its recommended fleet, or why it has none.

    Attributes:
        name: of the file in conf/hardware.
        best: the recommended configuration and its fleet; None where none qualifies.
        why: why none qualifies; empty with a fleet.
        good: share of the output tokens whose requests meet every limit, in the simulated fleet.
        usd: of a million such tokens; None without a price.
    """

    name: str
    best: FleetOption | None = None
    why: str = ""
    good: float = 0.0
    usd: float | None = None

    @property
    def rank(self) -> tuple[float, ...]:
        """Cheapest first; without a price the fewest servers, then GPUs; without a fleet last."""
        if self.best is None:
            return (2,)
        fleet = self.best.fleet
        return (0, self.usd) if self.usd is not None else (1, fleet.servers, fleet.gpus)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        row: dict[str, Any] = {"hardware": self.name, "why_not": self.why or None}
        if (best := self.best) is None:
            return row
        sizes = {key: asdict(best.fleet)[key] for key in ("instances", "gpus", "servers", "gpus_per_server")}
        return row | sizes | {
            "option": best.label, "requests_per_s_per_instance": best.capacity.rate, "good_tokens_share": self.good,
            "usd_per_year": None if best.cost is None else best.cost.per_year, "usd_per_million_good_tokens": self.usd,
            "provenance": best.instance.costed.provenance,
        }  # fmt: skip


def which_gpu(
    every: Sequence[Settings], machine: Machine, judge_of: Callable[[Settings, Machine], Judge]
) -> tuple[Question, list[GpuRow]]:
    """Size the fleet on each GPU; the settings differ in `hardware` alone.

    Returns:
        The question, which differs in the GPU alone, and a row for each, the cheapest first.

    Raises:
        UserError: no GPU qualifies, or another part of `sizing` is about one GPU.
    """
    sizing = every[0].sizing
    for key in ("measured", "rate", "fit"):
        if (value := getattr(sizing, key)) is not None:
            raise UserError(
                f"sizing.{key}={value} works for one GPU only.", todo="Leave it out, or name only that GPU."
            )
    if sizing.autoscaling.wanted:
        raise UserError("A day is replayed on one GPU.", todo="Choose it first, without sizing.autoscaling.day.")
    rows, faults, first = [], list[Fault](), None
    for settings in every:
        name = settings.hardware.name
        try:
            question = ask(settings, machine, judge_of(settings, machine))
            best = answer(question, costs(settings)).chosen
        except UserError as error:
            faults += error.faults
            rows.append(GpuRow(name, why=f"{error.faults[0].message} {error.faults[0].allowed}".strip()))
            continue
        first = first or question
        good = check(question, best).fleet.good
        rows.append(GpuRow(name, best, good=good, usd=_usd(question, best, good)))
    if first is None:
        raise UserError.of(list(dict.fromkeys(faults)))
    return first, sorted(rows, key=lambda row: row.rank)


def _usd(question: Question, best: FleetOption, good: float) -> float | None:
    """Return the cost of a million output tokens of requests that meet every limit; None without a price or any."""
    if best.cost is None or not good:
        return None
    capacity = best.fleet.instances * best.fleet.rate
    rate = question.demand.peak if best.cost.utilisation is None else best.cost.utilisation * capacity
    return 1e6 * best.cost.per_year / (rate * YEAR * question.mean_osl * good)


def words(question: Question, answers: Sequence[GpuRow]) -> list[str]:
    """Return all lines of the printed answer."""
    lines = [pair("model", f"{question.model.name}, {question.engine} (modelled)")]
    lines += [pair(word, text) for word, text in question_terms(question)[1:]]  # the same for every GPU
    head = ("", "configuration", "inst.", "GPUs", "servers", "USD a year", "USD/M good", "rests on")
    rows: list[tuple[str, ...] | str] = [head]
    for row in answers:
        if (best := row.best) is not None:
            size = [f"{amount:,}" for amount in (best.fleet.instances, best.fleet.gpus, best.fleet.servers)]
            year = NONE if best.cost is None else f"{best.cost.per_year:,.0f}"
            rows.append((row.name, best.label, *size, year, number(row.usd), best.instance.costed.provenance))
    lines += ["", *table(rows, left=2, text_columns=(7,))]
    lines += [wrapped(f"{row.name}: {row.why}", len(row.name) + 2) for row in answers if row.best is None]
    lines += ["", pair("prices", _prices(question, answers))]
    if len(question.formats) > 1:
        lines.append(pair("accuracy", "not considered, and formats differ in it: `make compare` measures it"))
    return lines


def _prices(question: Question, answers: Sequence[GpuRow]) -> str:
    """Say what the costs are of, and which there are not."""
    fleets = [row for row in answers if row.best is not None]
    unpriced = [row.name for row in fleets if row.best is not None and row.best.cost is None]
    if len(unpriced) == len(fleets):
        how = f"'sizing.prices.gpu_hour_usd={{{unpriced[0]}: 2.5, ...}}'"
        return f"{NO_PRICES}, so by servers, then GPUs, and one costs more than another. Give them: {how}"
    share, demand = question.prices.utilisation, question.demand
    load = "the peak around the clock, because no average is given"
    if share is not None:
        load = f"{100 * share:g} % utilisation"
    elif demand.average is not None:
        load = f"the average load, {demand.average:,.4g}/s in {demand.busy_hours:g} h a day"
    least = math.floor(1000 * min(row.good for row in fleets)) / 10
    return (
        f"USD/M good: of a million output tokens of requests within all limits (at the peak at least {least:g} % of "
        f"the tokens), at {load}; whole servers are billed"
    ) + (f"; no price of {', '.join(unpriced)}" if unpriced else "")


def to_json(question: Question, answers: Sequence[GpuRow]) -> dict[str, Any]:
    """Convert to plain JSON values."""
    rows = [row.to_json() for row in answers]
    return {"schema": 1, "origin": "modelled", "demand": asdict(question.demand), "gpus": rows}
