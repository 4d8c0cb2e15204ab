"""Format the values of metrics for display."""

from __future__ import annotations

from pipelines.document.show import NONE, number, percent
from pipelines.domain.metrics import FIGURES, REQUEST_RATE, SHARE, SIZE, TOKEN_RATE
from pipelines.domain.units import show_bytes, show_seconds
from pipelines.nightly.record import base_name


def shown(metric: str, value: float | None) -> str:
    """Format a value with its unit."""
    base = base_name(metric)
    if value is None:
        return NONE
    if base.endswith("_bytes"):
        return show_bytes(int(value))
    figure = FIGURES.get(base)
    if figure is None:
        return show_seconds(value)  # seconds of a stage
    if figure.metric.unit is SHARE:
        return f"{percent(value)} %"
    if figure.metric.unit in (TOKEN_RATE, REQUEST_RATE):
        return f"{number(value)}/s"
    return f"{number(figure.shown(value))} {figure.metric.unit.shown}"


def named(metric: str) -> str:
    """Return a metric's name in words, without a unit: "TTFT p50 at concurrency 8", "build peak memory"."""
    base, _, load = metric.partition(" at ")
    figure = FIGURES.get(base)
    if figure is not None:
        name = figure.metric.title.partition(",")[0] + (" size" if figure.metric.unit is SIZE else "")
        name += f" {figure.statistic}" if figure.statistic else ""
    elif base.endswith("_peak_bytes"):
        name = f"{base.removesuffix('_peak_bytes')} peak memory"
    else:
        name = f"{base.removesuffix('_s')} time"
    return f"{name}{f' at {load}' if load else ''}"


def title(metric: str) -> str:
    """Return a metric's name with the unit of a plot: "TTFT p50, ms at concurrency 8", "build peak memory, MiB"."""
    base, _, load = metric.partition(" at ")
    figure = FIGURES.get(base)
    if figure is not None:
        name = figure.title
    elif base.endswith("_bytes"):
        name = f"{named(base)}, {SIZE.shown}"
    else:
        name = f"{base.removesuffix('_s')}, s"
    return f"{name}{f' at {load}' if load else ''}"


def scale(metric: str) -> float:
    """Return the factor from the stored value to the unit in `title`."""
    base = base_name(metric)
    if base.endswith("_bytes"):
        return SIZE.scale
    figure = FIGURES.get(base)
    return figure.metric.unit.scale if figure else 1.0
