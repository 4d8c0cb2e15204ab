"""Tables of a report about load: the levels of a benchmark, and the comparison of formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from pipelines.document.blocks import LEFT, Column, Table, groups
from pipelines.document.show import NONE, flat, number, percent
from pipelines.domain.benchmark import DISTRIBUTIONS, BenchmarkResult, Level, Summary
from pipelines.domain.metrics import (
    AT_PEAK,
    AT_SLO,
    LATENCIES,
    LATENCY,
    METRICS,
    MODELLED,
    RATES,
    RATES_PER_GPU,
    STATISTICS,
    MetricStatistic,
)
from pipelines.domain.summary import has_limits
from pipelines.domain.units import show_bytes
from pipelines.report.compare import AT_LEAST, Comparison, FormatRow
from pipelines.report.data import BenchmarkRun, lengths, load_label, six


def levels_table(run: BenchmarkRun) -> Table:
    """Return one row per load of a benchmark."""
    rows, notes = [], []
    title = _load_title(run.result.levels)
    for level in run.result.levels:
        marks = _marks(level)
        rows.append((load_label(level) + (" *" if marks else ""), *_level_cells(level, run.result)))
        notes += [f"* {level.load}: {mark}." for mark in marks]
    result = run.result
    pp = result.world_size // result.tp_size
    pipeline = f", PP {pp}" if pp > 1 else ""
    several = f", {result.gpus} GPUs in all" if result.gpus > result.world_size else ""
    return Table(
        caption=f"{result.precision} by load: {six([run])}; engine {result.engine}{pipeline}{several}",
        origin="measured",
        columns=_level_columns(title, result),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def modelled_table(run: BenchmarkRun) -> Table | None:
    """Return the performance model's prediction beside what was measured; None without a model."""
    if run.modelled is None:
        return None
    rows = []
    for level in run.result.levels:
        found = run.modelled.levels.get(level.requests_file)
        measured = _cells(level.summary, MODELLED)
        modelled = (NONE,) * len(MODELLED) if found is None else _cells(found, MODELLED)
        rows.append((load_label(level), *(cell for both in zip(measured, modelled, strict=True) for cell in both)))
    return Table(
        caption=f"{run.result.precision}, modelled beside measured: {six([run])}; engine {run.result.engine}",
        origin="",
        columns=(
            Column(_load_title(run.result.levels), right=LEFT),
            *(column for figure in MODELLED for column in groups(_titled(figure), ("measured", "modelled"))),
        ),
        rows=tuple(rows),
        notes=(f"Modelled: simulated with the same requests, not measured; {run.modelled.why}.",),
    )


def _titled(figure: MetricStatistic) -> str:
    return figure.title if figure.statistic else figure.metric.title


def _load_title(levels: Sequence[Level]) -> str:
    return "concurrency" if all(level.concurrency is not None for level in levels) else "load"


def _rates(result: BenchmarkResult) -> list[tuple[MetricStatistic, int]]:
    """Return the rates to show, each with the number of GPUs to divide by; goodput comes last and only with limits."""
    own = [(figure, 1) for figure in RATES if not figure.metric.optional]
    per_gpu = [(figure, result.gpus) for figure in RATES_PER_GPU if result.gpus > 1]
    return own + per_gpu + [(figure, 1) for figure in RATES if figure.metric.optional and has_limits(result.slo)]


def _level_columns(load: str, result: BenchmarkResult) -> tuple[Column, ...]:
    rates = [figure.column + ("/GPU" if gpus > 1 else "") for figure, gpus in _rates(result)]
    latencies = groupby(LATENCIES, lambda figure: f"{figure.metric.title}, {figure.metric.unit.shown}")
    return (
        Column(load, right=LEFT),
        *groups("requests", ("done", "failed")),
        *groups("length, tokens", ("ISL", "OSL")),
        *groups("throughput", rates),
        *(column for title, own in latencies for column in groups(title, [figure.column for figure in own])),
    )


def _level_cells(level: Level, result: BenchmarkResult) -> tuple[str, ...]:
    summary = level.summary
    values = [(figure.of(summary), gpus) for figure, gpus in _rates(result)]
    return (
        f"{summary.requests:,}",
        _errors(summary),
        lengths([summary.isl]),
        lengths([summary.osl]),
        *(number(None if value is None else value / gpus) for value, gpus in values),
        *_cells(summary, LATENCIES),
    )


def _cells(summary: Summary, figures: Iterable[MetricStatistic]) -> tuple[str, ...]:
    return tuple(number(figure.shown(figure.of(summary))) for figure in figures)


def _errors(summary: Summary) -> str:
    count = sum(summary.errors.values())
    kinds = ", ".join(f"{kind} {many}" for kind, many in sorted(summary.errors.items()))
    return f"{count} ({kinds})" if count else "0"


def _marks(level: Level) -> list[str]:
    marks = []
    if not level.complete:
        marks.append(f"cut short ({level.reason or 'no reason recorded'})")
    if level.client.bottleneck:
        marks.append(f"client-limited ({level.client.reason}), so its throughput is a lower bound")
    return marks


def percentiles_table(run: BenchmarkRun) -> Table:
    """Return every statistic of every latency at every load."""
    levels = run.result.levels
    latencies = [metric for metric in METRICS if metric.name in DISTRIBUTIONS and metric.unit is LATENCY]
    return Table(
        caption=f"All latencies in ms: {six([run])}",
        origin="measured",
        columns=(
            Column("metric", right=LEFT),
            Column(_load_title(levels)),
            Column("count"),
            *(Column(name) for name in STATISTICS),
        ),
        rows=tuple(
            (
                metric.title,
                load_label(level),
                f"{getattr(level.summary, metric.name).count:,}",
                *_cells(level.summary, (MetricStatistic(metric, name) for name in STATISTICS)),
            )
            for metric in latencies
            for level in levels
        ),
    )


def counters_table(run: BenchmarkRun) -> Table | None:
    """Return the counters of server and load generator in each level's window; None if there are none."""
    levels = run.result.levels
    server = [dict(flat(level.server)) for level in levels]
    client = [dict(flat(level.client.facts)) for level in levels]
    rows = tuple(
        (name, side, *(_counted(each.get(name, NONE)) for each in counted))
        for side, counted in (("server", server), ("load generator", client))
        for name in dict.fromkeys(name for each in counted for name in each)
    )
    if not rows:
        return None
    return Table(
        caption=f"Counters of the server and the load generator in each window: {six([run])}",
        origin="measured",
        columns=(
            Column("counter", right=LEFT),
            Column("source", right=LEFT),
            *groups(_load_title(levels), [load_label(level) for level in levels]),
        ),
        rows=rows,
    )


def _counted(text: str) -> str:
    """Format a counter: whole numbers unchanged, others with three digits."""
    try:
        return f"{int(text):,}" if text.isdigit() else number(float(text))
    except ValueError:
        return text


def comparison_table(compared: Comparison) -> Table:
    """Return the formats side by side, with the chosen one highlighted."""
    runs = [row.run for row in compared.rows if row.run]
    where = f": {six(runs)}; engine {runs[0].result.engine}" if runs else f": model {compared.model}"
    with_slo = any(row.at_slo for row in compared.rows)
    workload = f", workload {compared.workload.title}" if compared.workload else ""
    load = _load_title([level for run in runs for level in run.result.levels])
    columns = (
        Column("format", right=LEFT),
        *groups("accuracy", ("%", "loss %")),
        Column("verdict", "accuracy", right=LEFT),
        Column("engine"),
        *groups("at peak throughput", _at_load(AT_PEAK, load)),
        *(groups("at best load within SLO", _at_load(AT_SLO, load)) if with_slo else ()),
    )
    rows = tuple(_format_cells(row, with_slo) for row in compared.rows)
    bound = any(AT_LEAST in cell for cells in rows for cell in cells)
    told = f"; {AT_LEAST}: higher loads do not count" if bound else ""
    names = [row.variant for row in compared.rows]
    return Table(
        caption=f"Formats side by side{workload}{where}{told}",
        origin="measured",
        columns=columns,
        rows=rows,
        strong=names.index(compared.chosen) if compared.chosen else None,
    )


def _at_load(figures: Sequence[MetricStatistic], load: str) -> tuple[str, ...]:
    """Return the headings of figures, with the load after the first."""
    first, *others = figures
    return (first.column, load, *(figure.title for figure in others))


def _format_cells(row: FormatRow, with_slo: bool) -> tuple[str, ...]:
    cells = [
        row.variant,
        percent(row.accuracy),
        NONE if row.loss_percent is None else f"{row.loss_percent:.2f}",
        row.verdict,
        NONE if row.engine_bytes is None else show_bytes(row.engine_bytes),
    ]
    if row.peak is None:
        cells += [NONE] * (len(AT_PEAK) + 1)
    else:
        first, *others = _cells(row.peak.summary, AT_PEAK)
        cells += [row.peak_mark + first, load_label(row.peak), *others]
    if with_slo and row.at_slo is None:
        cells += [NONE] * (len(AT_SLO) + 1)
    elif with_slo and row.at_slo is not None:
        first, *others = _cells(row.at_slo.summary, AT_SLO)
        cells += [row.slo_mark + first, load_label(row.at_slo), *others]
    return tuple(cells)
