"""Rank the formats of a workload again under every TTFT limit that changes something, at each load or the best.

All steps are computed here, by the rules of `pipelines.report.compare`: the page only looks one up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pipelines.document.blocks import Callout, Card, Ranking, RankingStep, Table, left, right
from pipelines.document.show import NONE, count, number, percent
from pipelines.domain.benchmark import Slo
from pipelines.domain.metrics import RANKED
from pipelines.domain.units import show_bytes
from pipelines.report.compare import AT_LEAST, Comparison, FormatRow, compare_formats, finished, load_notes, refusal
from pipelines.report.data import BenchmarkRun, ReportData, run_label

BEST = "each format at its best load"
NO_TTFT = (
    "There is no slider for a TTFT limit, because no time to first token was measured: the answers were not streamed."
)
NO_LOAD = "The formats cannot be ranked by a TTFT limit, because no latency was measured: `make benchmark`."

Tiles = Callable[[Comparison], tuple[Card, ...]]


def ranking(data: ReportData, compared: Comparison, most_percent: float, tiles: Tiles | None = None) -> Ranking:
    """Return the ranking of a comparison; without loads it has one step, and says why.

    Args:
        data: result of `pipelines.report.collect`.
        compared: its comparison under one workload.
        most_percent: acceptable loss, percent of the baseline's accuracy.
        tiles: makes the first screen of a comparison; None leaves the first screen alone.
    """
    levels = [level for row in compared.rows for level in finished(row.run)]
    loads = dict.fromkeys(level.load for level in levels)
    slo = next((row.run.result.slo for row in compared.rows if row.run), Slo())
    others = {name: limit for name, limit in slo.limits.items() if name != "ttft"}
    hints = [f"{name.upper()} p99 stays limited to {limit:g} ms." for name, limit in others.items()]
    if not any(level.summary.ttft_s.p99 for level in levels):
        hints = [*hints, NO_TTFT] if levels else [NO_LOAD]
    return Ranking(
        limit="TTFT p99",
        unit="ms",
        views=tuple(
            (load or BEST, tuple(_steps(data, compared, most_percent, load, tiles)))
            for load in ([None, *loads] if len(loads) > 1 else [None])
        ),
        start=slo.ttft_ms,
        hint=" ".join(hints),
    )


def _steps(
    data: ReportData, comparison: Comparison, most_percent: float, load: str | None, tiles: Tiles | None
) -> Iterator[RankingStep]:
    """Yield a step for each limit at which something changes; the last has no limit."""
    levels = [level for row in comparison.rows for level in finished(row.run) if load in (None, level.load)]
    ends = sorted({1000 * level.summary.ttft_s.p99 for level in levels if level.summary.ttft_s.p99})
    before: RankingStep | None = None
    for limit in [*([0.0, *ends] if ends else []), None]:
        workload = comparison.workload
        if workload is not None:
            workload = replace(workload, runs=tuple(_limited(run, load, limit) for run in workload.runs))
        compared = compare_formats(data, workload, comparison.model, most_percent)
        answer = Callout("good" if compared.chosen else "note", compared.reason)
        step = RankingStep(limit, answer, _table(compared, load, most_percent), tiles(compared) if tiles else ())
        if limit is None or before is None or replace(step, at=before.at) != before:
            yield (before := step)


def _limited(run: BenchmarkRun, load: str | None, limit: float | None) -> BenchmarkRun:
    """Return a run as if it had been measured at one load and with this limit, ms; None is every load, no limit."""
    levels = tuple(level for level in run.result.levels if load in (None, level.load))
    timed = tuple(level for level in levels if limit is None or level.summary.ttft_s.p99 is not None)
    result = replace(run.result, levels=timed, slo=replace(run.result.slo, ttft_ms=limit))
    if run.result.levels and not timed:
        why = "its TTFT was not measured" if levels else f"it was not measured at {load}"
        result = replace(result, complete=True, reason=why)
    return replace(run, result=result)


def _table(compared: Comparison, load: str | None, most_percent: float) -> Table:
    """Return the formats that qualify by throughput, then the others; only a decided order has ranks."""
    reasons = {rejection.variant: rejection.reason for rejection in compared.rejected}
    fit = [row for row in compared.rows if not refusal(row, most_percent)]
    fit.sort(key=lambda row: row.score or 0.0, reverse=True)
    others = [row for row in compared.rows if row not in fit]
    runs = [row.run for row in compared.rows if row.run and row.run.result.levels]
    rows = tuple(
        (
            row.variant,
            str(rank) if compared.chosen and row in fit else NONE,
            *_figures(row, load),
            percent(row.accuracy),
            NONE if row.loss_percent is None else f"{row.loss_percent:.2f}",
            row.verdict,
            NONE if row.engine_bytes is None else show_bytes(row.engine_bytes),
            reasons.get(row.variant, ""),
        )
        for rank, row in enumerate([*fit, *others], 1)
    )
    first, *times = RANKED
    where = f"{run_label(runs)}; engine {runs[0].result.engine}" if runs else f"model {compared.model}"
    hint = f"; {AT_LEAST}: higher loads do not count" if any(AT_LEAST in cell for row in rows for cell in row) else ""
    workload = f" under the workload {compared.workload.title}" if compared.workload else ""
    return Table(
        caption=f"Formats by {first.title}{workload}, ranked if they lose at most {most_percent:g} %: {where}{hint}",
        origin="measured",
        columns=(
            *left("format"),
            *right("rank", first.column, "load", *(figure.title for figure in times), "accuracy %", "loss %"),
            *left("verdict"),
            *right("engine"),
            *left("why not"),
        ),
        rows=rows,
        strong=0 if compared.chosen else None,
        notes=_notes(compared),
    )


def _notes(compared: Comparison) -> tuple[str, ...]:
    """Return the limitations of the choice, and how many loads do not count: the report lists them below."""
    uncounted = sum(not level.counts for row in compared.rows for level in finished(row.run))
    listed = load_notes(compared.rows)
    where = "the load generator was the bottleneck, or it was cut short"
    more = (f"{count(uncounted, 'load')} not counted, because {where}.",) if uncounted else ()
    return (*(note for note in compared.notes if note not in listed), *more)


def _figures(row: FormatRow, load: str | None) -> list[str]:
    """Return throughput, load and latencies at the load that counts; at a given load even if it does not qualify."""
    level, mark = row.level, row.slo_mark if row.level is row.at_slo else row.peak_mark
    if level is None and load:
        level, mark = row.peak or next(iter(row.limited), None), "" if row.peak else AT_LEAST
    if level is None:
        return [NONE] * (len(RANKED) + 1)
    first, *times = (number(figure.shown(figure.of(level.summary))) for figure in RANKED)
    return [mark + first, level.label, *times]
