"""A benchmark as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipelines.document.show import count
from pipelines.domain.benchmark import BenchmarkResult, Level
from pipelines.domain.metrics import PROGRESS, TERMINAL, MetricStatistic
from pipelines.host.text import table, width, wrapped


def benchmark_table(result: BenchmarkResult) -> str:
    """Render one row per level, times in ms, and below it notes that qualify the numbers."""
    summaries = [level.summary for level in result.levels]
    columns = [each for each in TERMINAL if not each.metric.optional or any(each.of(s) is not None for s in summaries)]
    marks: dict[str, str] = {}
    head = (_load_name(result), *_headings(columns), "err", "")
    rows = [head, *(_row(level, columns, marks) for level in result.levels)]
    lines = [_heading(result), *table(rows, left=0)]
    lines += [wrapped(f"{mark} {text}") for text, mark in marks.items()]
    if result.slo.name != "none":
        lines.append(wrapped(f"good/s: requests per second within {_limits(result)}."))
    if not result.complete:
        lines.append(wrapped(f"Incomplete: {result.reason}."))
    return "\n".join(lines)


def level_line(level: Level) -> str:
    """Render one level on one line, for when it has just finished."""
    parts = [f"{level.load}:"]
    for figure in PROGRESS:
        value, metric = figure.shown(figure.of(level.summary)), figure.metric
        if value is not None:
            latency = f"{metric.title} {_number(value)} {metric.unit.shown}"
            parts.append(latency if figure.statistic else f"{value:.4g} {figure.narrow}")
    if errors := sum(level.summary.errors.values()):
        parts.append(count(errors, "error"))
    return ("  ".join(parts))[: width() - 2]


def _heading(result: BenchmarkResult) -> str:
    sizes = f"TP {result.tp_size}" + (f" of {result.gpus} GPUs" if result.gpus != result.tp_size else "")
    work = result.workload
    lengths = f"ISL {_length(work.get('isl'))}, OSL {_length(work.get('osl'))}"
    return wrapped(f"{result.model} {result.precision}, {result.engine}, {sizes}, {lengths}; times in ms")


def _load_name(result: BenchmarkResult) -> str:
    """Return the heading of the first column."""
    arrival = str(result.workload.get("arrival"))
    return {"closed": "concurrency", "burst": "load", "trace": "load"}.get(arrival, arrival)


def _load(level: Level) -> str:
    """Return the load as one word: `16`, `4/s`, `burst`."""
    if level.concurrency is not None:
        return str(level.concurrency)
    return level.arrival if level.request_rate is None else f"{level.request_rate:g}/s"


def _headings(columns: Sequence[MetricStatistic]) -> Iterable[str]:
    """Render the headings; a metric is named once if several of its statistics follow each other."""
    for before, figure in zip((None, *columns), columns, strict=False):
        yield figure.statistic if before is not None and before.metric is figure.metric else figure.narrow


def _row(level: Level, columns: Sequence[MetricStatistic], marks: dict[str, str]) -> tuple[str, ...]:
    texts = list(level.notes)
    if level.client.bottleneck:
        texts.append(f"The client was the limit: {level.client.reason}.")
    if not level.complete:
        texts.append(f"Cut short: {level.reason}.")
    signs = "".join(_mark(text, marks) for text in texts)
    values = [figure.shown(figure.of(level.summary)) for figure in columns]
    cells = ("-" if value is None else _number(value) for value in values)
    return (_load(level), *cells, str(sum(level.summary.errors.values())), signs)


def _mark(text: str, marks: dict[str, str]) -> str:
    """Return the footnote letter of a text; the same text always has the same letter."""
    return marks.setdefault(text, chr(ord("a") + len(marks) % 26))


def _limits(result: BenchmarkResult) -> str:
    slo = result.slo
    pairs = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in pairs if limit is not None)
    return limits if slo.name == "given" else f"{limits} ({slo.name})"


def _length(length: object) -> str:
    """Describe a distribution briefly: "128", "lognormal 48+-24", "uniform 32-224"."""
    if not isinstance(length, dict):
        return str(length)
    kind = str(length.get("distribution"))
    if kind == "fixed":
        return f"{length['mean']:g}"
    if kind == "uniform":
        return f"uniform {length['min']}-{length['max']}"
    return kind if length.get("mean") is None else f"{kind} {length['mean']:g}+-{length['stdev']:g}"


def _number(value: float) -> str:
    """Format with three significant digits, without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
