"""Results of benchmarks, whoever measured them, in one form: what fits and sizing work on.

Ours (`benchmark.json`), AIPerf, genai-perf and trtllm-bench. Their metrics agree (TTFT to the first non-empty response,
ITL = (E2E - TTFT) / (OSL - 1) per request); what differs (percentiles, when requests start, what is in the window) is
kept beside the numbers, so that a model can be held against them under the same protocol.
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
    """One load and what came of it. Times in seconds, lengths in tokens.

    Attributes:
        arrival: "closed", "constant", "poisson", "gamma", "burst" or "trace".
        concurrency: of a closed loop.
        request_rate: of an open loop.
        isl: mean input tokens.
        osl: mean output tokens.
        isl_stdev: of the input tokens; 0 when all are equal, or not known.
        osl_stdev: of the output tokens.
        requests: the numbers are over; None when the tool does not say.
        requests_per_s: finished.
        ttft_s: no values when responses were not streamed.
        itl_s: likewise.
        e2e_s: time to the last token.
        steady: the window lies under load; else the idle start is inside.
        cv: of the gaps of arrival=gamma.
        think_s: pause of a user of a closed loop.
        sent: the very requests, where they were kept.
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
        """Of the system."""
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
class Measured:
    """A benchmark of one deployment.

    Attributes:
        tool: "trtllm-pipelines", "aiperf", "genai-perf" or "trtllm-bench".
        levels: one per load.
        model: as the tool calls it.
        precision: compression in one word, or None.
        engine: what executes it, or None.
        gpu: its name, or None.
        tp: tensor parallel ranks.
        pp: pipeline parallel ranks.
        limits: of the engine, where the tool tells: max_batch_size, max_num_tokens, kv_blocks.
        sources: files.
        percentiles: how they were taken.
        notes: what a reader should know about the numbers.
        about: versions, machine and dates, as the tool tells them.
    """

    tool: str
    levels: tuple[MeasuredLevel, ...]
    model: str
    sources: tuple[str, ...]
    precision: str | None = None
    engine: str | None = None
    gpu: str | None = None
    tp: int = 1
    pp: int = 1
    limits: Mapping[str, int] = field(default_factory=dict)
    percentiles: Percentiles = "linear"
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
