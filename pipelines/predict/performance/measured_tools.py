"""Readers of the results of NVIDIA's tools. Errors name the missing key; units are read from the file.

Formats: AIPerf `docs/reference/json-export-schema.md` (schema 1.0 to 1.5; `input_config.phases` as
`src/aiperf/config/phases.py` has them and, before 0.7, `input_config.loadgen`) and
`docs/server-metrics/server-metrics-json-schema.md`, with the metric `trtllm_parallel_config_info` of TensorRT-LLM;
genai-perf `genai_perf/export_data/json_exporter.py` with its tests;
trtllm-bench `tensorrt_llm/bench/dataclasses/reporting.py` and `statistics.py` of TensorRT-LLM 1.2.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.document.show import count
from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.domain.formats import BY_QUANT_ALGO
from pipelines.predict.performance.measured import KEPT_UP, Measured, MeasuredLevel, ResultFile, Served

CAPPED = 0.1
"""Largest spread of submissions, as a share of the run, that counts as unthrottled. trtllm-bench submits everything at
once unless --concurrency holds them back, and its report does not say which."""
BY_STATISTIC = {
    "mean": ("avg",), "min": ("min",), "p50": ("p50",), "p90": ("p90",), "p95": ("p95",), "p99": ("p99",),
    "max": ("max",), "count": ("count",),
}  # fmt: skip
"""Names of AIPerf and genai-perf."""
OF_BENCH = BY_STATISTIC | {"mean": ("average",), "min": ("minimum",), "max": ("maximum",)}
ENGINES = {"tensorrtllm": "tensorrt_llm"}
"""genai-perf's names of engines, where they differ from this project's."""
PHASES = "phases"
"""Folder beside AIPerf's result, where AIPerf 0.13 writes the warm-up and each profiling phase by itself."""
SERVER_METRICS = "server_metrics_export.json"
"""What AIPerf writes beside its result: the metrics of the server."""


def is_aiperf(data: Mapping[str, Any]) -> bool:
    """Return whether AIPerf wrote this."""
    config = data.get("input_config")
    if _aggregation(data) is not None:
        return True
    return "aiperf_version" in data or (isinstance(config, dict) and ("loadgen" in config or "phases" in config))


def _aggregation(data: Mapping[str, Any]) -> Any:
    """Return how a file summarises several runs of AIPerf; None for the file of one run."""
    about = data.get("metadata")
    return (about if isinstance(about, dict) else data).get("aggregation_type")


def aiperf(data: Any, source: str) -> Measured:
    """Read `profile_export_aiperf.json`."""
    file = ResultFile(data, source, "AIPerf")
    if (kind := _aggregation(data)) is not None:
        raise UserError(
            f"{source} (AIPerf) is an aggregate over several runs ({kind}): it has means of statistics, and not the "
            "load that was applied.",
            todo="Give the profile_export_aiperf.json of each run, or the folder that holds them.",
        )
    if file.get("was_cancelled"):
        raise UserError(f"{source} (AIPerf) is from a run that was cancelled.", todo="Measure again.")
    phase = _profiling(file)
    rate = phase.get("rate", phase.get("request_rate"))
    arrival = str(phase.get("type") or phase.get("arrival_pattern") or ("concurrency" if rate is None else "poisson"))
    if arrival not in ("concurrency", "concurrency_burst", "poisson", "gamma", "constant"):
        raise file.unsupported(arrival, "concurrency, poisson, gamma, constant")
    cap, notes = phase.get("concurrency"), list[str]()
    if rate and cap and file.number("request_throughput", "avg") < KEPT_UP * float(rate):
        arrival, notes = "concurrency", [file.held_note(float(rate), int(cap))]
    model = file.get("input_config", "models", "items", 0, "name") or file.get(
        "input_config", "endpoint", "model_names", 0
    )
    # AIPerf drains a warm-up that is not seamless before it starts measuring
    phases = file.get("input_config", "phases") or []
    warm = any("warmup" in (each.get("kind"), each.get("name")) and each.get("seamless") for each in phases)
    gpus = _telemetry(file)
    stated = _server_info(file)
    served, counted = (stated, ()) if stated else _counted(gpus, source)
    return Measured(
        tool="aiperf",
        levels=(_level(file, arrival, phase.get("concurrency"), rate, warm=warm),),
        model=str(model or "unknown"),
        gpu=next((str(gpu["gpu_name"]) for gpu in gpus if gpu.get("gpu_name")), None),
        served=served,
        sources=(source,),
        notes=(*_streamed(file), *_lost(file), *notes, *counted),
        about={"version": file.get("aiperf_version"), "measured_at": file.get("start_time")},
    )


def _lost(file: ResultFile) -> list[str]:
    """Return notes on requests that failed, and on a run that AIPerf itself calls incomplete."""
    failed, done = (float(file.get(name, "avg") or 0.0) for name in ("error_request_count", "request_count"))
    failed = failed or float(sum(int(each.get("count") or 0) for each in file.get("error_summary") or []))
    notes = file.notes(streamed=True, lost=failed, total=failed + done)
    if file.get("is_complete") is False:
        notes.append(f"{file.source}: AIPerf says is_complete=false; the run ended before all its requests.")
    return notes


def _profiling(file: ResultFile) -> Mapping[str, Any]:
    """Return the applied load: the profiling phase, or `loadgen` of older versions."""
    phases = file.get("input_config", "phases")
    if phases is None:
        return dict(file.need("input_config", "loadgen"))
    folder = Path(file.source).absolute().parent
    own = [p for p in phases if folder.parent.name == PHASES and p.get("name") == folder.name]
    if any("warmup" in (p.get("kind"), p.get("name")) for p in own):
        raise UserError(f"{file.source} (AIPerf) is of the warm-up.", todo=f"Give {folder.parent.parent}.")
    profiling = own or [p for p in phases if "profiling" in (p.get("kind"), p.get("name"))]
    if len(profiling) != 1:
        todo = f"One profiling phase is one level; give the file of each, {PHASES}/NAME/{Path(file.source).name}."
        raise file.fault("input_config.phases[profiling]", todo)
    return dict(profiling[0])


def _telemetry(file: ResultFile) -> list[Mapping[str, Any]]:
    """Return the GPUs that AIPerf watched, each once: two exporters of one machine see the same GPUs."""
    endpoints = file.get("telemetry_data", "endpoints") or {}
    gpus = {}
    for place, endpoint in endpoints.items():
        for name, gpu in (endpoint.get("gpus") or {}).items():
            gpus[gpu.get("gpu_uuid") or (place, name)] = gpu
    return list(gpus.values())


def _counted(gpus: Sequence[Mapping[str, Any]], source: str) -> tuple[Served, tuple[str, ...]]:
    """Count the GPUs that worked: an exporter also shows those of the machine that served nothing."""

    def works(gpu: Mapping[str, Any]) -> bool:
        """Return whether it was used, or its utilization was not collected."""
        metrics = (gpu.get("metrics") or {}).items()  # with the vendor in front of the name since schema 1.5
        used = next((metric for name, metric in metrics if name.endswith("gpu_utilization")), None)
        return used is None or float(used.get("max", used.get("avg") or 0.0)) != 0

    busy = [gpu for gpu in gpus if works(gpu)]
    if not gpus:
        return Served(), ()
    if not busy:
        return Served(), (f"{source}: telemetry shows {count(len(gpus), 'GPU')}, none of which worked.",)
    idle = f"; {len(gpus) - len(busy)} more were idle" if len(busy) < len(gpus) else ""
    note = f"{source}: telemetry shows {count(len(busy), 'GPU')} at work{idle}."
    ranks = 1 if len(busy) == 1 else None  # several GPUs may be one instance or many
    return Served(len(busy), ranks, ranks, "its telemetry", certain=False), (note,)


def _server_info(file: ResultFile) -> Served | None:
    """Return the ranks that a TensorRT-LLM server publishes, from the server metrics beside the result."""
    path = Path(file.source).with_name(SERVER_METRICS)
    try:
        server = ResultFile(json.loads(path.read_text()), str(path), "AIPerf")
    except (OSError, ValueError):
        return None
    if server.get("benchmark_id") != file.get("benchmark_id"):
        return None  # of another run
    series = server.get("metrics", "trtllm_parallel_config_info", "series") or []
    servers = [ResultFile(each.get("labels") or {}, str(path), "AIPerf") for each in series]
    if not servers:
        return None
    ranks = {(each.whole("tensor_parallel_size"), each.whole("pipeline_parallel_size")) for each in servers}
    tp, pp = ranks.pop() if len(ranks) == 1 else (None, None)
    gpus = sum(int(each.number("gpu_count")) for each in servers)
    return Served(gpus, tp, pp, f"trtllm_parallel_config_info in {path}")


def genai_perf(data: Any, source: str) -> Measured:
    """Read `profile_export_genai_perf.json`, with flat or nested `input_config`."""
    file = ResultFile(data, source, "genai-perf")
    config = file.need("input_config")
    stimulus = file.get("input_config", "perf_analyzer", "stimulus") or config
    users, rate = stimulus.get("concurrency"), stimulus.get("request_rate")
    if users is None and rate is None:
        raise file.fault("input_config.concurrency", "The load must be given as a concurrency or a request_rate.")
    model = config.get("model") or config.get("model_names") or ["unknown"]
    requests = file.get("input_config", "request_count")
    mode = file.get("input_config", "perf_analyzer", "measurement", "mode")
    # windows of time begin under load; a number of requests includes the start
    warm = requests == 0 if mode is None else mode not in ("request_count", "count_windows")
    return Measured(
        tool="genai-perf",
        levels=(_level(file, "concurrency" if rate is None else "constant", users, rate, warm=warm),),
        model=str(model if isinstance(model, str) else model[0]),
        engine=ENGINES.get(str(config.get("backend")), config.get("backend")),
        sources=(source,),
        notes=_streamed(file),
    )


def _level(file: ResultFile, arrival: str, users: Any, rate: Any, *, warm: bool) -> MeasuredLevel:
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


def _metric(file: ResultFile, name: str, *, optional: bool = False) -> Distribution:
    """Return a distribution in seconds; empty if an optional one is missing."""
    if optional and file.get(name) is None:
        return Distribution(0)
    return file.distribution((name,), file.seconds(name, "unit"), BY_STATISTIC)


def _streamed(file: ResultFile) -> tuple[str, ...]:
    return tuple(file.notes(streamed=file.get("time_to_first_token") is not None))


def trtllm_bench(data: Any, source: str) -> Measured:
    """Read the report of `trtllm-bench throughput --report_json FILE` (or `latency`)."""
    file = ResultFile(data, source, "trtllm-bench")
    requests = int(file.number("request_info", "num_requests"))
    seconds = file.number("performance", "total_latency_ms") / 1e3
    # issue_rate is ns per request, multiplied by 1e9
    spread = float(file.get("world_info", "issue_rate") or 0.0) * requests / 1e18
    held = spread > CAPPED * seconds
    users = max(round(file.number("request_info", "avg_num_concurrent_requests")), 1) if held else None
    streamed = file.get("streaming_metrics") is not None
    level = MeasuredLevel(
        arrival="closed" if held else "burst",
        concurrency=users,
        request_rate=None,
        isl=file.number("request_info", "avg_input_length"),
        osl=file.number("request_info", "avg_output_length"),
        requests=requests,
        requests_per_s=file.number("performance", "request_throughput_req_s"),
        ttft_s=_bench(file, "streaming_metrics", "ttft_percentiles") if streamed else Distribution(0),
        itl_s=_bench(file, "streaming_metrics", "tpot_percentiles") if streamed else Distribution(0),
        e2e_s=_bench(file, "performance", "request_latency_percentiles_ms"),
        steady=False,
    )
    tp, pp = int(file.number("world_info", "tp_size")), int(file.number("world_info", "pp_size"))
    algo = file.get("engine", "quantization")
    limits = {key: file.get("world_info", key) for key in ("max_batch_size", "max_num_tokens")}
    return Measured(
        tool="trtllm-bench",
        levels=(level,),
        model=str(file.need("engine", "model")),
        # in a report, None means 16 bit
        precision=str(BY_QUANT_ALGO.get(algo, str(algo).lower())) if "quantization" in file.need("engine") else None,
        engine="tensorrt_llm",
        gpu=file.get("machine", "name"),
        served=Served(tp * pp, tp, pp, "its world_info"),
        limits={key: int(value) for key, value in limits.items() if value},
        sources=(source,),
        percentiles="index",
        notes=_bench_notes(held, users, streamed),
        about={
            "version": file.get("engine", "version"),
            "scheduling_policy": file.get("world_info", "scheduling_policy"),
        },
    )


def _bench(file: ResultFile, *at: str) -> Distribution:
    return file.distribution(at, 1e-3, OF_BENCH)


def _bench_notes(held: bool, users: int | None, streamed: bool) -> tuple[str, ...]:
    return (
        "Percentiles of trtllm-bench are sorted[int(n p)], not interpolated.",
        f"The report does not say --concurrency; its requests were held back, {users} in flight on average."
        if held
        else "All requests start at once, so TTFT is mostly time in the queue.",
        *(() if streamed else ("Without --streaming it reports no TTFT and no ITL.",)),
    )
