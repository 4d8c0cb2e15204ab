"""The report on load: how it was measured, the levels of a benchmark, and the comparison of formats."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from pipelines.document.blocks import Block, Column, Fold, Table, Terms, groups, left, right
from pipelines.document.show import NONE, count, flat, machine_text, number, percent, settings_text, when
from pipelines.domain.benchmark import DISTRIBUTIONS, BenchmarkResult, LoadPoint, Slo, Summary
from pipelines.domain.metrics import (
    LATENCIES,
    LATENCY,
    METRICS,
    MODELLED,
    RATES,
    RATES_PER_GPU,
    STATISTICS,
    MetricStatistic,
)
from pipelines.loadgen.config import WorkloadSettings
from pipelines.report.data import BenchmarkRun, Workload, lengths, run_label


def levels_table(run: BenchmarkRun) -> Table:
    """Return one row per load of a benchmark."""
    result, rows, notes = run.result, [], []
    rates = _rates(result)
    for level in result.levels:
        summary, marks = level.summary, _marks(level)
        rows.append(
            (
                level.label + (" *" if marks else ""),
                f"{summary.requests:,}",
                _errors(summary),
                lengths([summary.isl]),
                lengths([summary.osl]),
                *(_with_interval(level, figure, gpus) for figure, gpus in rates),
                *(_with_interval(level, figure) for figure in LATENCIES),
            )
        )
        notes += [f"* {level.load}: {mark}." for mark in marks]
        notes += [f"{level.load}: {note}" for note in level.notes[bool(level.intervals) :]]  # the first one lists them
    if (runs := max((level.runs for level in result.levels), default=1)) > 1:
        notes.append(f"In parentheses: 95 % interval of the mean of {runs} runs; the figure is of the median run.")
    notes += [result.server["model_check"]] if "model_check" in result.server else []
    pp = result.world_size // result.tp_size
    pipeline = f", PP {pp}" if pp > 1 else ""
    several = f", {result.gpus} GPUs in all" if result.gpus > result.world_size else ""
    latencies = groupby(LATENCIES, lambda figure: f"{figure.metric.title}, {figure.metric.unit.shown}")
    return Table(
        caption=f"{result.precision} by load: {run_label([run])}; engine {result.engine}{pipeline}{several}",
        origin="measured",
        columns=(
            *left(_load_title(result.levels)),
            *groups("requests", ("done", "failed")),
            *groups("length, tokens", ("ISL", "OSL")),
            *groups("throughput", [figure.column + ("/GPU" if gpus > 1 else "") for figure, gpus in rates]),
            *(column for title, own in latencies for column in groups(title, [figure.column for figure in own])),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def modelled_table(run: BenchmarkRun) -> Table | None:
    """Return the performance model's prediction beside what was measured; None without a model."""
    if run.modelled is None:
        return None
    rows = []
    for level in run.result.levels:
        summary = run.modelled.levels.get(level.requests_file)
        measured = _cells(level.summary, MODELLED)
        modelled = (NONE,) * len(MODELLED) if summary is None else _cells(summary, MODELLED)
        rows.append((level.label, *(cell for both in zip(measured, modelled, strict=True) for cell in both)))
    return Table(
        caption=f"{run.result.precision}, modelled beside measured: {run_label([run])}; engine {run.result.engine}",
        origin="",
        columns=(
            *left(_load_title(run.result.levels)),
            *(
                column
                for figure in MODELLED
                for column in groups(
                    figure.title if figure.statistic else figure.metric.title, ("measured", "modelled")
                )
            ),
        ),
        rows=tuple(rows),
        notes=(f"Modelled: simulated with the same requests, not measured; {run.modelled.why}.",),
    )


def _load_title(levels: Sequence[LoadPoint]) -> str:
    return "concurrency" if all(level.concurrency is not None for level in levels) else "load"


def _rates(result: BenchmarkResult) -> list[tuple[MetricStatistic, int]]:
    """Return the rates to show, each with the number of GPUs to divide by; goodput comes last and only with limits."""
    own = [(figure, 1) for figure in RATES if not figure.metric.optional]
    per_gpu = [(figure, result.gpus) for figure in RATES_PER_GPU if result.gpus > 1]
    return own + per_gpu + [(figure, 1) for figure in RATES if figure.metric.optional and result.slo.limits]


def _with_interval(level: LoadPoint, figure: MetricStatistic, gpus: int = 1) -> str:
    value, ends = figure.of(level.summary), level.intervals.get(figure.key)
    text, *interval = (number(None if each is None else figure.shown(each / gpus)) for each in (value, *(ends or ())))
    return f"{text} ({' to '.join(interval)})" if interval else text


def _cells(summary: Summary, figures: Iterable[MetricStatistic]) -> tuple[str, ...]:
    return tuple(number(figure.shown(figure.of(summary))) for figure in figures)


def _errors(summary: Summary) -> str:
    failed = sum(summary.errors.values())
    kinds = ", ".join(f"{kind} {many}" for kind, many in sorted(summary.errors.items()))
    return f"{failed} ({kinds})" if failed else "0"


def _marks(level: LoadPoint) -> list[str]:
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
        caption=f"All latencies in ms: {run_label([run])}",
        origin="measured",
        columns=(*left("metric"), Column(_load_title(levels)), *right("count", *STATISTICS)),
        rows=tuple(
            (
                metric.title,
                level.label,
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
        caption=f"Counters of the server and the load generator in each window: {run_label([run])}",
        origin="measured",
        columns=(*left("counter", "source"), *groups(_load_title(levels), [level.label for level in levels])),
        rows=rows,
    )


def _counted(text: str) -> str:
    """Format a counter: whole numbers unchanged, others with three digits."""
    try:
        return f"{int(text):,}" if text.isdigit() else number(float(text))
    except ValueError:
        return text


# How a benchmark was measured: sentences, with every recorded setting in a folded table.

_ARRIVALS = {
    "closed": "each user sends the next request when the answer is complete (closed loop)",
    "constant": "requests arrive at equal intervals (open loop)",
    "poisson": "requests arrive at random, as in a Poisson process (open loop)",
    "gamma": "requests arrive at random, in gamma-distributed intervals (open loop)",
    "burst": "all requests arrive at once",
    "trace": "requests arrive as in a recorded trace",
}


def protocol(workload: Workload) -> list[Block]:
    """Return the protocol, which is part of every number."""
    result = workload.runs[0].result
    name = " ".join(str(result.server[key]) for key in ("name", "version") if result.server.get(key))
    model = f", model {result.server['model_name']}" if result.server.get("model_name") else ""
    where = f" at {result.server['url']}" if result.server.get("url") else ""
    items = [
        ("workload", workload_text(result.workload)),
        ("protocol", protocol_text(result.protocol)),
        ("SLO", slo_text(result.slo) if result.slo.limits else "none given"),
        *(
            (
                f"largest load, {run.result.precision}",
                f"{run.result.search.text}, {run.result.search.attainment:.3g} within the SLO",
            )
            for run in workload.runs
            if run.result.search is not None
        ),
        ("server", f"{name or 'a server'}{where}{model}"),
        ("measured", ", ".join(f"{run.result.precision} {when(run.result.measured_at)}" for run in workload.runs)),
        ("machine", machine_text(result.machine)),
    ]
    for what in ("protocol", "slo"):
        other = [run.result.precision for run in workload.runs if getattr(run.result, what) != getattr(result, what)]
        if other:
            items.append(("differs", f"the {what} of {', '.join(other)} differs from that of {result.precision}"))
    again = [f"{run.result.precision} {1 + len(run.repeats)} runs" for run in workload.runs if run.repeats]
    if again:
        items.append(("repeated", f"{', '.join(again)}; the newest is shown"))
    return [Terms(tuple(items)), *_settings(result)]


def workload_text(workload: Mapping[str, Any]) -> str:
    """Describe the requests and their arrival."""
    parts = [
        f"{_length(workload[name])} {what}"
        for name, what in (("isl", "input tokens"), ("osl", "output tokens"))
        if workload.get(name) is not None
    ]
    lengths = f"{' and '.join(parts) or 'lengths not recorded'} per request"
    if file := workload.get("trace"):
        lengths = f"lengths of {file}"
    elif mix := workload.get("mix"):
        rest = percent(sum(each["share"] for each in mix), 0)
        lengths += f", and {count(len(mix), 'other length')} for {rest} % of them"
    text = f"{workload.get('name', 'unnamed')}: {lengths}"
    if images := workload.get("images"):
        usual = WorkloadSettings.model_fields["image_side"].default  # not stored
        side = workload.get("image_side", usual)
        text += f", {count(images, 'picture')} of {side} x {side} pixels among the input tokens"
    arrival = str(workload.get("arrival", ""))
    if arrival in _ARRIVALS:
        text += f"; {_ARRIVALS[arrival]}"
    if pause := workload.get("think_time_s"):
        text += f", after a pause of {pause:g} s"
    if share := workload.get("shared_prefix_share"):
        text += f"; {100 * share:g} % of each prompt is the same in all prompts"
    if (turns := workload.get("turns") or 1) > 1:
        text += f"; conversations of {turns} turns"
    return f"{text}."


def _length(length: Any) -> str:
    """Describe a distribution of lengths: "128", or "lognormal (mean 300, stdev 100)"."""
    if not isinstance(length, Mapping):
        return f"{length:g}" if isinstance(length, int | float) else str(length)
    kind = str(length.get("distribution", ""))
    if kind == "fixed":
        return f"{length['mean']:g}"
    return f"{kind} ({settings_text({name: value for name, value in length.items() if name != 'distribution'})})"


def protocol_text(recorded: Mapping[str, Any]) -> str:
    """Describe the measured part of each load."""
    parts = []
    warm = [f"{recorded['warmup_s']:g} s"] if recorded.get("warmup_s") else []
    warm += [count(recorded["warmup_requests"], "request")] if recorded.get("warmup_requests") else []
    if warm:
        parts.append(f"{' and '.join(warm)} of warm-up")
    parts += _extent(recorded)
    if "window" in recorded:
        parts.append("from the first request to the last" if recorded["window"] == "whole" else "in steady state")
    if "streaming" in recorded:
        parts.append("answers streamed" if recorded["streaming"] else "answers not streamed")
    return f"Each load: {', '.join(parts)}." if parts else "not recorded"


def _extent(recorded: Mapping[str, Any]) -> list[str]:
    """Describe what ends a window: its length, a number of requests, or whichever comes first."""
    requests, seconds, most = (recorded.get(key) for key in ("num_requests", "duration_s", "most_duration_s"))
    limit = count(requests, "request") if requests else ""
    if not seconds:
        return [f"{limit} measured"] if limit else []
    if limit:
        parts = [f"{limit} measured, or as many as finish in {most or seconds:g} s"]
    elif most:
        enough = count(recorded["enough_requests"], "request")
        each = f"{recorded['enough_per_user']} of each user"
        parts = [f"{seconds:g} to {most:g} s measured, until {enough} and {each} have finished"]
    else:
        parts = [f"{seconds:g} s measured"]
    least = min(recorded.get("min_requests") or 0, requests or sys.maxsize)
    return [*parts, f"at least {count(least, 'request')}"] if least else parts


def slo_text(slo: Slo) -> str:
    """Describe the limits with their preset's name."""
    return f"{slo.name} ({slo.text})" if slo.name not in ("none", "given") else slo.text


def _settings(result: BenchmarkResult) -> list[Block]:
    """Return every recorded setting, folded; the conventions have a section of their own."""
    recorded = {name: value for name, value in result.protocol.items() if name != "conventions"}
    groups = (("workload", result.workload), ("protocol", recorded), ("server", result.server))
    rows = tuple((group, name, value) for group, values in groups for name, value in flat(values))
    if not rows:
        return []
    columns = left("group", "setting", "value")
    table = Table("As recorded with the result", "recorded", columns, rows)
    return [Fold("All settings of workload, protocol and server", (table,))]
