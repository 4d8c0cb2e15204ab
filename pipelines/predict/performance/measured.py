"""Benchmark results of any tool in one form, as input for fits and sizing.

Their metrics agree (TTFT to the first non-empty response, ITL = (E2E - TTFT) / (OSL - 1) per request); differences
(percentiles, start of requests, contents of the window) are kept beside the numbers, so that a model can be compared
with them under the same protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import Percentiles


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The requests of a level as they were sent, warm-up included.

    Attributes:
        due: float64[n], seconds from the start of the level, ascending.
        isl: int64[n].
        osl: int64[n].
        window: [start, end) of what was measured, on the same clock.
    """

    due: Any
    isl: Any
    osl: Any
    window: tuple[float, float]


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """One load and its results. Times in seconds, lengths in tokens.

    Attributes:
        arrival: "closed", "constant", "poisson", "gamma", "burst" or "trace".
        concurrency: concurrency of a closed loop.
        request_rate: rate of an open loop.
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
        gpus: all of them together; None if nobody says.
        tp: tensor parallel ranks of an instance, or None.
        pp: pipeline parallel ranks of an instance, or None.
        source: who says so, for messages.
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
        model: name of the model in the tool.
        precision: compression in one word, or None.
        engine: engine that executes it, or None.
        gpu: name of the GPU, or None.
        served: GPUs that served it.
        limits: limits of the engine, if the tool reports them: max_batch_size, max_num_tokens, kv_blocks.
        sources: files read.
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
