"""Read benchmark results from files: our own, or those of the tools in `measured_tools`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.domain.benchmark import RESULT, BenchmarkResult, Distribution, Level
from pipelines.domain.errors import UserError
from pipelines.domain.summary import SECOND
from pipelines.engines.registry import runs_on_cpu
from pipelines.predict.performance.measured import Measured, MeasuredLevel, Sent
from pipelines.predict.performance.measured_tools import reader_of

NAMES = (RESULT, "profile_export_aiperf.json", "profile_export_genai_perf.json")
"""File names to look for in a folder."""
KINDS = (
    "benchmark.json of this project, AIPerf's profile_export_aiperf.json, genai-perf's profile_export_genai_perf.json"
)
KINDS += " and the --report_json of trtllm-bench"


def read_measured(paths: Sequence[Path]) -> Measured:
    """Read one or more results of one deployment.

    Args:
        paths: files, or folders that are searched for files of the known names.

    Raises:
        UserError: one is missing, incomplete or not a result of a known tool, or the deployments differ.
    """
    return joined([_read(file) for path in paths for file in _files(path.expanduser())])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for name in NAMES for file in path.rglob(name))
    if not found:
        raise UserError(
            f"There is no benchmark result in {path}.",
            allowed=f"Looked for {', '.join(NAMES)}, in subfolders too.",
        )
    return found


def _read(path: Path) -> Measured:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"sizing.measured={path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"sizing.measured={path} is not JSON: {error}.", allowed=f"Supported: {KINDS}.") from None
    if isinstance(data, dict) and "schema" in data and "levels" in data:
        return _ours(BenchmarkResult.from_json(data, str(path)), path)
    reader = reader_of(data)
    if reader is None:
        raise UserError(
            f"sizing.measured={path} is not a benchmark result of a supported tool.", allowed=f"Supported: {KINDS}."
        )
    return reader(data, str(path))


def joined(parts: list[Measured]) -> Measured:
    """Join the levels of several files of one deployment."""
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
    """Read a result of this project.

    Args:
        result: contents of `benchmark.json`.
        folder: folder with the request files; None, or a missing file, leaves them out.

    Raises:
        UserError: no level has finished requests.
    """
    source = f"{result.model} {result.precision}, {result.measured_at}"
    return _ours(result, None if folder is None else folder / RESULT, source)


def _ours(result: BenchmarkResult, path: Path | None, source: str = "") -> Measured:
    source = source or str(path)
    folder = None if path is None else path.parent
    found = [(level, measured_level(result, level, folder)) for level in result.levels]
    levels = [level for level, measured in found if measured is not None]
    if not levels:
        raise UserError(f"{source} has no finished level.", todo="Measure again: make benchmark")
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
    """Convert a level of our own; None if it was cut short or nothing finished."""
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
    """Return the standard deviation of a normal distribution with this p50 and p95."""
    return max((found.p95 or 0.0) - (found.p50 or 0.0), 0.0) / 1.645


def _sent(path: Path) -> Sent | None:
    """Return the requests of a level in the order they were due; None if they were not kept with the result."""
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
    """Return the engine's limits that the server's own gauges report."""
    blocks = [level.server.get("metrics", {}).get("kv_cache_block_max", {}).get("max") for level in levels]
    return {"kv_blocks": int(known[0])} if (known := [value for value in blocks if value]) else {}


def _our_notes(levels: Iterable[Level]) -> tuple[str, ...]:
    limited = [level.load for level in levels if level.client.bottleneck]
    return (f"The load generator was the limit at {', '.join(limited)}.",) if limited else ()
