"""Values of metrics as people read them."""

from __future__ import annotations

from pipelines.document.show import NONE, ms, number, percent
from pipelines.domain.units import show_bytes, show_seconds
from pipelines.nightly.record import base_name

TITLES = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput, requests/s",
    "accuracy": "accuracy, %",
    "error_share": "failed requests, %",
    "engine_bytes": "engine, MiB",
}


def shown(metric: str, value: float | None) -> str:
    """A value with its unit."""
    base = base_name(metric)
    if value is None:
        return NONE
    if base.endswith("_bytes"):
        return show_bytes(int(value))
    if base in ("accuracy", "error_share"):
        return f"{percent(value)} %"
    if base.endswith("_per_s"):
        return f"{number(value)}/s"
    return f"{ms(value)} ms" if base.split("_")[0] in ("ttft", "itl", "e2e") else show_seconds(value)


def title(metric: str) -> str:
    """A metric's name for a plot: "TTFT p50, ms at concurrency 8"."""
    base, _, load = metric.partition(" at ")
    name = TITLES.get(base)
    if name is None and base.split("_")[0] in ("ttft", "itl", "e2e"):
        latency, percentile, _ = base.split("_")
        name = f"{latency.upper()} {percentile}, ms"
    return f"{name or base.removesuffix('_s') + ', s'}{f' at {load}' if load else ''}"


def scale(metric: str) -> float:
    """Factor from the stored value to the one that `title` names."""
    base = base_name(metric)
    if base.endswith("_bytes"):
        return 1 / 2**20
    if base in ("accuracy", "error_share"):
        return 100.0
    return 1000.0 if base.split("_")[0] in ("ttft", "itl", "e2e") else 1.0
