"""The metrics of a benchmark: definition, unit, better direction, and the tables that show each.

The tables of the load generator, the report, `make compare` and the nightly run, and docs/benchmarking.md take their
metrics from here. To add one, see docs/develop.md. How the values are computed: `pipelines.domain.summary`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.domain.benchmark import DISTRIBUTIONS, PERCENTILES, Summary

STATISTICS = ("mean", "min", *PERCENTILES, "max")
"""Statistics of a distribution, in the order of tables."""


@dataclass(frozen=True, slots=True)
class Unit:
    """How a metric is stored and shown.

    Attributes:
        stored: unit of the value, in results and in code.
        scale: from the stored value to the shown one.
    """

    stored: str
    shown: str
    scale: float = 1.0


LATENCY = Unit("s", "ms", 1000.0)
TOKENS = Unit("tokens", "tokens")
TOKEN_RATE = Unit("tokens/s", "tokens/s")
REQUEST_RATE = Unit("requests/s", "requests/s")
SHARE = Unit("share (0 to 1)", "%", 100.0)
SIZE = Unit("bytes", "MiB", 1 / 2**20)
MEASURED = "load generator and simulator"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its field in `Summary`, or in a line of the nightly history.
        definition: its formula in words.
        better: direction; None where neither is.
        source: what measures or computes it.
        column: heading of its column in a report; empty is the title.
        narrow: heading in a terminal; empty is the column's.
        optional: whether tables omit it when no load has a value, instead of showing a dash.
    """

    name: str
    title: str
    definition: str
    unit: Unit
    better: Literal["higher", "lower"] | None
    source: str = MEASURED
    column: str = ""
    narrow: str = ""
    optional: bool = False


METRICS = (
    Metric("isl", "ISL", "Input length of a request in tokens, as the engine counts them.", TOKENS, None),
    Metric("osl", "OSL", "Output length of a request in tokens, as the engine counts them.", TOKENS, None),
    Metric(
        "ttft_s", "TTFT",
        "Time to first token: from when the request was due to the first non-empty response. Queue, prefill and "
        "network are inside. In an open loop a request is due by the schedule, not when a slow client got to send it, "
        "so that waiting cannot hide (coordinated omission).",
        LATENCY, "lower",
    ),
    Metric(
        "itl_s", "ITL",
        "Inter-token latency of a request: (E2E - TTFT) / (OSL - 1), the first token excluded; the same as TPOT of "
        "NIM, AIPerf, genai-perf and MLPerf. None below two output tokens.",
        LATENCY, "lower",
    ),
    Metric(
        "token_gap_s", "token gap",
        "Time between neighbouring responses, pooled over all requests; vLLM's benchmark calls it ITL.",
        LATENCY, "lower", source="load generator",
    ),
    Metric("e2e_s", "E2E", "From when the request was due to its last token.", LATENCY, "lower"),
    Metric(
        "output_tokens_per_s", "output tokens/s",
        "Output tokens of finished requests that arrived in the window, divided by its length: the throughput of the "
        "system.",
        TOKEN_RATE, "higher", column="output tok/s", narrow="tok/s",
    ),
    Metric(
        "total_tokens_per_s", "total tokens/s", "As output tokens/s, with input tokens counted as well.",
        TOKEN_RATE, "higher", column="total tok/s",
    ),
    Metric(
        "requests_per_s", "requests/s",
        "Requests finished in the window, divided by its length; per GPU divides by all GPUs that served.",
        REQUEST_RATE, "higher", column="req/s",
    ),
    Metric(
        "goodput_per_s", "goodput, requests/s",
        "Finished requests per second that met every limit of the SLO. A load meets the SLO when its 99th percentiles "
        "do, as MLPerf counts, and at most 1 % of its requests failed.",
        REQUEST_RATE, "higher", column="goodput/s", narrow="good/s", optional=True,
    ),
    Metric(
        "error_share", "failed requests, %",
        "Requests that failed, were rejected or cancelled / these and the finished ones, in the window.",
        SHARE, "lower", source="load generator",
    ),
    Metric(
        "accuracy", "accuracy, %", "Share of questions answered correctly.", SHARE, "higher", source="evaluation"
    ),
    Metric("engine_bytes", "engine, MiB", "Size of the engine's files.", SIZE, "lower", source="build"),
)  # fmt: skip
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class MetricStatistic:
    """A metric and, for a distribution, one of its statistics."""

    metric: Metric
    statistic: str = ""

    @property
    def key(self) -> str:
        """Name in machine-readable tables and in the history: "ttft_p50_s", "requests_per_s"."""
        name = self.metric.name
        if not self.statistic:
            return name
        return f"{name.removesuffix('_s')}_{self.statistic}" + ("_s" if name.endswith("_s") else "")

    @property
    def title(self) -> str:
        """Title for display: "TTFT p50, ms"."""
        title = self.metric.title
        return f"{title} {self.statistic}, {self.metric.unit.shown}" if self.statistic else title

    @property
    def column(self) -> str:
        """Heading in a report: "req/s", and "p50" below a heading that names the metric."""
        return self.statistic or self.metric.column or self.metric.title

    @property
    def narrow(self) -> str:
        """Heading in a terminal: "tok/s", "TTFT p50"."""
        name = self.metric.narrow or self.metric.column or self.metric.title
        return f"{name} {self.statistic}" if self.statistic else name

    def of(self, summary: Summary) -> float | None:
        """Return the value in the stored unit, or None if there is none."""
        metric = getattr(summary, self.metric.name)
        value: float | None = getattr(metric, self.statistic) if self.statistic else metric
        return value

    def of_line(self, load: Mapping[str, Any]) -> float | None:
        """Return the value in one load of the nightly history; None in lines older than the metric."""
        figure = load.get(self.metric.name)
        return figure.get(self.statistic) if self.statistic and figure is not None else figure

    def shown(self, value: float | None) -> float | None:
        """Format a value in the unit of tables."""
        return None if value is None else self.metric.unit.scale * value


def _figures() -> Iterator[MetricStatistic]:
    for metric in METRICS:
        statistics = STATISTICS if metric.name in DISTRIBUTIONS else ("",)
        yield from (MetricStatistic(metric, statistic) for statistic in statistics)


FIGURES: Mapping[str, MetricStatistic] = {figure.key: figure for figure in _figures()}


def figures(*keys: str) -> tuple[MetricStatistic, ...]:
    """Look up the figures of a table by their keys."""
    return tuple(FIGURES[key] for key in keys)


TERMINAL = figures(
    "requests_per_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p50_s",
    "goodput_per_s",
)  # fmt: skip
"""The load generator's table, one row per load, in 80 columns."""
PROGRESS = figures("requests_per_s", "output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
"""The load generator's line when a load has just finished."""
RATES = figures("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_per_s")
RATES_PER_GPU = figures("output_tokens_per_s", "requests_per_s")
LATENCIES = figures(
    "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "itl_p50_s", "itl_p95_s", "itl_p99_s", "token_gap_p50_s",
    "token_gap_p99_s", "e2e_p50_s", "e2e_p95_s", "e2e_p99_s",
)  # fmt: skip
"""The report's table of loads: rates, the same per GPU where there are several, latencies."""
MODELLED = figures("requests_per_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_s")
"""The columns beside them when there is a model of the deployment."""
RANKED = figures("output_tokens_per_s", "ttft_p99_s", "itl_p99_s")
"""Formats side by side in a report: at the load that ranks them."""
AT_POINT = figures("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "e2e_p95_s")
"""A load's marker in a plot, at the pointer."""
COMPARED = figures("output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
"""Formats side by side in a terminal."""
NIGHTLY_RATES = figures("output_tokens_per_s", "requests_per_s", "goodput_per_s")
NIGHTLY_LATENCIES = tuple(
    FIGURES[f"{name}_{statistic}_s"] for name in ("ttft", "itl", "e2e") for statistic in PERCENTILES
)
"""The figures that a line of the nightly history keeps per load, and that can be judged."""
NIGHTLY_TABLE = figures("output_tokens_per_s", "ttft_p50_s", "itl_p50_s")
TRENDS = (*NIGHTLY_TABLE, FIGURES["accuracy"])
"""The nightly report: the columns of its table of cells, and the panels of a cell's picture."""
