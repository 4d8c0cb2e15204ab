"""Definitions of the report's terms, in one place so that Markdown, HTML and the terminal agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.document.show import span
from pipelines.domain.metrics import LATENCY, METRICS, REQUEST_RATE, TOKEN_RATE

_SHOWN = tuple(metric for metric in METRICS if metric.unit in (LATENCY, TOKEN_RATE, REQUEST_RATE))

CONVENTIONS: tuple[tuple[str, str], ...] = (
    ("measured", "Taken from a run on the machine given with it. Nothing in this report is estimated unless it is "
     "marked as modelled; what was not measured is listed as missing."),
    ("ISL, OSL", "Input and output length of a request in tokens, as the engine counts them: mean (min..max)."),
    *((metric.title, metric.definition) for metric in _SHOWN),
    ("tokens/s per user", "1 / ITL: how fast one answer streams."),
    ("p50, p90, p95, p99", "Percentiles over requests, linear between neighbours (numpy's default; trtllm-bench takes "
     "the nearest lower value)."),
    ("closed loop, open loop", "Concurrency keeps a fixed number of requests in flight; a request rate sends on "
     "schedule regardless of the server."),
    ("client-limited", "The load generator itself was the bottleneck. The throughput is a lower bound; latencies "
     "include waiting in the load generator. Such a load, or one that was cut short, is shown but never chosen."),
    ("loss, verdict", "Loss is in percent of the 16-bit baseline's accuracy, or in points of all questions, over the "
     "same questions. GO: it is proven to be below the margin; NO-GO: above; UNDECIDED: neither. "
     "NOT MEASURED: the baseline does not beat guessing by more than the margin, so no loss could show."),
)  # fmt: skip


def what_was_asked(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tasks of comparisons with their worked examples and numbers of questions."""
    tasks: dict[str, list[int]] = {}
    for row in rows:
        tasks.setdefault(f"{row['task']}, {row['shots']}", []).append(row["questions"])
    return "; ".join(f"{task}, {span(asked)} questions" for task, asked in tasks.items())
