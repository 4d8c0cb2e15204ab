"""Benchmark results of any tool in one form, as input for fits and sizing.

Their metrics agree (TTFT to the first non-empty response, ITL = (E2E - TTFT) / (OSL - 1) per request); differences
(percentiles, start of requests, contents of the window) are kept beside the numbers, so that a model can be compared
with them under the same protocol.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.domain.summary import Percentiles

# JSON of a benchmark tool, read key by key; a missing key is named, and distributions come in seconds.

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SECONDS |= {"s/token": 1.0, "ms/token": 1e-3}
KEPT_UP = 0.95
"""Share of the requested rate from which on a load generator kept up with it."""
Names = Mapping[str, Sequence[str]]
"""Field of `Distribution` -> path of keys to its value."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """JSON of a tool. `source` is the file, `tool` its name for messages.

    A value that is missing, not a number or in an unknown unit raises a `UserError` that names the key.
    """

    data: Any
    source: str
    tool: str

    def get(self, *keys: str | int) -> Any:
        """Return the value at a path of keys, or None."""
        value = self.data
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def need(self, *keys: str | int) -> Any:
        """Return the value at a path of keys."""
        if (value := self.get(*keys)) is None:
            raise self.fault(".".join(map(str, keys)))
        return value

    def number(self, *keys: str | int) -> float:
        """Return a number (some versions write numbers as text)."""
        value = self.need(*keys)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(f"{self.source}: {'.'.join(map(str, keys))}={value!r} is not a number.") from None

    def whole(self, *keys: str) -> int | None:
        """Return a whole number, or None if it is missing or 0."""
        return int(self.number(*keys)) or None if self.get(*keys) is not None else None

    def fault(self, key: str, todo: str = "") -> UserError:
        """Build the error for a missing key."""
        return UserError(
            f"{self.source} ({self.tool}) lacks '{key}'.", todo=todo or "Give the file as the tool wrote it."
        )

    def unsupported(self, load: str, supported: str) -> UserError:
        """Build the error for a kind of load that cannot be compared."""
        return UserError(f"{self.source} ({self.tool}) was measured with '{load}'.", allowed=f"Supported: {supported}.")

    def seconds(self, *keys: str) -> float:
        """Return the seconds of the time unit at a path of keys."""
        unit = str(self.need(*keys))
        if unit not in SECONDS:
            raise UserError(
                f"{self.source}: {'.'.join(keys)}='{unit}' is not known.", allowed=f"Supported: {', '.join(SECONDS)}."
            )
        return SECONDS[unit]

    def distribution(
        self, at: Sequence[str], scale: float, names: Names, *, count: int = 1, need: Sequence[str] = ("mean", "p50")
    ) -> Distribution:
        """Return the distribution below a path of keys.

        Args:
            at: path to its values.
            scale: seconds of one unit of them.
            names: path to each value, from `at`.
            count: number of observations, if the file does not have it.
            need: values that must be there.
        """
        paths = {name: (*at, *keys) for name, keys in names.items() if name != "count"}
        values = {name: None if self.get(*path) is None else self.number(*path) * scale for name, path in paths.items()}
        if missing := [name for name in need if values[name] is None]:
            raise self.fault(".".join((*at, *names[missing[0]])))
        counted = self.get(*at, *names["count"]) if "count" in names else None
        return Distribution(count=int(counted or count), **values)

    def finished(self, *keys: str) -> int:
        """Return the number of finished requests at a path of keys."""
        if done := int(self.number(*keys)):
            return done
        raise UserError(f"{self.source} ({self.tool}) has no finished request.", todo="Measure again.")

    def held_note(self, rate: float, users: int) -> str:
        """Return the note on a rate that a cap on the concurrency held back."""
        return (
            f"{self.source}: {rate:g} requests/s were asked for, but never more than {users} ran at once; the others "
            "waited in the client, and no latency includes that. It counts as a closed loop."
        )

    def notes(self, *, streamed: bool, lost: float = 0, total: float = 0) -> list[str]:
        """Return the notes on a load that was not streamed, or in which `lost` of `total` requests failed."""
        notes = [] if streamed else [f"{self.source} was not streamed: it has no TTFT and no ITL."]
        if lost > 0:
            notes.append(f"{self.source}: {lost:,.0f} of {total:,.0f} requests failed; the figures cover the others.")
        return notes


def normal_deviation(lengths: Distribution) -> float:
    """Return the standard deviation of a normal distribution with this P50 and P95; 0 if they are not known."""
    return max((lengths.p95 or 0.0) - (lengths.p50 or 0.0), 0.0) / 1.645


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The requests of a level as they were sent, warm-up included.

    Attributes:
        due: float64[n], seconds from the start of the level, ascending.
        isl: int64[n].
        osl: int64[n].
        window: [start, end) of what was measured, on the same clock.
        ttft: float64[n], seconds; None if the times were not kept.
        itl: float64[n], seconds, the mean of each request; NaN below two output tokens; None likewise.
    """

    due: Any
    isl: Any
    osl: Any
    window: tuple[float, float]
    ttft: Any | None = None
    itl: Any | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """One load and its results. Times in seconds, lengths in tokens.

    Attributes:
        arrival: "closed", "constant", "poisson", "gamma", "burst" or "trace".
        isl: mean input tokens.
        osl: mean output tokens.
        isl_stdev: standard deviation of the input tokens; 0 if all are equal, or not known.
        osl_stdev: standard deviation of the output tokens.
        requests: number of requests behind the figures; None if the tool does not report it.
        requests_per_s: finished requests per second.
        ttft_s: empty if responses were not streamed.
        itl_s: likewise.
        e2e_s: time to the last token.
        steady: whether the window lies under steady load; otherwise it includes the idle start.
        cv: coefficient of variation of the gaps of arrival=gamma.
        think_s: pause of a user in a closed loop.
        sent: the exact requests, if they were kept.
    """

    arrival: str
    concurrency: int | None
    request_rate: float | None
    isl: float
    osl: float
    requests: int | None
    requests_per_s: float
    ttft_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    isl_stdev: float = 0.0
    osl_stdev: float = 0.0
    steady: bool = True
    cv: float = 1.0
    think_s: float = 0.0
    sent: Sent | None = field(default=None, compare=False)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of the whole system."""
        return self.requests_per_s * self.osl

    @property
    def load(self) -> str:
        """The load in words: "concurrency 16, ISL 128, OSL 64"."""
        if self.concurrency is not None:
            how = f"concurrency {self.concurrency}"
        elif self.request_rate is not None:
            how = f"{self.request_rate:.3g} requests/s ({self.arrival})"
        else:
            how = "all at once" if self.arrival == "burst" else "trace"
        return f"{how}, ISL {self.isl:.0f}, OSL {self.osl:.0f}"


@dataclass(frozen=True, slots=True)
class Served:
    """GPUs that served a load, as far as they are known.

    Attributes:
        gpus: all of them together; None if unknown.
        tp: tensor parallel ranks of an instance, or None.
        pp: pipeline parallel ranks of an instance, or None.
        source: where that is stated, for messages.
        certain: False if the GPUs were seen at work rather than named by the server; others may have served too.
    """

    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    source: str = ""
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark of one deployment.

    Attributes:
        tool: name of the tool, e.g. "trtllm-pipelines", "aiperf", "vllm bench serve".
        levels: one per load.
        precision: compression in one word, or None.
        engine: engine that executes it, or None.
        gpu: name of the GPU, or None.
        limits: limits of the engine, if the tool reports them: max_batch_size, max_num_tokens, kv_blocks.
        percentiles: how the percentiles were computed.
        notes: what a reader should know about the numbers.
        about: versions, machine and dates, as reported by the tool.
    """

    tool: str
    levels: tuple[MeasuredLevel, ...]
    model: str
    sources: tuple[str, ...]
    precision: str | None = None
    engine: str | None = None
    gpu: str | None = None
    served: Served = field(default_factory=Served)
    limits: Mapping[str, int] = field(default_factory=dict)
    percentiles: Percentiles = "linear"
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


# Reader of GuideLLM's reports.
#
# Format: `src/guidellm/benchmark/schemas` of vllm-project/guidellm, report versions 1 (0.6) and 2 (0.7 and later). Both
# have the same `benchmarks`. Percentiles are values that occurred (`src/guidellm/schemas/statistics.py`), and those of
# the ITL count each request once per token.

NAMES: dict[str, tuple[str, ...]] = {name: ("percentiles", name) for name in ("p50", "p90", "p95", "p99")}
NAMES |= {name: (name,) for name in ("mean", "min", "max", "count")}


def is_guidellm(data: dict[str, Any]) -> bool:
    """Return whether GuideLLM wrote this report."""
    benchmarks = data.get("benchmarks")
    return isinstance(benchmarks, list) and any(
        isinstance(each, dict) and each.get("type_") == "generative_benchmark" for each in benchmarks
    )


def guidellm(data: Any, source: str) -> Measured:
    """Read a report; each of its benchmarks is a load."""
    files = [ResultFile(each, f"{source}, benchmark {i}", "GuideLLM") for i, each in enumerate(data["benchmarks"], 1)]
    served = [file for file in files if file.get("metrics", "request_totals", "successful")] or files[:1]
    empty = [f"Not used: {file.source}, no request of which finished." for file in files if file not in served]
    models = {str(file.get("config", "backend", "model") or "unknown") for file in files}
    if len(models) > 1:
        raise UserError(f"{source} (GuideLLM) has several models: {', '.join(sorted(models))}.")
    levels = [_level(file) for file in served]
    return Measured(
        tool="guidellm",
        levels=tuple(level for level, _ in levels),
        model=models.pop(),
        sources=(source,),
        percentiles="index",
        notes=(*empty, *(note for _, notes in levels for note in notes)),
        about={"version": ResultFile(data, source, "GuideLLM").get("metadata", "guidellm_version")},
    )


def _level(file: ResultFile) -> tuple[MeasuredLevel, list[str]]:
    arrival, users, rate, held = _load(file)
    done = file.finished("metrics", "request_totals", "successful")
    lost, total = (file.get("metrics", "request_totals", key) or 0 for key in ("errored", "total"))
    streamed = _mean(file, "time_to_first_token_ms") > 0
    level = MeasuredLevel(
        arrival=arrival,
        concurrency=users,
        request_rate=rate,
        isl=_mean(file, "prompt_token_count"),
        osl=_mean(file, "output_token_count"),
        isl_stdev=float(file.get("metrics", "prompt_token_count", "successful", "std_dev") or 0.0),
        osl_stdev=float(file.get("metrics", "output_token_count", "successful", "std_dev") or 0.0),
        requests=done,
        requests_per_s=_mean(file, "requests_per_second"),
        ttft_s=_distribution(file, "time_to_first_token_ms", 1e-3) if streamed else Distribution(0),
        itl_s=_distribution(file, "inter_token_latency_ms", 1e-3) if streamed else Distribution(0),
        e2e_s=_distribution(file, "request_latency", 1.0),
        steady=bool(file.get("warmup_duration")),
    )
    return level, [*file.notes(streamed=streamed, lost=lost, total=total), *held]


def _load(file: ResultFile) -> tuple[str, int | None, float | None, list[str]]:
    """Return arrival, concurrency and rate of the strategy that ran, and a note if a cap held an open loop back."""
    kind = str(file.need("config", "strategy", "type_"))
    if kind == "synchronous":
        return "closed", 1, None, []
    if kind == "concurrent":
        return "closed", int(file.number("config", "strategy", "streams")), None, []
    cap = file.whole("config", "strategy", "max_concurrency")
    if kind == "throughput":
        return ("closed" if cap else "burst"), cap, None, []
    if kind not in ("constant", "poisson"):
        raise file.unsupported(kind, "synchronous, concurrent, throughput, constant, poisson")
    rate = file.number("config", "strategy", "rate")
    if cap and _mean(file, "requests_per_second") < KEPT_UP * rate:
        return "closed", cap, None, [file.held_note(rate, cap)]
    return kind, None, rate, []


def _mean(file: ResultFile, name: str) -> float:
    return file.number("metrics", name, "successful", "mean")


def _distribution(file: ResultFile, name: str, scale: float) -> Distribution:
    return file.distribution(("metrics", name, "successful"), scale, NAMES)
