"""The comparison of formats for a terminal and as rows for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.document.show import NONE, number, percent
from pipelines.domain.benchmark import Level
from pipelines.domain.metrics import COMPARED, FOR_PROGRAMS
from pipelines.host.screen import table, wrapped
from pipelines.report.compare import Comparison, FormatRow
from pipelines.report.six import load_label, six

_RATE, *_TIMES = COMPARED
_TITLES = (
    "format", "acc. %", "loss %", "MiB", _RATE.narrow, "load",
    *(f"{figure.metric.title} {figure.metric.unit.shown}" for figure in _TIMES), f"SLO {_RATE.narrow}",
)  # fmt: skip
_LEAST = (12, 6, 6, 6, 7, 5, *(max(len(title), 6) for title in _TITLES[6:]))


def comparison_rows(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One row per format and workload; plain JSON values, None where something was not measured."""
    return [_row(item, row) for item in compared for row in item.rows]


def _row(item: Comparison, row: FormatRow) -> dict[str, Any]:
    reasons = {rejection.variant: rejection.reason for rejection in item.rejected}
    return {
        "model": row.model,
        "precision": row.variant,
        "workload": item.workload.title if item.workload else None,
        "engine": row.run.result.engine if row.run else None,
        "tp_size": row.run.result.tp_size if row.run else None,
        "accuracy": row.accuracy,
        "loss_percent": row.loss_percent,
        "loss_interval_percent": list(row.interval_percent) if row.interval_percent else None,
        "verdict": row.verdict,
        "engine_bytes": row.engine_bytes,
        "peak": _level(row.peak),
        "at_slo": _level(row.at_slo),
        "chosen": row.variant == item.chosen,
        "why_not": reasons.get(row.variant),
        "max_accuracy_loss_percent": item.max_loss_percent,
        "measured": True,
    }


def _level(level: Level | None) -> dict[str, Any] | None:
    if level is None:
        return None
    summary = level.summary
    return {
        "concurrency": level.concurrency,
        "request_rate": level.request_rate,
        "arrival": level.arrival,
        "isl": summary.isl.mean,
        "osl": summary.osl.mean,
        **{figure.key: figure.of(summary) for figure in FOR_PROGRAMS},
        "client_limited": level.client.bottleneck,
        "complete": level.complete,
    }


def comparison_text(compared: Sequence[Comparison]) -> str:
    """A table per workload with the choice, its reasons and what weakens it; lines of at most 79 characters.

    A format whose name is longer than its column stands in a line of its own.
    """
    return "\n\n".join(_text(item) for item in compared)


def _text(item: Comparison) -> str:
    runs = [row.run for row in item.rows if row.run]
    lines = _table([_cells(row) for row in item.rows])
    lines += ["", *_wrap(item.reason)]
    lines += [line for rejection in item.rejected for line in _wrap(f"- {rejection.variant}: {rejection.reason}")]
    lines += [line for note in item.notes for line in _wrap(f"Note: {note}")]
    if any(row.peak and _marked(row.peak) for row in item.rows):
        lines += _wrap("* client-limited or cut short: a lower bound.")
    lines += _wrap(f"Measured: {six(runs)}; engine {runs[0].result.engine}." if runs else f"Model {item.model}.")
    if runs:
        lines += _wrap("tok/s: output tokens/s at the peak, TTFT and ITL: medians there; SLO: best load within limits.")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names that are longer than their column stand in lines of their own."""
    names = ["", *(cells[0] if len(cells[0]) > _LEAST[0] else "" for cells in rows)]
    short = [("" if name else cells[0], *cells[1:]) for name, cells in zip(names[1:], rows, strict=True)]
    lines, at = [], 0
    for line in table([_TITLES, *short], least=_LEAST, gap=1):
        at = at if line else 0
        lines += [names[at], line] if line and names[at] else [line]
        at = (at + 1) % len(names) if line else 0
    return lines


def _cells(row: FormatRow) -> tuple[str, ...]:
    size = NONE if row.engine_bytes is None else number(row.engine_bytes / 2**20)
    loss = NONE if row.loss_percent is None else f"{row.loss_percent:.2f}"
    start = (row.variant, percent(row.accuracy), loss, size)
    if row.peak is None:
        return (*start, *[NONE] * (len(_TITLES) - len(start)))
    rate, *times = (number(figure.shown(figure.of(row.peak.summary))) for figure in COMPARED)
    slo = number(_RATE.of(row.at_slo.summary)) if row.at_slo else NONE
    return (*start, rate + ("*" if _marked(row.peak) else ""), load_label(row.peak), *times, slo)


def _marked(level: Level) -> bool:
    return level.client.bottleneck or not level.complete


def _wrap(text: str) -> list[str]:
    return wrapped(text).splitlines()
