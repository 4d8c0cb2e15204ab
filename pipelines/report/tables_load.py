"""The tables of a report about load: the levels of a benchmark, formats side by side."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.document.blocks import LEFT, Column, Table, groups
from pipelines.document.show import NONE, flat, ms, number, percent
from pipelines.domain.benchmark import BenchmarkResult, Distribution, Level, Summary
from pipelines.domain.summary import has_limits
from pipelines.domain.units import show_bytes
from pipelines.report.compare import Comparison, FormatRow
from pipelines.report.data import Run
from pipelines.report.six import lengths, load_label, six


def levels_table(run: Run) -> Table:
    """One row per load of one benchmark."""
    rows, notes = [], []
    title = _load_title(run.result.levels)
    for level in run.result.levels:
        marks = _marks(level)
        cells = (*_level_cells(level, run.result), *_modelled_cells(level, run))
        rows.append((load_label(level) + (" *" if marks else ""), *cells))
        notes += [f"* {level.load}: {mark}." for mark in marks]
    if run.modelled is not None:
        notes.append(f"Modelled: simulated with the same requests, not measured; {run.modelled.why}.")
    result = run.result
    pp = result.world_size // result.tp_size
    pipeline = f", PP {pp}" if pp > 1 else ""
    return Table(
        caption=f"{result.precision} by load: {six([run])}; engine {result.engine}{pipeline}",
        origin="measured",
        columns=(
            *_level_columns(title, run.result.world_size > 1, has_limits(result.slo)),
            *(groups("modelled", _MODELLED) if run.modelled is not None else ()),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _load_title(levels: Sequence[Level]) -> str:
    return "concurrency" if all(level.concurrency is not None for level in levels) else "load"


def _level_columns(load: str, per_gpu: bool, with_slo: bool) -> tuple[Column, ...]:
    gpu = ("output tok/s/GPU", "req/s/GPU") if per_gpu else ()
    rates = ("output tok/s", "total tok/s", "req/s", *gpu, *(("goodput/s",) if with_slo else ()))
    return (
        Column(load, right=LEFT),
        *groups("requests", ("done", "failed")),
        *groups("length, tokens", ("ISL", "OSL")),
        *groups("throughput", rates),
        *groups("TTFT, ms", ("p50", "p95", "p99")),
        *groups("ITL, ms", ("p50", "p95", "p99")),
        *groups("token gap, ms", ("p50", "p99")),
        *groups("E2E, ms", ("p50", "p95", "p99")),
    )


def _level_cells(level: Level, result: BenchmarkResult) -> tuple[str, ...]:
    summary, gpus = level.summary, result.world_size
    return (
        f"{summary.requests:,}",
        _errors(summary),
        lengths([summary.isl]),
        lengths([summary.osl]),
        number(summary.output_tokens_per_s),
        number(summary.total_tokens_per_s),
        number(summary.requests_per_s),
        *((number(summary.output_tokens_per_s / gpus), number(summary.requests_per_s / gpus)) if gpus > 1 else ()),
        *((number(summary.goodput_per_s),) if has_limits(result.slo) else ()),
        *_cells(summary.ttft_s, "p50", "p95", "p99"),
        *_cells(summary.itl_s, "p50", "p95", "p99"),
        *_cells(summary.token_gap_s, "p50", "p99"),
        *_cells(summary.e2e_s, "p50", "p95", "p99"),
    )


_MODELLED = ("req/s", "TTFT p50", "TTFT p95", "ITL p50")


def _modelled_cells(level: Level, run: Run) -> tuple[str, ...]:
    """What the model says of this load; nothing at all where there is no model."""
    if run.modelled is None:
        return ()
    found = run.modelled.levels.get(level.requests_file)
    if found is None:
        return (NONE,) * len(_MODELLED)
    return (number(found.requests_per_s), *_cells(found.ttft_s, "p50", "p95"), ms(found.itl_s.p50))


def _cells(metric: Distribution, *names: str) -> tuple[str, ...]:
    return tuple(ms(getattr(metric, name)) for name in names)


def _errors(summary: Summary) -> str:
    count = sum(summary.errors.values())
    kinds = ", ".join(f"{kind} {many}" for kind, many in sorted(summary.errors.items()))
    return f"{count} ({kinds})" if count else "0"


def _marks(level: Level) -> list[str]:
    marks = []
    if not level.complete:
        marks.append(f"cut short ({level.reason or 'no reason recorded'})")
    if level.client.bottleneck:
        marks.append(f"client-limited ({level.client.reason}); a lower bound")
    return marks


_METRICS = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("token gap", "token_gap_s"), ("E2E", "e2e_s"))
_STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "max")


def percentiles_table(run: Run) -> Table:
    """Every statistic of every latency at every load."""
    levels = run.result.levels
    metrics = [(load_label(level), title, getattr(level.summary, name)) for title, name in _METRICS for level in levels]
    return Table(
        caption=f"All latencies in ms: {six([run])}",
        origin="measured",
        columns=(
            Column("metric", right=LEFT),
            Column(_load_title(levels)),
            Column("count"),
            *(Column(name) for name in _STATISTICS),
        ),
        rows=tuple(
            (title, load, f"{metric.count:,}", *_cells(metric, *_STATISTICS)) for load, title, metric in metrics
        ),
    )


def counters_table(run: Run) -> Table | None:
    """What the server and the load generator counted in each level's window; None when neither did."""
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
        caption=f"What server and load generator counted in each window: {six([run])}",
        origin="measured",
        columns=(
            Column("counter", right=LEFT),
            Column("of", right=LEFT),
            *groups(_load_title(levels), [load_label(level) for level in levels]),
        ),
        rows=rows,
    )


def _counted(text: str) -> str:
    """A counter as shown: whole numbers as they are, others with three digits."""
    try:
        return f"{int(text):,}" if text.isdigit() else number(float(text))
    except ValueError:
        return text


def comparison_table(compared: Comparison) -> Table:
    """Formats side by side, the chosen one standing out."""
    runs = [row.run for row in compared.rows if row.run]
    where = f": {six(runs)}; engine {runs[0].result.engine}" if runs else f": model {compared.model}"
    with_slo = any(row.at_slo for row in compared.rows)
    workload = f", workload {compared.workload.title}" if compared.workload else ""
    load = _load_title([level for run in runs for level in run.result.levels])
    at_slo = ("output tok/s", load, "TTFT p99, ms", "ITL p99, ms")
    columns = (
        Column("format", right=LEFT),
        *groups("accuracy", ("%", "loss %")),
        Column("verdict", "accuracy", right=LEFT),
        Column("engine"),
        *groups("at peak throughput", ("output tok/s", load, "TTFT p50, ms", "ITL p50, ms", "E2E p95, ms")),
        *(groups("at best load within SLO", at_slo) if with_slo else ()),
    )
    rows = tuple(_format_cells(row, with_slo) for row in compared.rows)
    names = [row.variant for row in compared.rows]
    return Table(
        caption=f"Formats side by side{workload}{where}",
        origin="measured",
        columns=columns,
        rows=rows,
        strong=names.index(compared.chosen) if compared.chosen else None,
        notes=_peak_notes(compared.rows),
    )


def _peak_notes(rows: Sequence[FormatRow]) -> tuple[str, ...]:
    marked = [row.variant for row in rows if row.peak and _marks(row.peak)]
    note = "* Client-limited or cut short, so a lower bound; the reason stands with the load further down."
    return (note,) if marked else ()


def _format_cells(row: FormatRow, with_slo: bool) -> tuple[str, ...]:
    cells = [
        row.variant,
        percent(row.accuracy),
        NONE if row.loss_percent is None else f"{row.loss_percent:.2f}",
        row.verdict,
        NONE if row.engine_bytes is None else show_bytes(row.engine_bytes),
    ]
    if row.peak is None:
        cells += [NONE] * 5
    else:
        peak = row.peak.summary
        mark = " *" if _marks(row.peak) else ""
        cells += [
            number(peak.output_tokens_per_s) + mark, load_label(row.peak), ms(peak.ttft_s.p50), ms(peak.itl_s.p50),
            ms(peak.e2e_s.p95),
        ]  # fmt: skip
    if with_slo and row.at_slo is None:
        cells += [NONE] * 4
    elif with_slo and row.at_slo is not None:
        slo = row.at_slo.summary
        cells += [number(slo.output_tokens_per_s), load_label(row.at_slo), ms(slo.ttft_s.p99), ms(slo.itl_s.p99)]
    return tuple(cells)
