"""The result of a benchmark, as it is stored and as the report reads it. Units: seconds, tokens; ms only in names."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from pipelines.domain.errors import UserError, read_record

SCHEMA = 1
RESULT = "benchmark.json"


@dataclass(frozen=True, slots=True)
class Distribution:
    """One metric over the requests of a window. Percentiles interpolate linearly between neighbours (numpy's default).

    All values are None when `count` is 0.
    """

    count: int
    mean: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


PERCENTILES = tuple(item.name for item in fields(Distribution) if item.name.startswith("p"))
"""The percentiles kept by a distribution: "p50", "p90", ...; "p999" would be the 99.9th."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits a request must meet to count for goodput; None is no limit. Milliseconds.

    Attributes:
        name: of their source, e.g. "mlperf_llama2_70b", or "given".
    """

    name: str = "none"
    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that there are, ms, by metric: "ttft", "itl", "e2e"."""
        limits = {"ttft": self.ttft_ms, "itl": self.itl_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def text(self) -> str:
        """The limits as text: "TTFT 500 ms, ITL 50 ms"."""
        return ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in self.limits.items())

    @property
    def limits_s(self) -> dict[str, float]:
        """The same in seconds, as the edges of buckets in Prometheus have them."""
        return {name: round(limit / 1000, 9) for name, limit in self.limits.items()}


NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a window of requests; their definitions: `pipelines.domain.summary`.

    A new field needs a default, so that older results still load.

    Attributes:
        requests: finished without error inside the window; the rates count these.
        errors: failed, by kind, of the requests that were due inside the window.
        requests_per_s: finished requests / window.
        output_tokens_per_s: output tokens / window; "system" throughput.
        total_tokens_per_s: input and output tokens / window.
        goodput_per_s: requests per second that met every limit; None when no limit was given.
        isl: input tokens per request; this and all distributions below cover the requests that were due inside the
            window, each followed to its end.
        osl: output tokens per request.
        itl_s: per-request mean inter-token latency, the first token excluded (= TPOT of NIM, genai-perf, MLPerf).
        token_gap_s: gaps between neighbouring responses, pooled over all requests (vLLM's "ITL").
        e2e_s: time to the last token.
    """

    window_s: float
    requests: int
    errors: Mapping[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    isl: Distribution
    osl: Distribution
    ttft_s: Distribution
    itl_s: Distribution
    token_gap_s: Distribution = Distribution(0)
    e2e_s: Distribution


DISTRIBUTIONS = tuple(item.name for item in fields(Summary) if item.type is Distribution)
"""The fields of a summary that are distributions."""


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the load generator itself was the limit.

    Attributes:
        bottleneck: whether the numbers of this level say more about the client than about the server.
        facts: evidence, e.g. {"send_lag_p99_ms": 0.3, "loop_lag_p99_ms": 0.2, "cpu_share": 0.4}.
    """

    bottleneck: bool
    reason: str
    facts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load applied to the server.

    Attributes:
        arrival: "closed", "constant", "poisson", "gamma", "burst" or "trace".
        concurrency: requests kept in flight (closed loop), else None.
        request_rate: intended requests per second (open loop), else None.
        client: whether the client was the limit.
        server: counters of the same window from the server: queue and compute seconds, KV blocks, versions.
        requests_file: name of the file with one record per request, beside the result.
        notes: for the reader, e.g. that the queue kept growing.
        intervals: 95 % confidence intervals over several runs of this load, by figure, as `pipelines.domain.metrics`
            names it, e.g. {"output_tokens_per_s": (990.0, 1030.0)}; empty for a single run.
        runs: how often it was measured; the other figures are of the run with the median output tokens/s.
    """

    arrival: str
    concurrency: int | None
    request_rate: float | None
    summary: Summary
    client: ClientHealth
    server: Mapping[str, Any]
    requests_file: str
    complete: bool = True
    reason: str = ""
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    runs: int = 1

    @property
    def counts(self) -> bool:
        """Whether the figures describe the server: requests finished, not cut short, not limited by the client."""
        return self.complete and self.summary.requests > 0 and not self.client.bottleneck

    @property
    def height(self) -> float:
        """Requests in flight or requests per second, by which loads are ordered; 0 for a burst or a trace."""
        return self.concurrency or self.request_rate or 0.0

    @property
    def load(self) -> str:
        """See `load_text`."""
        return load_text(self.arrival, self.concurrency, self.request_rate)

    @property
    def label(self) -> str:
        """The shortest name of the load: "16", "4/s", "burst"."""
        if self.concurrency is not None:
            return str(self.concurrency)
        return f"{self.request_rate:g}/s" if self.request_rate is not None else self.arrival


def load_text(arrival: str, concurrency: int | None, request_rate: float | None) -> str:
    """Return a load as text: "concurrency 16", "4 requests/s (poisson)"."""
    if concurrency is not None:
        return f"concurrency {concurrency}"
    if request_rate is not None:
        return f"{request_rate:g} requests/s ({arrival})"
    return "all at once" if arrival == "burst" else "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestLoad:
    """The largest load of which enough requests meet every limit, as a search found it.

    Attributes:
        kind: "concurrency", or "request_rate" in requests per second.
        attainment: share of requests that must meet every limit.
        confidence: of the interval, e.g. 0.95; None without one.
        load: best estimate; None if no load was found, or none that is too large.
        low: lower end of the interval, which is within the limits; without an interval the largest load that passed;
            None if there is none.
        high: upper end of the interval; None if there is none.
        binding: the limit that most requests near that load miss: "ttft", "itl", "e2e" or "errors"; None if none did.
        missed: share of the requests near that load that missed each limit.
        reason: what limits the answer; empty if it is as good as was asked for.
    """

    kind: Literal["concurrency", "request_rate"]
    attainment: float
    confidence: float | None
    load: float | None
    low: float | None
    high: float | None
    binding: str | None
    missed: Mapping[str, float]
    probes: int
    requests: int
    seconds: float
    reason: str = ""

    @property
    def text(self) -> str:
        """The load and its interval: "concurrency 23 (95% interval 21 to 25)"; "unknown" if none was found."""
        load, low, high = (None if end is None else f"{end:.3g}" for end in (self.load, self.low, self.high))
        unit = "concurrency {}" if self.kind == "concurrency" else "{} requests/s"
        if load is None:
            return "unknown" if low is None else f"at least {unit.format(low)}"
        return f"{unit.format(load)} ({self.confidence:.0%} interval {low or 'unknown'} to {high or 'unknown'})"


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """All levels of one benchmark of one server.

    Attributes:
        precision: compression as one word, e.g. "int4_awq", "fp8-kv_fp8".
        engine: that executes it, e.g. "openvino"; "unknown" for a server elsewhere.
        world_size: tp x pp, the GPUs of one instance.
        workload: name and the settings of the lengths, prompts and arrival.
        protocol: warm-up, window, counts, and whether the window includes the initial burst.
        server: url, model name, server version and model versions.
        machine: where the client ran (and the server, on loopback).
        versions: of the libraries behind the numbers.
        measured_at: ISO time, UTC.
        levels: in the order measured.
        complete: False if it was interrupted or the server died.
        gpu_count: GPUs of all instances, and of a draft model that has its own; None in older results, and then
            `world_size` counts.
        search: the largest load within the limits, if it was searched; its probes are the levels.
    """

    model: str
    precision: str
    engine: str
    tp_size: int
    world_size: int
    workload: Mapping[str, Any]
    protocol: Mapping[str, Any]
    server: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    measured_at: str
    slo: Slo
    levels: tuple[LoadPoint, ...]
    complete: bool = True
    reason: str = ""
    gpu_count: int | None = None
    search: LargestLoad | None = None
    schema: int = field(default=SCHEMA)

    @property
    def gpus(self) -> int:
        """GPUs that served, all together; throughput per GPU divides by it."""
        return self.gpu_count or self.world_size

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values, without `search` and intervals if there were none."""
        values = {name: value for name, value in asdict(self).items() if name != "search" or value is not None}
        for level in values["levels"]:
            if level["runs"] == 1:
                del level["runs"], level["intervals"]
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = RESULT) -> Self:
        """Invert `to_json`.

        Raises:
            UserError: it has another schema, a field other than a metric is missing or unknown, or a value is of the
                wrong type or negative.
        """
        if not isinstance(data, Mapping):
            raise UserError(f"{source} is not a benchmark result: it is not a JSON object.", todo="Measure again.")
        if data.get("schema") != SCHEMA:
            raise UserError(
                f"{source} has schema {data.get('schema')!r}; this version reads {SCHEMA}.", todo="Measure again."
            )
        if isinstance(data.get("levels"), list):
            data = {**data, "levels": [_known_metrics(level) for level in data["levels"]]}
        result = read_record(cls, data, source, what="a benchmark result", todo="Measure again.")
        if negative := next(_negative(result), None):
            raise UserError(f"{source} is not a benchmark result: {negative} is negative.", todo="Measure again.")
        return result


def _negative(result: BenchmarkResult) -> Iterator[str]:
    """Return the rates, counts and times below 0, which only a file altered by hand can have."""
    for number, level in enumerate(result.levels):
        for item in fields(Summary):
            value = getattr(level.summary, item.name)
            figures = asdict(value) if isinstance(value, Distribution) else {"": value}
            for name, each in figures.items():
                if isinstance(each, int | float) and each < 0:
                    yield f"levels[{number}].summary.{item.name}{name and '.'}{name}={each}"


def _known_metrics(level: Any) -> Any:
    """Return a level without the metrics that this version does not know."""
    if not isinstance(level, Mapping) or not isinstance(level.get("summary"), Mapping):
        return level
    summary = _known(Summary, level["summary"])
    inner = {name: _known(Distribution, summary[name]) for name in DISTRIBUTIONS if name in summary}
    return {**level, "summary": {**summary, **inner}}


def _known(record: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    names = {item.name for item in fields(record)}
    return {name: value for name, value in data.items() if name in names}
