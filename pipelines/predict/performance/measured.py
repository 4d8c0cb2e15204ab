"""Results of benchmarks, whoever measured them, in one form: what calibration and sizing read.

Ours (`benchmark.json`), AIPerf, genai-perf and trtllm-bench. Their metrics agree (TTFT to the first non-empty response,
ITL = (E2E - TTFT) / (OSL - 1) per request); what differs (percentiles, when requests start, what is in the window) is
kept beside the numbers, so that a model can be held against them under the same protocol.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipelines.domain.benchmark import RESULT, BenchmarkResult, Distribution, Level
from pipelines.domain.errors import UserError
from pipelines.domain.summary import SECOND
from pipelines.engines.registry import runs_on_cpu

Percentiles = Literal["linear", "index"]
"""How percentiles were taken: between neighbours (numpy's default), or sorted[int(n p)] (trtllm-bench)."""
NAMES = (RESULT, "profile_export_aiperf.json", "profile_export_genai_perf.json")
"""File names that are looked for in a folder."""
KINDS = (
    "benchmark.json of this project, AIPerf's profile_export_aiperf.json, genai-perf's profile_export_genai_perf.json"
)
KINDS += " and the --report_json of trtllm-bench"


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


def read_measured(paths: Sequence[Path]) -> Measured:
    """Read one or several results of one deployment.

    Args:
        paths: files, or folders in which files of the known names are looked for.

    Raises:
        UserError: one is missing, no result of a known tool or incomplete, or they are of different deployments.
    """
    return joined([_read(file) for path in paths for file in _files(path.expanduser())])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for name in NAMES for file in path.rglob(name))
    if not found:
        raise UserError(
            f"There is no result of a benchmark in {path}.",
            allowed=f"Looked for {', '.join(NAMES)}, in folders below too.",
        )
    return found


def _read(path: Path) -> Measured:
    from pipelines.predict.performance import measured_tools

    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"sizing.measured={path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"sizing.measured={path} is not JSON: {error}.", allowed=f"Known are {KINDS}.") from None
    if isinstance(data, dict) and "schema" in data and "levels" in data:
        return _ours(BenchmarkResult.from_json(data, str(path)), path)
    reader = measured_tools.reader_of(data)
    if reader is None:
        raise UserError(
            f"sizing.measured={path} is no result of a benchmark that is known here.", allowed=f"Known are {KINDS}."
        )
    return reader(data, str(path))


def joined(parts: list[Measured]) -> Measured:
    """Levels of several files of one deployment."""
    first = parts[0]
    for other in parts[1:]:
        for what in ("tool", "model", "precision", "engine", "gpu", "tp", "pp"):
            here, there = getattr(first, what), getattr(other, what)
            if here != there:
                raise UserError(
                    f"sizing.measured mixes deployments: {what} is '{here}' in {first.sources[0]} and '{there}' in"
                    f" {other.sources[0]}.",
                    todo="Give the files of one deployment.",
                )
    return replace(
        first,
        levels=tuple(level for part in parts for level in part.levels),
        sources=tuple(source for part in parts for source in part.sources),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def from_result(result: BenchmarkResult, folder: Path | None = None) -> Measured:
    """A result of this project.

    Args:
        result: as `benchmark.json` holds it.
        folder: with the files of the requests; None, or a file that is not there, does without.

    Raises:
        UserError: no level has requests that finished.
    """
    source = f"{result.model} {result.precision}, {result.measured_at}"
    return _ours(result, None if folder is None else folder / RESULT, source)


def _ours(result: BenchmarkResult, path: Path | None, source: str = "") -> Measured:
    source = source or str(path)
    folder = None if path is None else path.parent
    found = [(level, measured_level(result, level, folder)) for level in result.levels]
    levels = [level for level, measured in found if measured is not None]
    if not levels:
        raise UserError(f"{source} holds no finished level.", todo="Measure again: make benchmark")
    gpus = result.machine.get("gpus") or [{}]
    return Measured(
        tool="trtllm-pipelines",
        levels=tuple(measured for _, measured in found if measured is not None),
        model=result.model,
        precision=result.precision,
        engine=result.engine,
        gpu=None if runs_on_cpu(result.engine) else gpus[0].get("name"),
        tp=result.tp_size,
        pp=result.world_size // result.tp_size,
        limits=_our_limits(levels),
        sources=(source,),
        notes=_our_notes(levels),
        about={"measured_at": result.measured_at, "versions": dict(result.versions), "machine": dict(result.machine)},
    )


def measured_level(result: BenchmarkResult, level: Level, folder: Path | None) -> MeasuredLevel | None:
    """A level of our own; None when it was cut short or nothing finished."""
    summary = level.summary
    if not (level.complete and summary.requests and summary.e2e_s.count):
        return None
    return MeasuredLevel(
        arrival=level.arrival,
        concurrency=level.concurrency,
        request_rate=level.request_rate,
        isl=summary.isl.mean or 0.0,
        osl=summary.osl.mean or 0.0,
        isl_stdev=_stdev(summary.isl),
        osl_stdev=_stdev(summary.osl),
        requests=summary.requests,
        requests_per_s=summary.requests_per_s,
        ttft_s=summary.ttft_s,
        itl_s=summary.itl_s,
        e2e_s=summary.e2e_s,
        steady=result.protocol.get("window") == "steady" and level.arrival not in ("burst", "trace"),
        cv=float(result.workload.get("cv", 1.0)),
        think_s=float(result.workload.get("think_time_s", 0.0)),
        sent=None if folder is None else _sent(folder / level.requests_file),
    )


def _stdev(found: Distribution) -> float:
    """As a normal distribution with this p50 and p95 has it."""
    return max((found.p95 or 0.0) - (found.p50 or 0.0), 0.0) / 1.645


def _sent(path: Path) -> Sent | None:
    """The requests of a level in the order they were due; None when they were not kept beside the result."""
    try:
        with gzip.open(path, "rt") as file:
            data = json.load(file)
        rows = sorted(zip(data["intended_ns"], data["isl"], data["osl"], data["error"], strict=True))
        start, end = data["window_ns"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fine = [row for row in rows if row[3] is None]
    due, isl, osl = (np.array([row[i] for row in fine]) for i in range(3))
    window = (start / SECOND, end / SECOND)
    return Sent(due / SECOND, isl.astype(np.int64), np.maximum(osl, 1).astype(np.int64), window)


def _our_limits(levels: Iterable[Level]) -> dict[str, int]:
    """What the server's own gauges tell."""
    blocks = [level.server.get("metrics", {}).get("kv_cache_block_max", {}).get("max") for level in levels]
    return {"kv_blocks": int(known[0])} if (known := [value for value in blocks if value]) else {}


def _our_notes(levels: Iterable[Level]) -> tuple[str, ...]:
    limited = [level.load for level in levels if level.client.bottleneck]
    return (f"The load generator was the limit at {', '.join(limited)}.",) if limited else ()
