"""Readers of `vllm bench serve`, SGLang's `bench_serving`, inference-perf and llm-d-benchmark.

Formats: `vllm/benchmarks/serve.py` of vllm-project/vllm (with the keys of `--metadata` and of `vllm bench sweep` that
`vllm/benchmarks/sweep/plot_pareto.py` knows); `python/sglang/benchmark/serving.py` of sgl-project/sglang;
`inference_perf/reportgen/base.py` and `inference_perf/config/loadgen/config.py` of kubernetes-sigs/inference-perf;
`llmdbenchmark/analysis/benchmark_report/schema_v0_2.py` and `schema_v0_2_components.py` of llm-d/llm-d-benchmark (0.2
and 0.2.1), whose figures come from other tools, as `native_to_br0_2.py` converts them.

vLLM and SGLang share their metric names and call the mean of a request, (E2E - TTFT) / (OSL - 1), TPOT; it is this
project's ITL. Their "ITL" pools the gaps between responses of all requests, which is something else and not read.
"""

import math
from contextlib import suppress
from pathlib import Path
from statistics import pstdev
from typing import Any

import yaml

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.predict.performance.measured import (
    KEPT_UP,
    Measured,
    MeasuredLevel,
    ResultFile,
    Served,
    normal_deviation,
)


def vllm(data: Any, source: str) -> Measured:
    """Read a result of `vllm bench serve --save-result`."""
    file = ResultFile(data, source, "vllm bench serve")
    if strategy := file.get("ramp_up_strategy"):
        raise file.unsupported(f"ramp-up {strategy}", "one request rate, or a concurrency")
    total = file.number("num_prompts")
    level, notes = _bench(file, "e2el", total - file.number("completed"), total)
    return Measured(
        tool="vllm bench serve",
        levels=(level,),
        model=str(file.need("model_id")),
        engine="vllm" if file.get("backend") in ("vllm", "vllm-chat") else None,
        served=_metadata(file),
        sources=(source,),
        notes=notes,
        about={"measured_at": file.get("date")},
    )


def sglang(data: Any, source: str) -> Measured:
    """Read one line of the file that `python -m sglang.bench_serving --output-file` writes."""
    file = ResultFile(data, source, "sglang bench_serving")
    level, notes = _bench(file, "e2e_latency")
    return Measured(
        tool="sglang bench_serving",
        levels=(level,),
        model=str(file.get("server_info", "served_model_name") or file.get("server_info", "model_path") or "unknown"),
        engine="sglang" if str(file.need("backend")).startswith("sglang") else None,
        served=_server_info(file),
        sources=(source,),
        notes=notes,
        about={"version": file.get("server_info", "version")},
    )


def _bench(file: ResultFile, e2e: str, lost: float = 0, total: float = 0) -> tuple[MeasuredLevel, tuple[str, ...]]:
    completed = file.finished("completed")
    arrival, users, rate, cv, held = _bench_load(file)
    first, whole = file.number("mean_ttft_ms"), file.get(f"mean_{e2e}_ms")
    if not (prompts := file.number("total_input_tokens")):
        todo = "Measure requests of one turn: those of conversations are not counted."
        raise UserError(f"{file.source} ({file.tool}) has total_input_tokens=0.", todo=todo)
    streamed = first > 0 and first != whole  # 0, or that of the whole response, without streaming
    level = MeasuredLevel(
        arrival=arrival,
        concurrency=users,
        request_rate=rate,
        cv=cv,
        isl=prompts / completed,
        osl=file.number("total_output_tokens") / completed,
        isl_stdev=_deviation(file, "input"),
        osl_stdev=_deviation(file, "output"),
        requests=completed,
        requests_per_s=file.number("request_throughput"),
        ttft_s=_milliseconds(file, "ttft") if streamed else Distribution(0),
        itl_s=_milliseconds(file, "tpot") if streamed else Distribution(0),
        e2e_s=_milliseconds(file, e2e) if whole is not None else Distribution(0),
        steady=False,  # from the first request to the last
    )
    return level, (*file.notes(streamed=streamed, lost=lost, total=total), *held)


def _deviation(file: ResultFile, side: str) -> float:
    """Return the standard deviation of lengths that a file lists, or that SGLang drew; 0 if it says neither.

    SGLang draws from [ratio x length, length], with a ratio of 0 by default. vLLM's file does not state its ratio.
    """
    answers, ratio, longest = (file.get(key) for key in ("output_lens", "random_range_ratio", f"random_{side}_len"))
    if isinstance(answers, list):
        lengths = [file.number(f"{side}_lens", number) for number, answer in enumerate(answers) if answer]
        return pstdev(lengths) if lengths else 0.0
    if not str(file.get("dataset_name")).startswith("random") or ratio is None or longest is None:
        return 0.0
    return file.number(f"random_{side}_len") * (1 - file.number("random_range_ratio")) / math.sqrt(12)


def _bench_load(file: ResultFile) -> tuple[str, int | None, float | None, float, list[str]]:
    """Return arrival, concurrency, rate and coefficient of variation, and a note if the client held requests back."""
    if file.need("request_rate") == "trace":
        raise file.unsupported("trace", "one request rate, or a concurrency")
    rate, users = file.number("request_rate"), file.whole("max_concurrency")
    if math.isinf(rate):
        return ("closed" if users else "burst"), users, None, 1.0, []
    most = file.whole("max_concurrent_requests")
    if users and (most is None or most >= users) and file.number("request_throughput") < KEPT_UP * rate:
        return "closed", users, None, 1.0, [file.held_note(rate, users)]
    burstiness = float(file.get("burstiness") or 1.0)  # shape of the gamma distribution of the gaps
    return ("poisson" if burstiness == 1.0 else "gamma"), None, rate, burstiness**-0.5, []


def _milliseconds(file: ResultFile, name: str) -> Distribution:
    names = {"mean": (f"mean_{name}_ms",), "p50": (f"median_{name}_ms",)}
    names |= {p: (f"{p}_{name}_ms",) for p in ("p90", "p95", "p99")}
    return file.distribution((), 1e-3, names, count=int(file.number("completed")))


def _metadata(file: ResultFile) -> Served:
    """Return the ranks that were given as --metadata, or that a sweep set."""

    def ranks(*names: str) -> int | None:
        spellings = [each for name in names for each in (name, name.replace("_", "-"))]
        return next((count for name in spellings if (count := file.whole(name))), None)

    tp, pp = ranks("tensor_parallel_size", "tp"), ranks("pipeline_parallel_size", "pp")
    if tp is None and pp is None:
        return Served()
    tp, pp, instances = tp or 1, pp or 1, ranks("data_parallel_size", "dp") or 1
    return Served(tp * pp * instances, tp, pp, "its metadata")


def _server_info(file: ResultFile) -> Served:
    """Return the ranks of the server; not known if prompts and tokens have servers of their own."""
    tp = file.whole("server_info", "tp_size")
    if tp is None:
        return Served()
    pp, instances = file.whole("server_info", "pp_size") or 1, file.whole("server_info", "dp_size") or 1
    if file.get("server_info", "enable_dp_attention"):
        instances = 1  # the data-parallel groups share the tensor-parallel ranks
    return Served(tp * pp * instances, tp, pp, "its server_info")


OF_STAGE = {"p50": ("median",)} | {name: (name,) for name in ("mean", "min", "p90", "p95", "p99", "max")}
OF_REPORT = OF_STAGE | {"p50": ("p50",)}
PER_REQUEST = {"aiperf": "inter_token_latency", "guidellm": "inter_token_latency"}
"""Which latency of a report is (E2E - TTFT) / (OSL - 1) of a request; that of other tools: `time_per_output_token`."""
ARRIVALS = {"vllm-benchmark": "poisson", "inferencemax": "poisson"}
"""Arrivals at a request rate, of tools that have only one kind; the others say so in their configuration."""


def inference_perf(data: Any, source: str) -> Measured:
    """Read `stage_N_lifecycle_metrics.json`, and `config.yaml` beside it."""
    file = ResultFile(data, source, "inference-perf")
    beside = None
    with suppress(OSError, yaml.YAMLError):
        beside = yaml.safe_load(Path(source).with_name("config.yaml").read_text())
    config = ResultFile(beside, source, "inference-perf")
    arrival, users, rate, notes = _stage(file, config)
    lost, total = (file.get(*keys) or 0 for keys in (("failures", "count"), ("load_summary", "count")))
    done = file.finished("successes", "count")
    streamed = file.get("successes", "latency", "time_to_first_token") is not None
    prompts = "prompt_len" if file.get("successes", "prompt_len") else "prompt_tokens"
    counted = file.get("successes", "token_count_mismatches")
    if counted and file.get("successes", "output_tokens") is None:  # before 0.6, an event had a begin token of its own
        notes.append(f"{source}: of {counted:,} answers, tool and server count other tokens; OSL and ITL may be off.")
    isl, osl = (_of_stage(file, name, ()) for name in (prompts, "output_len"))
    level = MeasuredLevel(
        arrival=arrival,
        concurrency=users,
        request_rate=rate,
        isl=isl.mean or 0.0,
        osl=osl.mean or 0.0,
        isl_stdev=normal_deviation(isl),
        osl_stdev=normal_deviation(osl),
        requests=done,
        requests_per_s=file.number("successes", "throughput", "requests_per_sec"),
        ttft_s=_of_stage(file, "time_to_first_token") if streamed else Distribution(0),
        itl_s=_of_stage(file, "time_per_output_token") if streamed else Distribution(0),
        e2e_s=_of_stage(file, "request_latency"),
        steady=False,  # from the first request to the last
    )
    return Measured(
        tool="inference-perf",
        levels=(level,),
        model=str(config.get("server", "model_name") or "unknown"),
        engine=config.get("server", "type"),
        sources=(source,),
        notes=(*file.notes(streamed=streamed, lost=lost, total=total), *notes),
    )


def _stage(file: ResultFile, config: ResultFile) -> tuple[str, int | None, float | None, list[str]]:
    """Return arrival, concurrency, rate and notes of a stage."""
    if users := file.whole("load_summary", "concurrency"):
        return "closed", users, None, []
    if file.get("load_summary", "requested_rate") is None:
        raise file.fault("load_summary.requested_rate", "Give the files of the stages, stage_N_lifecycle_metrics.json.")
    kind, notes = config.get("load", "type"), []
    if kind is None:
        kind = "constant"
        notes.append(
            f"{file.source} does not say how requests arrived, and there is no config.yaml beside it: constant."
        )
    if kind not in ("constant", "poisson"):
        raise file.unsupported(kind, "constant, poisson, concurrent")
    requested, sent = file.number("load_summary", "requested_rate"), file.number("load_summary", "achieved_rate")
    if sent < KEPT_UP * requested:
        notes.append(f"{file.source}: {requested:g} requests/s were asked for, {sent:.3g} were sent.")
        return kind, None, sent, notes
    return kind, None, requested, notes


def _of_stage(file: ResultFile, name: str, group: tuple[str, ...] = ("latency",)) -> Distribution:
    count = int(file.number("successes", "count"))
    return file.distribution(("successes", *group, name), 1.0, OF_STAGE, count=count, need=("mean",))


def llm_d(data: Any, source: str) -> Measured:
    """Read a benchmark report of llm-d, version 0.2 or later."""
    file = ResultFile(data, source, "llm-d benchmark report")
    version = str(file.need("version"))
    if not version.startswith("0.2"):
        raise UserError(
            f"{source} is an llm-d benchmark report of version {version}.",
            allowed="Supported: 0.2, 0.2.1.",
            todo="Give the file benchmark_report_v0.2,_... beside it.",
        )
    tool = str(file.need("scenario", "load", "standardized", "tool"))
    stack = [ResultFile(each, source, file.tool) for each in file.get("scenario", "stack") or []]
    engines = [each for each in stack if each.get("standardized", "kind") == "inference_engine"]
    model = next((each.get("standardized", "model", "name") for each in engines), None)
    gpu = next((each.get("standardized", "accelerator", "model") for each in engines), None)
    aggregate = ResultFile(file.need("results", "request_performance", "aggregate"), source, file.tool)
    lost, total = (aggregate.get("requests", key) or 0 for key in ("failures", "total"))
    streamed = aggregate.get("latency", "time_to_first_token") is not None
    return Measured(
        tool=f"llm-d ({tool})",
        levels=(_reported(file, aggregate, tool),),
        model=str(model or "unknown"),
        engine=None,
        gpu=gpu or None,
        served=_stack(engines),
        sources=(source,),
        notes=tuple(file.notes(streamed=streamed, lost=lost, total=total)),
        about={"measured_at": file.get("run", "time", "start")},
    )


def _reported(file: ResultFile, aggregate: ResultFile, tool: str) -> MeasuredLevel:
    arrival, users, rate = _load(file, tool)
    total, lost = aggregate.number("requests", "total"), aggregate.get("requests", "failures") or 0
    done = int(total - lost - (aggregate.get("requests", "incomplete") or 0))
    itl = PER_REQUEST.get(tool, "time_per_output_token")
    return MeasuredLevel(
        arrival=arrival,
        concurrency=users,
        request_rate=rate,
        isl=aggregate.number("requests", "input_length", "mean"),
        osl=aggregate.number("requests", "output_length", "mean"),
        isl_stdev=float(aggregate.get("requests", "input_length", "stddev") or 0.0),
        osl_stdev=float(aggregate.get("requests", "output_length", "stddev") or 0.0),
        requests=done,
        requests_per_s=aggregate.number("throughput", "request_rate", "mean"),
        ttft_s=_of_report(aggregate, "time_to_first_token", done),
        itl_s=_of_report(aggregate, itl, done),
        e2e_s=_of_report(aggregate, "request_latency", done),
        steady=False,
    )


def _of_report(file: ResultFile, name: str, count: int) -> Distribution:
    if file.get("latency", name) is None:
        return Distribution(0)
    scale = file.seconds("latency", name, "units")
    return file.distribution(("latency", name), scale, OF_REPORT, count=count, need=("mean",))


def _load(file: ResultFile, tool: str) -> tuple[str, int | None, float | None]:
    """Return arrival, concurrency and rate; an infinite concurrency is none."""
    at = ("scenario", "load", "standardized")
    users, rate = file.get(*at, "concurrency"), file.get(*at, "rate_qps")
    limited = users is not None and math.isfinite(float(users))
    if rate is None or math.isinf(float(rate)):
        return ("closed" if limited else "burst"), (int(users) if limited else None), None
    kind = ARRIVALS.get(tool) or file.get("scenario", "load", "native", "config", "load", "type")
    if tool == "inference-perf" and limited:
        return "closed", int(users), None
    if kind not in ("constant", "poisson"):
        raise file.fault("scenario.load.native.config.load.type", f"Give the file that {tool} wrote.")
    return kind, None, float(rate)


def _stack(engines: list[ResultFile]) -> Served:
    """Count the GPUs of the stack; not known if a report leaves them out or spreads an instance over pods."""
    total, ranks = 0, set()
    for each in engines:
        at = ("standardized", "accelerator")
        count = each.whole(*at, "count")
        tp, pp, dp, local, workers = (
            each.whole(*at, "parallelism", key) or 1 for key in ("tp", "pp", "dp", "dp_local", "workers")
        )
        if count is None or dp != local or workers > 1:
            return Served()
        total += count * (each.whole("standardized", "replicas") or 1)
        ranks.add((tp, pp))
    tp_, pp_ = ranks.pop() if len(ranks) == 1 else (None, None)
    return Served(total, tp_, pp_, "scenario.stack") if total else Served()
