"""Format the comparison of formats for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from eval.fidelity.table import WITHIN
from pipelines.document.show import NONE, number, percent
from pipelines.domain.metrics import COMPARED
from pipelines.host.text import table, wrapped
from pipelines.report.compare import AT_LEAST, Comparison, FormatRow
from pipelines.report.six import load_label, six

_RATE, *_TIMES = COMPARED
_TITLES = (
    "format", "acc. %", "loss %", "KL", "MiB", _RATE.narrow, "load",
    *(f"{figure.metric.title} {figure.metric.unit.shown}" for figure in _TIMES), f"SLO {_RATE.narrow}",
)  # fmt: skip
_LEAST = (11, 6, 6, 7, 6, 7, 5, *(max(len(title), 6) for title in _TITLES[7:]))


def comparison_text(compared: Sequence[Comparison]) -> str:
    """Return a table per workload with the choice, its reasons and limitations, in lines of at most 79 characters.

    A format whose name is longer than its column gets a separate line.
    """
    return "\n\n".join(_text(item) for item in compared)


def _text(item: Comparison) -> str:
    runs = [row.run for row in item.rows if row.run]
    rows = [_cells(row) for row in item.rows]
    lines = _table(rows)
    lines += ["", *_wrap(item.reason)]
    lines += [line for rejection in item.rejected for line in _wrap(f"- {rejection.variant}: {rejection.reason}")]
    lines += [line for note in item.notes for line in _wrap(f"Note: {note}")]
    lines += _wrap(item.tuning) if item.tuning else []
    lines += _wrap(f"Measured: {six(runs)}; engine {runs[0].result.engine}." if runs else f"Model {item.model}.")
    if runs:
        lines += _wrap("tok/s: output tokens/s at the peak, TTFT and ITL: medians there; SLO: best load within limits.")
    if any(row.fidelity for row in item.rows):
        lines += _wrap(
            "KL: mean divergence of the next token's probabilities from the 16-bit model's, nats; "
            f"{WITHIN}: within noise."
        )
    if any(AT_LEAST in cell for cells in rows for cell in cells):
        lines += _wrap(f"{AT_LEAST}: higher loads do not count, because the load generator was the bottleneck.")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the table; names that are longer than their column get separate lines."""
    lines: list[Sequence[str] | str] = [_TITLES]
    for name, *cells in rows:
        lines += [name, ("", *cells)] if len(name) > _LEAST[0] else [(name, *cells)]
    return table(lines, least=_LEAST, gap=1)


def _cells(row: FormatRow) -> tuple[str, ...]:
    size = NONE if row.engine_bytes is None else number(row.engine_bytes / 2**20)
    loss = NONE if row.loss_percent is None else f"{row.loss_percent:.2f}"
    start = (row.variant, percent(row.accuracy), loss, _divergence(row), size)
    if row.peak is None:
        return (*start, *[NONE] * (len(_TITLES) - len(start)))
    rate, *times = (number(figure.shown(figure.of(row.peak.summary))) for figure in COMPARED)
    slo = row.slo_mark + number(_RATE.of(row.at_slo.summary)) if row.at_slo else NONE
    return (*start, row.peak_mark + rate, load_label(row.peak), *times, slo)


def _divergence(row: FormatRow) -> str:
    """Return the mean KL divergence in at most six characters, marked if it is within the noise."""
    if row.fidelity is None:
        return NONE
    value, mark = row.fidelity.overall.kl_mean, WITHIN if "kl_mean" in row.fidelity.within_noise else ""
    shown = f"{value:.2g}" if value >= 0.001 or value == 0 else f"{value:.1e}".replace("e-0", "e-")
    return shown + mark


def _wrap(text: str) -> list[str]:
    return wrapped(text).splitlines()
