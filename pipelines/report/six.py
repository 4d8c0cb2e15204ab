"""Text of the six facts that qualify every number of a report: model, precision, ISL, OSL, load and TP."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.document.show import NONE
from pipelines.domain.benchmark import Distribution, Level
from pipelines.report.data import BenchmarkRun


def load_label(level: Level) -> str:
    """Return the shortest name of the load: "16", "4/s", "burst"."""
    if level.concurrency is not None:
        return str(level.concurrency)
    return f"{level.request_rate:g}/s" if level.request_rate is not None else level.arrival


def lengths(distributions: Sequence[Distribution]) -> str:
    """Return token counts over several levels: "128" if all are equal, else "119 (52..200)" as mean (min..max)."""
    known = [item for item in distributions if item.count and item.mean is not None]
    if not known:
        return NONE
    low = min(item.min for item in known if item.min is not None)
    high = max(item.max for item in known if item.max is not None)
    if low == high:
        return f"{low:g}"
    mean = sum(float(item.mean or 0) * item.count for item in known) / sum(item.count for item in known)
    return f"{mean:.0f} ({low:g}..{high:g})"


def loads(levels: Sequence[Level]) -> str:
    """Return all loads as text: "concurrency 1, 4, 16" or "2, 4 requests/s (poisson)"."""
    closed = [str(level.concurrency) for level in levels if level.concurrency is not None]
    parts = [f"concurrency {', '.join(closed)}"] if closed else []
    rates: dict[str, list[str]] = {}
    for level in levels:
        if level.concurrency is None and level.request_rate is not None:
            rates.setdefault(level.arrival, []).append(f"{level.request_rate:g}")
    parts += [f"{', '.join(given)} requests/s ({arrival})" for arrival, given in rates.items()]
    others = [level.load for level in levels if level.concurrency is None and level.request_rate is None]
    return "; ".join([*parts, *dict.fromkeys(others)]) or NONE


def six(runs: Sequence[BenchmarkRun], levels: Sequence[Level] | None = None) -> str:
    """Return the six facts of a number as text: model, precision, ISL, OSL, concurrency or rate, TP.

    Args:
        runs: at least one run; all of the same model and TP.
        levels: the levels to describe; None is every level of the runs.
    """
    shown = [level for run in runs for level in run.result.levels] if levels is None else list(levels)
    first = runs[0].result
    precisions = ", ".join(dict.fromkeys(run.result.precision for run in runs))
    unique = list({level.load: level for level in shown}.values())
    return (
        f"model {first.model}; precision {precisions}; ISL {lengths([level.summary.isl for level in shown])}; "
        f"OSL {lengths([level.summary.osl for level in shown])}; {loads(unique)}; TP {first.tp_size}"
    )
