"""Reader of GuideLLM's reports.

Format: `src/guidellm/benchmark/schemas` of vllm-project/guidellm, report versions 1 (0.6) and 2 (0.7 and later), which
have the same `benchmarks`. Percentiles are values that occurred (`src/guidellm/schemas/statistics.py`), and those of
the ITL count each request once per token.
"""

from __future__ import annotations

from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.predict.performance.measured import Measured, MeasuredLevel
from pipelines.predict.performance.result_file import KEPT_UP, ResultFile

NAMES: dict[str, tuple[str, ...]] = {name: ("percentiles", name) for name in ("p50", "p90", "p95", "p99")}
NAMES |= {name: (name,) for name in ("mean", "min", "max", "count")}


def is_guidellm(data: dict[str, Any]) -> bool:
    """Return whether GuideLLM wrote this report."""
    benchmarks = data.get("benchmarks")
    return isinstance(benchmarks, list) and any(
        isinstance(each, dict) and each.get("type_") == "generative_benchmark" for each in benchmarks
    )


def guidellm(data: Any, source: str) -> Measured:
    """Read a report; each of its benchmarks is a load.

    Raises:
        UserError: a required key is missing, or a load cannot be compared.
    """
    files = [ResultFile(each, f"{source}, benchmark {i}", "GuideLLM") for i, each in enumerate(data["benchmarks"], 1)]
    served = [file for file in files if file.get("metrics", "request_totals", "successful")] or files[:1]
    empty = [f"Not used: {file.source}, no request of which finished." for file in files if file not in served]
    models = {str(file.get("config", "backend", "model") or "unknown") for file in files}
    if len(models) > 1:
        raise UserError(f"{source} (GuideLLM) has several models: {', '.join(sorted(models))}.")
    return Measured(
        tool="guidellm",
        levels=tuple(_level(file) for file in served),
        model=models.pop(),
        sources=(source,),
        percentiles="index",
        notes=(*empty, *(note for file in served for note in _notes(file))),
        about={"version": ResultFile(data, source, "GuideLLM").get("metadata", "guidellm_version")},
    )


def _level(file: ResultFile) -> MeasuredLevel:
    arrival, users, rate = _load(file)
    done = file.finished("metrics", "request_totals", "successful")
    streamed = _streamed(file)
    return MeasuredLevel(
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


def _load(file: ResultFile) -> tuple[str, int | None, float | None]:
    """Return arrival, concurrency and rate of the strategy that ran."""
    kind = str(file.need("config", "strategy", "type_"))
    if kind == "synchronous":
        return "closed", 1, None
    if kind == "concurrent":
        return "closed", int(file.number("config", "strategy", "streams")), None
    if kind == "throughput":
        users = file.whole("config", "strategy", "max_concurrency")
        return ("closed" if users else "burst"), users, None
    if kind in ("constant", "poisson"):
        if cap := _cap_that_held(file):
            return "closed", cap, None
        return kind, None, file.number("config", "strategy", "rate")
    raise file.unsupported(kind, "synchronous, concurrent, throughput, constant, poisson")


def _cap_that_held(file: ResultFile) -> int | None:
    """Return the cap on the concurrency of an open loop, if it kept requests waiting in the client."""
    cap = file.whole("config", "strategy", "max_concurrency")
    rate = file.get("config", "strategy", "rate")
    return cap if cap and rate and _mean(file, "requests_per_second") < KEPT_UP * float(rate) else None


def _streamed(file: ResultFile) -> bool:
    return _mean(file, "time_to_first_token_ms") > 0


def _mean(file: ResultFile, name: str) -> float:
    return file.number("metrics", name, "successful", "mean")


def _distribution(file: ResultFile, name: str, scale: float) -> Distribution:
    return file.distribution(("metrics", name, "successful"), scale, NAMES)


def _notes(file: ResultFile) -> list[str]:
    lost, total = (file.get("metrics", "request_totals", key) or 0 for key in ("errored", "total"))
    notes = file.notes(streamed=_streamed(file), lost=lost, total=total)
    kind, cap = file.get("config", "strategy", "type_"), _cap_that_held(file)
    if kind in ("constant", "poisson") and cap:
        notes.append(file.held_note(file.number("config", "strategy", "rate"), cap))
    return notes
