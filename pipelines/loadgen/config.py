"""Settings of conf/workload/ (the requests) and conf/benchmark/ (the measurement). Imports nothing heavy."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.domain.benchmark import Slo
from pipelines.domain.errors import Fault, masked
from pipelines.settings.base import HOST, PORT, Group, Positive, Ranks

Arrival = Literal["closed", "constant", "poisson", "gamma", "burst", "trace"]
HOST_PORT = re.compile(HOST + PORT)
OPENAI_URL = re.compile(rf"https?://{HOST}({PORT})?(/[^\s?#@]*)?")
Api = Literal["completions", "chat"]
DEFAULT_MODEL, SEEING_MODEL = OWN_MODELS = ("ensemble", "tensorrt_llm_bls")
"""Our repository's models; the second takes pictures, as an ensemble cannot skip its encoder for requests without."""
OPEN_RATE = ("constant", "poisson", "gamma")
"""Arrivals that need a rate."""
DEFAULT_CONCURRENCY = (1, 8, 32)
AUTO_SECONDS = (6.0, 12.0)
"""Shortest and longest window of `duration_s=auto`. Longer ones gain little: what disturbs a machine lasts longer than
either (docs/benchmarks.md)."""
AUTO_REQUESTS = 100
"""Requests for which such a window goes on: of fewer, the 99th percentile is hardly more than the slowest."""
AUTO_PER_USER = 5
"""And for each user of a closed loop, whose requests often start and end together."""
MOST_CONCURRENCY = 4096
"""Where a search ends that no range is given for."""
Concurrency = Annotated[int, Field(ge=1, le=10**6)]
Seconds = Annotated[float, Field(ge=0)]
Milliseconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]

PRESETS: dict[str, tuple[float | None, float | None]] = {
    "chat": (None, 200),
    "chat_fast": (None, 90),
    "mlperf_llama2_70b": (2000, 200),
    "mlperf_llama2_70b_interactive": (450, 40),
    "mlperf_llama3_1_405b": (6000, 175),
    "mlperf_llama3_1_405b_interactive": (4500, 80),
    "mlperf_llama3_1_8b": (2000, 100),
    "mlperf_llama3_1_8b_interactive": (500, 30),
    "mlperf_mixtral_8x7b": (2000, 200),
}
"""Limits of TTFT and ITL in ms. Chat: as fast as people read, at 0.75 words per token: 225 words a minute are 200 ms
per token, 500 are 90. MLPerf: p99 TTFT and p99 TPOT; source: MLPerf Inference rules, server and interactive."""
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal["none", *PRESETS]
_NEEDS = {
    "fixed": ("mean",),
    "normal": ("mean", "stdev"),
    "lognormal": ("mean", "stdev"),
    "uniform": ("min", "max"),
    "empirical": (),
}
_IGNORES = {
    "fixed": ("stdev", "min", "max", "values", "file"),
    "normal": ("values", "file"),
    "lognormal": ("values", "file"),
    "uniform": ("mean", "stdev", "values", "file"),
    "empirical": ("mean", "stdev"),
}


class LengthSettings(Group):
    """Distribution of a number of tokens, drawn per request.

    Attributes:
        distribution: the family.
        mean: of the tokens themselves, also for lognormal.
        stdev: of the tokens themselves.
        min: smaller draws become this.
        max: larger draws become this.
        values: empirical: drawn with equal chance.
        file: empirical: one number per line.
    """

    distribution: Literal["fixed", "normal", "lognormal", "uniform", "empirical"]
    mean: Annotated[float, Field(ge=1)] | None = None
    stdev: Annotated[float, Field(ge=0)] | None = None
    min: Positive | None = None
    max: Positive | None = None
    values: tuple[Positive, ...] | None = None
    file: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _number(cls, data: object) -> object:
        """Take a plain number as a fixed length."""
        if isinstance(data, int | float):
            return {"distribution": "fixed", "mean": data}
        if not isinstance(data, dict | LengthSettings):
            raise ValueError(f"'{data}' is no length: give a number of tokens, or {{distribution: normal, ...}}")
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        kind = self.distribution
        if missing := [key for key in _NEEDS[kind] if getattr(self, key) is None]:
            raise ValueError(f"distribution '{kind}' needs {' and '.join(missing)}")
        if extra := [key for key in _IGNORES[kind] if getattr(self, key) is not None]:
            raise ValueError(f"{extra[0]}={getattr(self, extra[0])} conflicts with distribution '{kind}'")
        if kind == "fixed" and self.mean != int(self.mean or 0):
            raise ValueError(f"is {self.mean:g}; a fixed length is a whole number of tokens")
        if kind == "empirical" and (self.values is None) == (self.file is None):
            raise ValueError("distribution 'empirical' needs either values or file")
        if self.values is not None and not self.values:
            raise ValueError("values=[] is empty; give at least one number of tokens")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}")
        return self

    @property
    def expected(self) -> float | None:
        """Mean in tokens, as far as the settings state it; None for lengths from a file."""
        if self.mean is not None:
            return self.mean
        if self.values:
            return sum(self.values) / len(self.values)
        return None if self.min is None or self.max is None else (self.min + self.max) / 2

    @property
    def longest(self) -> int | None:
        """Upper bound in tokens; None if there is none, or if it is only known from a file."""
        if self.distribution == "fixed":
            return int(self.mean or 0)
        return max(self.values) if self.values else self.max


class MixedSettings(Group):
    """Requests of another length in a workload.

    Attributes:
        share: of all requests, or of all conversations.
        isl: input tokens, as of a workload.
        osl: output tokens.
    """

    share: Annotated[float, Field(gt=0, lt=1)]
    isl: LengthSettings
    osl: LengthSettings


TRACE_COLUMNS = ("time", "isl", "osl", "prompt", "session", "delay")
TRACE_UNITS = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class WorkloadSettings(Group):
    """Requests sent to the server, and their arrival.

    Attributes:
        name: for tables.
        isl: input tokens as the engine counts them, the first special token included; in a chat those of one turn.
        osl: output tokens.
        mix: requests of other lengths among them, each with its share; the rest have `isl` and `osl`.
        images: pictures of each request, or of the first message of a conversation; their tokens are part of `isl`.
        image_side: height and width of a picture, pixels.
        ignore_eos: whether to continue to `osl` when the model would stop earlier.
        shared_prefix_share: this share of each prompt's tokens is the same in all prompts (KV reuse).
        turns: requests of one conversation; each repeats all before it, with a synthetic answer of `osl` tokens.
        arrival: closed loop, or open loop at a rate, all at once, or according to a trace.
        think_time_s: closed loop: pause of a user between an answer and the next request.
        cv: gamma: coefficient of variation of the gaps; 1 is Poisson, above 1 is burstier.
        trace: file of requests with their times and lengths, CSV or JSON lines: `time` (seconds), `osl`, and `isl` or
            `prompt`; or as Mooncake, Azure, Weka, BurstGPT and gateways write them (docs/sizing.md).
        columns: the trace's own names where they are others: time, isl, osl, prompt, session or delay (after the answer
            before in the session); unit: of times that are numbers, s, ms, us or ns. `usage.prompt_tokens` is the count
            inside `usage`.
        trace_speed: factor by which the trace is sped up.
        prompts: maximum of distinct prompts per level if the number of requests is not known beforehand.
        seed: of lengths, prompts and arrival times.
    """

    LATER: ClassVar[tuple[str, ...]] = ("columns", "mix", "images", "image_side")

    name: str
    isl: LengthSettings
    osl: LengthSettings
    mix: tuple[MixedSettings, ...] = ()
    images: Annotated[int, Field(ge=0)] = 0
    image_side: Positive = 336
    ignore_eos: bool = True
    shared_prefix_share: Annotated[float, Field(ge=0, le=1)] = 0
    turns: Positive = 1
    arrival: Arrival = "closed"
    think_time_s: Seconds = 0
    cv: Annotated[float, Field(gt=0)] = 1
    trace: Path | None = None
    columns: dict[str, str] | None = None
    trace_speed: Annotated[float, Field(gt=0)] = 1
    prompts: Positive = 4096
    seed: Annotated[int, Field(ge=0)] = 1234

    @model_validator(mode="before")
    @classmethod
    def _arrives_as_in_a_trace(cls, data: object) -> object:
        """Take a trace for the load: a closed loop is only what nobody chose."""
        if isinstance(data, dict) and data.get("trace") is not None and data.get("arrival", "closed") == "closed":
            name = data.get("name")
            return {**data, "arrival": "trace", "name": "trace" if name == "fixed" else name}
        return data

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, columns: dict[str, str] | None) -> dict[str, str] | None:
        for key, name in (columns or {}).items():
            if key not in (*TRACE_COLUMNS, "unit"):
                raise ValueError(f"has {key}; it takes {', '.join(TRACE_COLUMNS)} and unit")
            if key == "unit" and name not in TRACE_UNITS:
                raise ValueError(f"has unit={name}; it takes {', '.join(TRACE_UNITS)}")
        return columns

    @property
    def parts(self) -> tuple[MixedSettings, ...]:
        """All requests by their lengths, with their shares; the sum is 1."""
        rest = 1 - sum(part.share for part in self.mix)
        own = MixedSettings.model_construct(share=rest, isl=self.isl, osl=self.osl)
        return (own, *self.mix)

    def expected(self, key: Literal["isl", "osl"]) -> float | None:
        """Return the mean length in tokens, as far as the settings state it; None for lengths from a file."""
        means = [(part.share, getattr(part, key).expected) for part in self.parts]
        return None if any(mean is None for _, mean in means) else sum(share * mean for share, mean in means)

    def longest(self, key: Literal["isl", "osl"]) -> int | None:
        """Return the upper bound in tokens; None if there is none, or if it is only known from a file."""
        bounds = [getattr(part, key).longest for part in self.parts]
        return None if None in bounds else max(bounds)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (shares := sum(part.share for part in self.mix)) > 1 - 1e-9:
            raise ValueError(f"has a mix whose shares add up to {shares:g}; isl and osl need some of 1")
        if self.mix and self.arrival == "trace":
            raise ValueError("has a mix, which a trace does not take: it says every length itself")
        if self.columns is not None and self.trace is None:
            raise ValueError(f"has columns={self.columns} without a trace: add workload.trace=FILE")
        if (self.arrival == "trace") != (self.trace is not None):
            trace = "no trace" if self.trace is None else f"trace={self.trace}"
            raise ValueError(
                f"has arrival={self.arrival} and {trace}: a trace needs workload.trace=FILE, and no other arrival"
            )
        if self.think_time_s and self.arrival != "closed":
            raise ValueError(
                f"has think_time_s={self.think_time_s:g}, which only a closed loop has; arrival is '{self.arrival}'"
            )
        if self.images and (self.shared_prefix_share or self.arrival == "trace"):
            other = "arrival=trace" if self.arrival == "trace" else f"shared_prefix_share={self.shared_prefix_share:g}"
            why = "a trace says every prompt itself" if self.arrival == "trace" else "a new picture is before the text"
            raise ValueError(f"has images={self.images} with {other}: {why}")
        if self.turns > 1 and self.arrival == "trace":
            raise ValueError(f"has turns={self.turns}, which a trace does not take: it says every prompt itself")
        return self


class SloSettings(Group):
    """Limits each request must meet to count for goodput, ms; given ones override those of the preset.

    Attributes:
        preset: limits by name: chat at a reading speed, or MLPerf's; none sets no limit.
        ttft_ms: time to first token, ms; null is the preset's.
        itl_ms: time between two tokens, ms; null is the preset's.
        e2e_ms: time of the whole answer, ms; null is no limit.
    """

    preset: Preset = "none"
    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None

    def to_slo(self) -> Slo:
        """Convert to the domain's record."""
        ttft, itl = PRESETS.get(self.preset, (None, None))
        own = any(value is not None for value in (self.ttft_ms, self.itl_ms, self.e2e_ms))
        name = self.preset if not own else "given" if self.preset == "none" else f"{self.preset}, changed"
        return Slo(name, self.ttft_ms or ttft, self.itl_ms or itl, self.e2e_ms)


class BenchmarkSettings(Group):
    """How a server is measured.

    Attributes:
        url: of a server that already runs: host:port of Triton's gRPC, or http://host:port/v1 of an OpenAI endpoint,
            whose key is read from OPENAI_API_KEY; None measures the one of this configuration.
        api: of an OpenAI endpoint: completions sends prompts as they are, chat applies the server's template; None is
            completions.
        metrics_url: its Prometheus page; None asks none of a server that already runs.
        precision: of a server that already runs, for the result, e.g. "fp8"; None is "unknown".
        tp_size: tensor parallel ranks of a server that already runs, for the result; None is 1.
        model_name: the model on the server; an OpenAI endpoint's only model needs no name, and pictures are sent to
            tensorrt_llm_bls unless another is named.
        concurrency: closed loop: requests in flight, one level each; None is 1, 8, 32. With `search`, the smallest
            and the largest to try; None is 1 to 4096.
        request_rate: open loop: requests per second, one level each. With `search`, the smallest and the largest to
            try; None is any.
        search: "max_load" measures no given loads but searches the largest one that meets the limits of `slo`.
        search_attainment: share of requests that must meet every limit.
        search_tolerance: how far the 95 % interval of the largest load may reach to either side, as a share of it.
        search_probes: loads tried at most.
        streaming: whether each token is sent by itself; otherwise TTFT and ITL have no value.
        window: "steady" begins after the warm-up, under load, and ends under load. "whole" starts on an idle server and
            spans the first request to the last response, including initial burst and tail.
        warmup_s: load before the window, at least this long. A second is enough (docs/benchmarks.md), since it goes on
            until `warmup_requests`.
        warmup_requests: and at least this many finished; None is one per user of a closed loop.
        duration_s: length of the window; "auto" is 6 s, or up to 12 until 100 requests have finished, and 5 for each
            user, or the whole trace; None is no limit. With `search`, the longest window of a probe; "auto" is 120 s.
        num_requests: the window also ends when this many have finished (open loop: have been sent).
        min_requests: the window does not end before this many have finished, whatever `duration_s` is.
        timeout_s: a request without its last token by then is given up and counted as an error.
        processes: client processes; None chooses automatically.
        repeats: how often each load is measured, in turns; above 1 the result has 95 % intervals.
        on_busy: what to do where other work keeps the measuring machine busy before a load: wait up to a minute, mark
            the load, or refuse; refuse also ends the run at a load that the client limited.
        slo: limits for goodput.
    """

    SEARCH: ClassVar[Mapping[str, Any]] = {"search_attainment": 0.95, "search_tolerance": 0.1, "search_probes": 40}
    """Defaults of what only a search reads."""
    LATER: ClassVar[tuple[str, ...]] = ("api", "repeats", "on_busy", "search", *SEARCH)

    url: str | None = None
    api: Api | None = None
    metrics_url: str | None = None
    precision: str | None = None
    tp_size: Positive | None = None
    model_name: str = DEFAULT_MODEL
    concurrency: tuple[Concurrency, ...] | None = None
    request_rate: tuple[Rate, ...] | None = None
    search: Literal["none", "max_load"] = "none"
    search_attainment: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    search_tolerance: Annotated[float, Field(ge=0.01, le=0.5)] = 0.1
    search_probes: Annotated[int, Field(ge=1, le=1000)] = 40
    streaming: bool = True
    window: Literal["steady", "whole"] = "steady"
    warmup_s: Seconds = 1
    warmup_requests: Annotated[int, Field(ge=0)] | None = None
    duration_s: Rate | Literal["auto"] | None = "auto"
    num_requests: Positive | None = None
    min_requests: Positive = 10
    timeout_s: Rate = 300
    processes: Ranks | None = None
    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    on_busy: Literal["wait", "mark", "refuse"] = "mark"
    slo: SloSettings = Field(default_factory=SloSettings)

    @property
    def is_openai(self) -> bool:
        """Whether an OpenAI endpoint is measured."""
        return self.url is not None and self.url.startswith("http")

    def seconds(self, rate: float, users: int = 0) -> float | None:
        """Return how long a window lasts in which `rate` requests finish per second; None is no limit."""
        if self.duration_s != "auto":
            return self.duration_s
        least, most = AUTO_SECONDS
        enough = self.num_requests or max(AUTO_REQUESTS, AUTO_PER_USER * users)
        return min(max(enough / rate, least), most) if rate else most

    @model_validator(mode="before")
    @classmethod
    def _one_level(cls, data: object) -> object:
        """Accept a single value for a list: `concurrency=8` means `[8]`."""
        if isinstance(data, dict):
            levels = ("concurrency", "request_rate")
            data = {k: [v] if k in levels and isinstance(v, int | float) else v for k, v in data.items()}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for key in ("concurrency", "request_rate"):
            if getattr(self, key) == ():
                raise ValueError(f"has {key}=[], which measures nothing; give at least one level")
        if self.duration_s is None and self.num_requests is None and self.search == "none":
            raise ValueError("would never stop: set benchmark.duration_s or benchmark.num_requests")
        for key in ("metrics_url", "precision", "tp_size", "api"):
            if self.url is None and getattr(self, key) is not None:
                raise ValueError(f"has {key}={getattr(self, key)} without url: it is for a server that already runs")
        if self.url is None and self.model_name not in OWN_MODELS:
            own = " and ".join(OWN_MODELS)
            what = f"a repository has {own}; other names are for a server that already runs"
            raise ValueError(f"has model_name='{self.model_name}' without url: {what}")
        if self.url is not None and not HOST_PORT.fullmatch(self.url) and not OPENAI_URL.fullmatch(self.url):
            url = masked(re.sub("^.*@", "***@", self.url))
            forms = "host:port of a server's gRPC, e.g. localhost:8001, or an OpenAI endpoint, http://host:8000/v1"
            raise ValueError(f"has url='{url}'; give {forms}")
        if self.url is not None and self.url.rstrip("/").endswith(("/completions", "/models")):
            raise ValueError(f"has url='{self.url}'; give it up to and with /v1")
        if self.api is not None and not self.is_openai:
            raise ValueError(f"has api={self.api} with url='{self.url}', which is gRPC; it is for http://host:port/v1")
        return self._check_search()

    def _check_search(self) -> Self:
        """Refuse what a search sets itself, and what only a search takes."""
        if self.search == "none":
            for key, default in self.SEARCH.items():
                if (value := getattr(self, key)) != default:
                    raise ValueError(f"has {key}={value:g} without a search: add benchmark.search=max_load")
            return self
        if not self.slo.to_slo().limits:
            raise ValueError("has search=max_load without a limit: add e.g. benchmark.slo.ttft_ms=500")
        for key, value in self.changed(("num_requests", "repeats", "window")).items():
            raise ValueError(f"has {key}={value}, which a search decides itself: leave it out")
        for key in ("concurrency", "request_rate"):
            span = getattr(self, key)
            if span is not None and not (len(span) == 2 and span[0] < span[1]):
                raise ValueError(
                    f"has {key}={_shown(span)}; a search takes the smallest and the largest load, e.g. [1,64]"
                )
        return self


def load_faults(workload: WorkloadSettings, benchmark: BenchmarkSettings) -> list[Fault]:
    """List all contradictions between the two groups; empty if they agree."""
    arrival, faults = workload.arrival, []
    if arrival == "closed" and benchmark.request_rate is not None:
        rates = _shown(benchmark.request_rate)
        todo = "Add workload.arrival=poisson (or constant, gamma), or set benchmark.concurrency instead."
        faults.append(Fault(f"benchmark.request_rate={rates} conflicts with workload.arrival=closed.", todo=todo))
    if arrival != "closed" and benchmark.concurrency is not None:
        message = f"benchmark.concurrency={_shown(benchmark.concurrency)} conflicts with workload.arrival={arrival}."
        faults.append(Fault(message, todo="Add workload.arrival=closed or leave benchmark.concurrency out."))
    if benchmark.search != "none" and arrival in ("burst", "trace"):
        message = f"benchmark.search={benchmark.search} varies a load, and workload.arrival={arrival} has none to vary."
        faults.append(Fault(message, todo=f"Choose workload.arrival from closed, {', '.join(OPEN_RATE)}."))
    if arrival in OPEN_RATE and benchmark.request_rate is None and benchmark.search == "none":
        message = f"workload.arrival={arrival} has no rate."
        faults.append(Fault(message, todo="Add the requests per second, e.g. benchmark.request_rate=[2,4,8]."))
    if arrival in ("burst", "trace") and benchmark.request_rate is not None:
        rates = _shown(benchmark.request_rate)
        todo = f"Leave it out, or choose workload.arrival from {', '.join(OPEN_RATE)}."
        faults.append(Fault(f"benchmark.request_rate={rates} conflicts with workload.arrival={arrival}.", todo=todo))
    if arrival == "burst" and benchmark.num_requests is None and benchmark.search == "none":
        message = "workload.arrival=burst has no number of requests."
        faults.append(Fault(message, todo="Add how many to send at once, e.g. benchmark.num_requests=64."))
    if workload.images and benchmark.is_openai and benchmark.api != "chat":
        message = f"workload.images={workload.images} conflicts with benchmark.api=completions, which takes text alone."
        faults.append(Fault(message, todo="Add benchmark.api=chat."))
    if not benchmark.streaming and (benchmark.slo.to_slo().ttft_ms or benchmark.slo.to_slo().itl_ms):
        message = "benchmark.slo limits TTFT or ITL, which benchmark.streaming=false cannot measure."
        faults.append(Fault(message, todo="Add benchmark.streaming=true, or limit only benchmark.slo.e2e_ms."))
    return [*faults, *unread(workload, benchmark)]


def unread(workload: WorkloadSettings, benchmark: BenchmarkSettings) -> Iterator[Fault]:
    """Yield what was set and this load does not read."""
    arrival = workload.arrival
    paced = arrival in OPEN_RATE and benchmark.window == "steady"
    rows = (
        ("workload.cv", workload, arrival != "gamma", "workload.arrival=gamma reads it"),
        ("workload.trace_speed", workload, workload.trace is None, "it is for workload.trace=FILE"),
        ("workload.image_side", workload, not workload.images, "it is for workload.images=1 or more"),
        ("benchmark.warmup_requests", benchmark, paced, "an open loop warms up for benchmark.warmup_s"),
        ("benchmark.duration_s", benchmark, arrival == "burst", "a burst ends with its last response"),
    )
    for name, group, moot, why in rows:
        key = name.partition(".")[2]
        if moot and (value := group.changed([key]).get(key)):
            yield Fault(f"{name}={value} has no effect on workload.arrival={arrival}: {why}.", todo="Leave it out.")
    least, most, usual = benchmark.min_requests, benchmark.num_requests, BenchmarkSettings.model_fields["min_requests"]
    if most is not None and least > most and least != usual.default:
        what = f"benchmark.min_requests={least} is more than benchmark.num_requests={most}, which end the window."
        yield Fault(what, todo="Leave one of them out.")


def _shown(values: tuple[float, ...]) -> str:
    return "[" + ",".join(f"{value:g}" for value in values) + "]"
