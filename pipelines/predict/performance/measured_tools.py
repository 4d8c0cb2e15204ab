"""Readers of results written by other tools. Errors name the missing key; units are read from the file.

Formats: AIPerf `docs/reference/json-export-schema.md` (schema 1.0 to 1.5; `input_config.phases` as
`src/aiperf/config/phases.py` has them and, before 0.7, `input_config.loadgen`);
genai-perf `genai_perf/export_data/json_exporter.py` with its tests;
trtllm-bench `tensorrt_llm/bench/dataclasses/reporting.py` and `statistics.py` of TensorRT-LLM 1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.domain.formats import BY_QUANT_ALGO
from pipelines.predict.performance.measured import Measured, MeasuredLevel

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
CAPPED = 0.1
"""Largest spread of submissions, as a share of the run, that counts as unthrottled. trtllm-bench submits everything at
once unless --concurrency holds them back, and its report does not say which."""
Reader = Callable[[Any, str], Measured]


@dataclass(frozen=True, slots=True)
class _File:
    """JSON of a tool, read key by key."""

    data: Any
    source: str
    tool: str

    def get(self, *keys: str | int) -> Any:
        """Return the value at a path of keys, or None."""
        found = self.data
        for key in keys:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def need(self, *keys: str) -> Any:
        """Return the value at a path of keys.

        Raises:
            UserError: the value is missing.
        """
        if (found := self.get(*keys)) is None:
            raise self.fault(".".join(keys))
        return found

    def number(self, *keys: str) -> float:
        """Return a number (some versions write numbers as text).

        Raises:
            UserError: the value is missing or not a number.
        """
        found = self.need(*keys)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UserError(f"{self.source}: {'.'.join(keys)}={found!r} is not a number.") from None

    def fault(self, key: str, todo: str = "") -> UserError:
        """Build the error for a missing key."""
        return UserError(
            f"{self.source} ({self.tool}) lacks '{key}'.", todo=todo or "Give the file as the tool wrote it."
        )


def reader_of(data: Any) -> Reader | None:
    """Return the reader for the tool that wrote this; None if the tool is unknown."""
    if not isinstance(data, dict):
        return None
    if "request_info" in data and "performance" in data:
        return trtllm_bench
    config = data.get("input_config")
    if "aiperf_version" in data or (isinstance(config, dict) and ("loadgen" in config or "phases" in config)):
        return aiperf
    return genai_perf if isinstance(config, dict) and "request_throughput" in data else None


def aiperf(data: Any, source: str) -> Measured:
    """Read `profile_export_aiperf.json`.

    Raises:
        UserError: a required key is missing.
    """
    file = _File(data, source, "AIPerf")
    if file.get("was_cancelled"):
        raise UserError(f"{source} (AIPerf) is from a run that was cancelled.", todo="Measure again.")
    phase = _profiling(file)
    rate = phase.get("rate", phase.get("request_rate"))
    arrival = str(phase.get("type") or phase.get("arrival_pattern") or ("concurrency" if rate is None else "poisson"))
    if arrival not in ("concurrency", "concurrency_burst", "poisson", "gamma", "constant"):
        raise UserError(
            f"{source} (AIPerf) was measured with '{arrival}'.",
            allowed="Supported: concurrency, poisson, gamma, constant.",
        )
    model = file.get("input_config", "models", "items", 0, "name") or file.get(
        "input_config", "endpoint", "model_names", 0
    )
    return Measured(
        tool="aiperf",
        levels=(_level(file, arrival, phase.get("concurrency"), rate, warm=_warms(file)),),
        model=str(model or "unknown"),
        gpu=_aiperf_gpu(file),
        sources=(source,),
        notes=_streamed(file),
        about={"version": file.get("aiperf_version"), "measured_at": file.get("start_time")},
    )


def _profiling(file: _File) -> Mapping[str, Any]:
    """Return the applied load: the profiling phase, or `loadgen` of older versions."""
    phases = file.get("input_config", "phases")
    if phases is None:
        return dict(file.need("input_config", "loadgen"))
    found = [p for p in phases if "profiling" in (p.get("kind"), p.get("name"))]
    if len(found) != 1:
        raise file.fault("input_config.phases[profiling]", "One profiling phase is one level; give each its own file.")
    return dict(found[0])


def _warms(file: _File) -> bool:
    """Return whether warm-up requests ran before those that count."""
    phases = file.get("input_config", "phases") or []
    warm = any("warmup" in (phase.get("kind"), phase.get("name")) and phase.get("seamless") for phase in phases)
    return bool(warm)  # AIPerf drains a warm-up that is not seamless before it starts measuring


def _aiperf_gpu(file: _File) -> str | None:
    endpoints = file.get("telemetry_data", "endpoints") or {}
    names = [gpu.get("gpu_name") for found in endpoints.values() for gpu in (found.get("gpus") or {}).values()]
    return str(names[0]) if names and names[0] else None


def genai_perf(data: Any, source: str) -> Measured:
    """Read `profile_export_genai_perf.json`, with flat or nested `input_config`.

    Raises:
        UserError: a required key is missing.
    """
    file = _File(data, source, "genai-perf")
    config = file.need("input_config")
    stimulus = file.get("input_config", "perf_analyzer", "stimulus") or config
    users, rate = stimulus.get("concurrency"), stimulus.get("request_rate")
    if users is None and rate is None:
        raise file.fault("input_config.concurrency", "The load must be given as a concurrency or a request_rate.")
    model = config.get("model") or config.get("model_names") or ["unknown"]
    return Measured(
        tool="genai-perf",
        levels=(_level(file, "concurrency" if rate is None else "constant", users, rate, warm=_by_time(file)),),
        model=str(model if isinstance(model, str) else model[0]),
        engine=config.get("backend"),
        sources=(source,),
        notes=_streamed(file),
    )


def _by_time(file: _File) -> bool:
    """Return whether time windows were measured, which begin under load; a number of requests includes the start."""
    count, mode = (
        file.get("input_config", "request_count"),
        file.get("input_config", "perf_analyzer", "measurement", "mode"),
    )
    return count == 0 if mode is None else mode not in ("request_count", "count_windows")


def _level(file: _File, arrival: str, users: Any, rate: Any, *, warm: bool) -> MeasuredLevel:
    """Build the level of a file of AIPerf or genai-perf, which use the same metric names."""
    if arrival in ("concurrency", "concurrency_burst"):
        if users is None:
            raise file.fault("input_config ... concurrency")
        rate = None
    count = file.get("request_count", "avg")
    return MeasuredLevel(
        arrival="closed" if rate is None else arrival,
        concurrency=int(users) if rate is None else None,
        request_rate=None if rate is None else float(rate),
        isl=file.number("input_sequence_length", "avg"),
        osl=file.number("output_sequence_length", "avg"),
        isl_stdev=float(file.get("input_sequence_length", "std") or 0.0),
        osl_stdev=float(file.get("output_sequence_length", "std") or 0.0),
        requests=None if count is None else int(float(count)),
        requests_per_s=file.number("request_throughput", "avg"),
        ttft_s=_metric(file, "time_to_first_token", optional=True),
        itl_s=_metric(file, "inter_token_latency", optional=True),
        e2e_s=_metric(file, "request_latency"),
        steady=warm,
    )


def _metric(file: _File, name: str, *, optional: bool = False) -> Distribution:
    """Return a distribution in seconds; empty if an optional one is missing."""
    if optional and file.get(name) is None:
        return Distribution(0)
    unit = str(file.need(name, "unit"))
    if unit not in SECONDS:
        raise UserError(
            f"{file.source}: {name}.unit='{unit}' is not known.", allowed=f"Supported: {', '.join(SECONDS)}."
        )
    return _distribution(file, (name,), SECONDS[unit], "avg", "min", "max")


def _distribution(file: _File, at: tuple[str, ...], scale: float, mean: str, low: str, high: str) -> Distribution:
    def value(key: str) -> float | None:
        found = file.get(*at, key)
        return None if found is None else float(found) * scale

    average, median = file.number(*at, mean) * scale, file.number(*at, "p50") * scale
    return Distribution(
        count=int(file.get(*at, "count") or 1),
        mean=average,
        min=value(low),
        p50=median,
        p90=value("p90"),
        p95=value("p95"),
        p99=value("p99"),
        max=value(high),
    )


def _streamed(file: _File) -> tuple[str, ...]:
    if file.get("time_to_first_token") is not None:
        return ()
    return (f"{file.source} was not streamed: it has no TTFT and no ITL.",)


def trtllm_bench(data: Any, source: str) -> Measured:
    """Read the report of `trtllm-bench throughput --report_json FILE` (or `latency`).

    Raises:
        UserError: a required key is missing.
    """
    file = _File(data, source, "trtllm-bench")
    requests = int(file.number("request_info", "num_requests"))
    seconds = file.number("performance", "total_latency_ms") / 1e3
    # issue_rate is ns per request, multiplied by 1e9
    spread = float(file.get("world_info", "issue_rate") or 0.0) * requests / 1e18
    held = spread > CAPPED * seconds
    users = max(round(file.number("request_info", "avg_num_concurrent_requests")), 1) if held else None
    streamed = file.get("streaming_metrics") is not None
    names = ("average", "minimum", "maximum")
    level = MeasuredLevel(
        arrival="closed" if held else "burst",
        concurrency=users,
        request_rate=None,
        isl=file.number("request_info", "avg_input_length"),
        osl=file.number("request_info", "avg_output_length"),
        requests=requests,
        requests_per_s=file.number("performance", "request_throughput_req_s"),
        ttft_s=_bench(file, "ttft_percentiles", names) if streamed else Distribution(0),
        itl_s=_bench(file, "tpot_percentiles", names) if streamed else Distribution(0),
        e2e_s=_distribution(file, ("performance", "request_latency_percentiles_ms"), 1e-3, *names),
        steady=False,
    )
    limits = {key: file.get("world_info", key) for key in ("max_batch_size", "max_num_tokens")}
    return Measured(
        tool="trtllm-bench",
        levels=(level,),
        model=str(file.need("engine", "model")),
        precision=_precision(file),
        engine="tensorrt_llm",
        gpu=file.get("machine", "name"),
        tp=int(file.number("world_info", "tp_size")),
        pp=int(file.number("world_info", "pp_size")),
        limits={key: int(value) for key, value in limits.items() if value},
        sources=(source,),
        percentiles="index",
        notes=_bench_notes(held, users, streamed),
        about={
            "version": file.get("engine", "version"),
            "scheduling_policy": file.get("world_info", "scheduling_policy"),
        },
    )


def _bench(file: _File, name: str, names: tuple[str, str, str]) -> Distribution:
    return _distribution(file, ("streaming_metrics", name), 1e-3, *names)


def _precision(file: _File) -> str | None:
    """Translate `quantization` to this project's word; None in a report means 16 bit."""
    if "quantization" not in file.need("engine"):
        return None
    algo = file.get("engine", "quantization")
    return str(BY_QUANT_ALGO.get(algo, str(algo).lower()))


def _bench_notes(held: bool, users: int | None, streamed: bool) -> tuple[str, ...]:
    notes = ["Percentiles of trtllm-bench are sorted[int(n p)], not interpolated."]
    if held:
        notes.append(
            f"The report does not say --concurrency; its requests were held back, {users} in flight on average."
        )
    else:
        notes.append("All requests start at once, so TTFT is mostly time in the queue.")
    if not streamed:
        notes.append("Without --streaming it reports no TTFT and no ITL.")
    return tuple(notes)
