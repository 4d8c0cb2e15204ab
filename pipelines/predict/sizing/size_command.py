"""The command `size`: read the question, compute the answer, validate, print and write it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.document.canvas import missing_packages, write_document
from pipelines.document.show import count
from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.domain.summary import SECOND
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import disk_faults, write_json, write_text
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say
from pipelines.loadgen.config import unread
from pipelines.loadgen.trace import known_times
from pipelines.predict.performance.deployment import costs
from pipelines.predict.performance.placement import Judge
from pipelines.predict.sizing import which_gpu
from pipelines.predict.sizing.answer import Answer, CostOf, answer, check, ladder
from pipelines.predict.sizing.autoscale import BUSINESS, counted_rates, curve, day_rates, replay
from pipelines.predict.sizing.document import document
from pipelines.predict.sizing.measured import without_model
from pipelines.predict.sizing.question import Demand, Question, ask
from pipelines.predict.sizing.result import Day, Result, to_csv, to_json
from pipelines.predict.sizing.sensitivity import changes
from pipelines.predict.sizing.which_gpu import several_gpus
from pipelines.predict.sizing.words import words
from pipelines.settings.base import Group
from pipelines.settings.compose import load
from pipelines.settings.root import Settings
from pipelines.store.store import fingerprint

SHOWN_CURVES = 6
"""Number of options drawn; the table has them all."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The answer to a question of sizing, in the form that the question has.

    Attributes:
        record: of one modelled fleet; of several GPUs, a given rate or measurements it is the JSON of the answer.
        lines: for a terminal.
        folder: where the command writes it.
    """

    record: Result | dict[str, Any]
    lines: list[str]
    folder: Path


def size(overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge]) -> int:
    """Run the command and return the exit code; `judge_of` makes the rules of a plan from settings."""
    sized = sized_from(overrides, judge_of, pages=True)
    say("\n".join(sized.lines))
    say()
    for path in write(sized.record, sized.folder):
        say(f"written: {relative_to_cwd(path.absolute())}")
    return 0


def sized_from(
    overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge], *, pages: bool = False
) -> Sized:
    """Compute the answer; nothing is printed or written.

    Raises:
        UserError: invalid settings, no fleet that a plan accepts meets the limits, or a package for its `pages` lacks.
    """
    if (several := several_gpus(overrides)) is not None:
        return _several(several, judge_of)
    settings = load(overrides)
    check_folders({"report.folder": settings.report.folder})
    refuse(_unread(settings))
    machine, sizing, folder = gather(), settings.sizing, settings.report.folder
    if sizing.rate is not None or sizing.measured is not None:
        name, lines, values = without_model(settings, machine)
        return Sized(values, lines, folder / f"size-{name}-{question_id(settings)}")
    refuse(missing_packages("The answer's page") if pages else [])
    question = ask(settings, machine, judge_of(settings, machine))
    result = solve(settings, question, costs(settings))
    name = f"size-{question.model.name}-{question.gpu.name}-{question_id(settings)}"
    return Sized(result, words(result), folder / name)


def _unread(settings: Settings) -> Iterator[Fault]:
    """Yield what was set and this question does not read."""
    sizing, scaling, workload = settings.sizing, settings.sizing.autoscaling, settings.workload
    yield from unread(workload, settings.benchmark)
    if workload.arrival == "burst" or workload.think_time_s:
        what = "arrival=burst" if workload.arrival == "burst" else f"think_time_s={workload.think_time_s:g}"
        yield Fault(f"workload.{what} has no effect: a fleet is sized for a rate.", todo="Leave it out.")
    known = "rate" if sizing.rate is not None else "measured" if sizing.measured else None
    peak_alone = sizing.average is None and sizing.peak_rate is not None
    stated = workload.trace is None or sizing.average is not None or peak_alone
    unpriced = sizing.prices.gpu_hour_usd is None and sizing.prices.server_usd is None
    owned = ("licence_usd", "hosting_usd", "kwh_usd", "utilisation")
    simulated = ("formats", "kv_formats", "requests", "fit")
    shaped = scaling.wanted and not (_traced(settings) or peak_alone or sizing.users)
    of_one = f"sizing.{known} is of one deployment that is not simulated"
    rows: tuple[tuple[str, Group, Iterable[str], bool, str], ...] = (
        ("autoscaling.", scaling, type(scaling).model_fields, not scaling.wanted, "no day is replayed"),
        ("", sizing, simulated, known is not None, of_one),
        ("slo.", sizing.slo, ["percentile"], known == "rate", "sizing.rate is checked against no limit"),
        ("", sizing, ["peak_window_s"], stated, "it is for the rate of workload.trace=FILE"),
        ("", sizing, ["busy_hours"], peak_alone, "it is for the average, and only the peak is given"),
        ("", sizing, ["busy_hours"], shaped, "the day's shape says how many hours are busy"),
        ("prices.", sizing.prices, owned, unpriced, "the GPUs themselves have no price"),
    )
    for place, group, keys, moot, why in rows:
        for key, value in group.changed(keys if moot else ()).items():
            shown = f"[{','.join(value)}]" if isinstance(value, tuple) else str(value).removesuffix(".0")
            more = ", or add sizing.autoscaling.day=business" if group is scaling and known is None else ""
            yield Fault(f"sizing.{place}{key}={shown} has no effect: {why}.", todo=f"Leave it out{more}.")


def question_id(settings: Settings) -> str:
    """Return eight characters that are the same for the same question, so that no answer replaces another."""
    groups = {name: group for name, group in settings.every().items() if name not in ("paths", "report")}
    return fingerprint(groups)[:8]


def _several(several: Sequence[Sequence[str]], judge_of: Callable[[Settings, Machine], Judge]) -> Sized:
    every = [load(overrides) for overrides in several]
    sizing = every[0].sizing
    if sizing.rate is None and sizing.measured is None:  # both are refused for several GPUs
        refuse(_unread(every[0]))
    check_folders({"report.folder": every[0].report.folder})
    question, rows = which_gpu.which_gpu(every, gather(), judge_of)
    name = f"size-{question.model.name}-gpus-{fingerprint([question_id(each) for each in every])[:8]}"
    folder = every[0].report.folder / name
    return Sized(which_gpu.to_json(question, rows), which_gpu.words(question, rows), folder)


def solve(settings: Settings, question: Question, cost_of: CostOf) -> Result:
    """Compute everything that is printed and written."""
    if settings.sizing.autoscaling.wanted:
        _judge_day(settings)
        question = _with_day(settings, question)
    fleet_answer = answer(question, cost_of)
    return Result(
        answer=fleet_answer,
        ladders=tuple(ladder(question, option) for option in fleet_answer.options[:SHOWN_CURVES]),
        check=check(question, fleet_answer.chosen),
        changes=tuple(changes(question, fleet_answer.chosen, cost_of)),
        day=_day(settings, question, fleet_answer) if settings.sizing.autoscaling.wanted else None,
    )


def _judge_day(settings: Settings) -> None:
    scaling, slo = settings.sizing.autoscaling, settings.sizing.slo.to_slo()
    if scaling.signal != "kv_use" and slo.ttft_ms is None:
        raise UserError(
            f"sizing.autoscaling.signal={scaling.signal} needs a TTFT limit, and none is set.",
            todo="Add sizing.slo.ttft_ms=..., or sizing.autoscaling.signal=kv_use.",
        )


def _with_day(settings: Settings, question: Question) -> Question:
    """Return the question with the requests of the day's shape; those of `sizing.users` are known."""
    demand, sizing = question.demand, settings.sizing
    if demand.average is None or _traced(settings):
        return question
    busiest, ratio = _busiest(settings, demand)
    if sizing.users is None:
        hours = 24 * min(1.0, busiest / (demand.average * ratio))
        return replace(question, demand=replace(demand, busy_hours=hours))
    if busiest > demand.peak and sizing.mode != "offline":
        spread = f"Say in how many hours they come: sizing.busy_hours={int(24 / ratio)}."
        raise UserError(
            f"sizing.users={sizing.users:g} would be sized for a peak of {demand.peak:,.4g} requests/s, and the "
            f"busiest hour of the day's shape has {busiest:,.4g}.",
            todo=f"Raise it to sizing.peak_rate={math.ceil(busiest)}." if sizing.peak_rate else spread,
        )
    return question


def _traced(settings: Settings) -> bool:
    return settings.sizing.autoscaling.day == "auto" and settings.workload.trace is not None


def _day_rates(settings: Settings, demand: Demand) -> tuple[Any, str]:
    """Return float[steps], the requests per second of a day, and where they are from."""
    scaling, workload = settings.sizing.autoscaling, settings.workload
    if _traced(settings):
        times = np.array(known_times(workload, "Give the day: sizing.autoscaling.day=business.")) / SECOND
        return counted_rates(times, scaling.step_s), f"trace {workload.trace}"
    shape = _shape(settings)
    how = "built-in shape of a business day (assumed, not measured)" if shape is BUSINESS else "24 hours as given"
    return day_rates(shape, _busiest(settings, demand)[0], scaling.step_s), how


def _shape(settings: Settings) -> tuple[float, ...]:
    day = settings.sizing.autoscaling.day
    return day if isinstance(day, tuple) else BUSINESS


def _busiest(settings: Settings, demand: Demand) -> tuple[float, float]:
    """Return the requests per second of the busiest hour of a day's shape, and how many times the day's mean it is."""
    sizing, shape = settings.sizing, _shape(settings)
    ratio = 24 * max(shape) / sum(shape)
    if demand.average is None:
        return demand.peak, ratio
    if sizing.users is not None:
        return demand.average * ratio * demand.busy_hours / 24, ratio
    # a percentile refers to the seconds of the busiest hour; a factor, a trace's or a given peak is that hour, unless
    # the day would have more than the average around the clock: then the peak is shorter than an hour
    has_peak = sizing.peak_rate is not None or sizing.peak_factor is not None or sizing.average is None
    return min(demand.peak, demand.average * ratio) if has_peak else demand.average, ratio


def _day(settings: Settings, question: Question, fleet_answer: Answer) -> Day:
    """Replay a day on the fixed fleet and on one that scales up to it."""
    best, scaling = fleet_answer.chosen, settings.sizing.autoscaling
    of_one, (rates, how) = curve(question, best), _day_rates(settings, question.demand)
    most, seed = best.fleet.instances, None if _traced(settings) else settings.workload.seed
    if scaling.least > most:
        raise UserError(
            f"sizing.autoscaling.least={scaling.least} is more than the {count(most, 'instance')} of the fixed fleet, "
            "which the autoscaled one never exceeds.",
            todo=f"Lower it to {most} or less, or leave it out.",
        )
    fixed, moving = (
        replay(rates, of_one, scaling, question.slo, least=least, most=most, seed=seed)
        for least in (most, scaling.least)
    )
    return Day(how, fixed, moving)


def write(record: Result | dict[str, Any], folder: Path) -> list[Path]:
    """Write the answer as JSON, and that of one modelled fleet as CSV, Markdown, HTML and pictures too.

    Raises:
        UserError: the folder cannot be written.
    """
    answer_file, table = folder / "answer.json", folder / "table.csv"
    with disk_faults(f"The answer cannot be written to {folder}", "Give another folder: report.folder=/some/folder"):
        if not isinstance(record, Result):
            return [write_json(answer_file, record, sort_keys=False)]
        write_json(answer_file, to_json(record), sort_keys=False)
        write_text(table, to_csv(record))
    paths = write_document(document(record), folder)
    return [answer_file, table, paths.markdown, paths.html]
