"""The numbers of a report as CSV and JSON beside its page, and those of an earlier report beside this one's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pipelines.document.blocks import Attachment, Column, Section, Table, Text, groups, left, right
from pipelines.document.show import NONE, csv_text, flat, number, when
from pipelines.domain.errors import JsonFile, UserError
from pipelines.domain.metrics import FIGURES, LATENCIES, RATES
from pipelines.domain.units import show_bytes
from pipelines.report.compare import Comparison

RATE, TTFT = FIGURES["output_tokens_per_s"], FIGURES["ttft_p99_s"]
CONDITIONS = ("engine", "tp_size", "gpus", "workload", "protocol", "machine", "versions")
MOST_DIFFERENCES = 8


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """One format under one load, which is None where nothing was benchmarked; None is not measured.

    `figures` are by key (`pipelines.domain.metrics`), latencies in seconds; losses in percent of the baseline's
    accuracy.
    """

    model: str
    workload: str
    format: str
    chosen: bool
    accuracy: float | None
    loss_percent: float | None
    loss_most_percent: float | None
    verdict: str
    engine_bytes: int | None
    load: str | None
    counts: bool
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class ReportedNumbers(JsonFile):
    """All numbers of a report.

    Attributes:
        newest: ISO time of its newest result.
        answers: the choice, or why there is none, by model and workload: "tiny_gemma, chat".
        conditions: engine, machine, workload, ... of each.
        loads: every format under every load.
    """

    FILE: ClassVar[str] = "comparison.json"
    WHAT: ClassVar[str] = "a comparison of formats"
    TODO: ClassVar[str] = f"Give the {FILE} that `make report` or `make compare` wrote beside its page."

    newest: str
    answers: Mapping[str, str]
    conditions: Mapping[str, Mapping[str, Any]]
    loads: tuple[ReportedLoad, ...]
    schema: int = 1

    @classmethod
    def of(cls, compared: Sequence[Comparison], newest: str) -> Self:
        """Return the numbers of comparisons."""
        conditions: dict[str, Mapping[str, Any]] = {}
        for item in compared:
            result = next((row.run.result for row in item.rows if row.run), None)
            facts = {name: getattr(result, name) for name in CONDITIONS} | {"slo": result.slo.limits} if result else {}
            conditions[_name(item)] = facts
        answers = {_name(item): item.reason for item in compared}
        return cls(newest, answers, conditions, tuple(load for item in compared for load in _loads(item)))


def _name(item: Comparison) -> str:
    return f"{item.model}, {_workload(item)}"


def _workload(item: Comparison) -> str:
    return item.workload.title if item.workload else "no workload"


def _loads(item: Comparison) -> Iterator[ReportedLoad]:
    for row in item.rows:
        unmeasured = ReportedLoad(
            item.model, _workload(item), row.variant, row.variant == item.chosen, row.accuracy, row.loss_percent,
            row.most_percent, str(row.verdict), row.engine_bytes, None, counts=False, figures={},
        )  # fmt: skip
        levels = row.run.result.levels if row.run else ()
        for level in levels:
            figures = {figure.key: figure.of(level.summary) for figure in (*RATES, *LATENCIES)}
            yield replace(unmeasured, load=level.load, counts=level.counts, figures=figures)
        if not levels:
            yield unmeasured


def attachments(numbers: ReportedNumbers) -> tuple[Attachment, ...]:
    """Return the files beside a report: a row per format and load as CSV, and everything as JSON."""
    keys = [figure.key for figure in (*RATES, *LATENCIES)]
    rows = [{**asdict(load), **load.figures} for load in numbers.loads]
    names = [*(name for name in rows[0] if name not in ("figures", *keys)), *keys]
    table = csv_text(names, ([_plain(row.get(name)) for name in names] for row in rows))
    text = json.dumps(numbers.to_json(), indent=1, allow_nan=False) + "\n"
    return (
        Attachment("comparison.csv", "all loads as CSV", table.encode()),
        Attachment(ReportedNumbers.FILE, "all numbers as JSON", text.encode()),
    )


def _plain(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def earlier_numbers(path: Path | None) -> ReportedNumbers | None:
    """Read the numbers of an earlier report; None without one.

    Raises:
        UserError: there is no such file, or it is not one.
    """
    if path is None:
        return None
    try:
        return ReportedNumbers.load(path)
    except UserError as error:
        why = error.faults[0].message
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}."
    raise UserError(f"report.against='{path}' is no earlier report: {why}", todo=ReportedNumbers.TODO)


def side_by_side(then: ReportedNumbers, now: ReportedNumbers) -> Section:
    """Return the section that shows each format then and now, at the best load that counted both times."""
    return Section("earlier", "Beside an earlier report", tuple(_beside(then, now, name) for name in now.answers))


def _beside(then: ReportedNumbers, now: ReportedNumbers, name: str) -> Table | Text:
    if name not in then.answers:
        return Text(f"The earlier report has nothing of {name}; it has {'; '.join(then.answers) or 'nothing'}.")
    sides = [[load for load in each.loads if f"{load.model}, {load.workload}" == name] for each in (then, now)]
    formats = dict.fromkeys(load.format for side in reversed(sides) for load in side)
    old, new = (dict(flat(each.conditions.get(name, {}))) for each in (then, now))
    unlike = [
        f"{key} {old.get(key, 'not given')} then, {new.get(key, 'not given')} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    more = f"; and {len(unlike) - MOST_DIFFERENCES} more" if len(unlike) > MOST_DIFFERENCES else ""
    return Table(
        caption=f"{name}: newest result {when(then.newest)} then, {when(now.newest)} now",
        origin="measured",
        columns=(
            *left("format"),
            *right("load"),
            *groups("output tok/s", ("then", "now", "change %")),
            *groups("TTFT p99, ms", ("then", "now")),
            *groups("loss %", ("then", "now")),
            *(Column(title, "verdict", right=False) for title in ("then", "now")),
            *groups("engine", ("then", "now")),
        ),
        rows=tuple(_cells(each, *sides) for each in formats),
        notes=(
            f"Then: {then.answers[name]}",
            f"Now: {now.answers[name]}",
            *([f"Not measured alike: {'; '.join(unlike[:MOST_DIFFERENCES])}{more}."] if unlike else []),
            "A change between two measurements may be noise; `make nightly` judges it by earlier nights.",
        ),
    )


def _cells(name: str, then: Sequence[ReportedLoad], now: Sequence[ReportedLoad]) -> tuple[str, ...]:
    then, now = ([load for load in side if load.format == name] for side in (then, now))
    counted = {load.load: load for load in then if load.counts}
    both = [(counted[load.load], load) for load in now if load.counts and load.load in counted]
    best = max(both, key=lambda pair: pair[1].figures.get(RATE.key) or 0.0, default=())
    figures = [RATE.shown(load.figures.get(RATE.key)) for load in best] or [None, None]
    times = [TTFT.shown(load.figures.get(TTFT.key)) for load in best] or [None, None]
    change = f"{100 * (figures[1] / figures[0] - 1):+.1f}" if figures[0] and figures[1] is not None else NONE
    sides = [next(iter(side), None) for side in (then, now)]
    return (
        name,
        best[0].load.removeprefix("concurrency ") if best and best[0].load else NONE,
        *map(number, figures),
        change,
        *map(number, times),
        *(NONE if each is None or each.loss_percent is None else f"{each.loss_percent:.2f}" for each in sides),
        *(each.verdict if each else NONE for each in sides),
        *(NONE if each is None or each.engine_bytes is None else show_bytes(each.engine_bytes) for each in sides),
    )
