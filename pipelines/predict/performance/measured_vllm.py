"""Readers of `vllm bench serve` and of SGLang's `bench_serving`, which share their metric names.

Formats: `vllm/benchmarks/serve.py` of vllm-project/vllm (with the keys of `--metadata` and of `vllm bench sweep` that
`vllm/benchmarks/sweep/plot_pareto.py` knows) and `python/sglang/benchmark/serving.py` of sgl-project/sglang.

Both call the mean of a request, (E2E - TTFT) / (OSL - 1), TPOT; it is this project's ITL. Their "ITL" pools the gaps
between responses of all requests, which is something else and not read.
"""

from __future__ import annotations

import math
from typing import Any

from pipelines.domain.benchmark import Distribution
from pipelines.predict.performance.measured import KEPT_UP, Measured, MeasuredLevel, ResultFile, Served


def is_sglang(data: dict[str, Any]) -> bool:
    """Return whether SGLang wrote this line."""
    return "mean_e2e_latency_ms" in data and "request_throughput" in data and "backend" in data


def is_vllm(data: dict[str, Any]) -> bool:
    """Return whether vLLM wrote this result."""
    return "endpoint_type" in data and "num_prompts" in data and "request_throughput" in data


def vllm(data: Any, source: str) -> Measured:
    """Read a result of `vllm bench serve --save-result`.

    Raises:
        UserError: a required key is missing, or the load cannot be compared.
    """
    file = ResultFile(data, source, "vllm bench serve")
    if strategy := file.get("ramp_up_strategy"):
        raise file.unsupported(f"ramp-up {strategy}", "one request rate, or a concurrency")
    asked, completed = file.number("num_prompts"), file.number("completed")
    return Measured(
        tool="vllm bench serve",
        levels=(_level(file, "e2el"),),
        model=str(file.need("model_id")),
        engine="vllm" if file.get("backend") in ("vllm", "vllm-chat") else None,
        served=_metadata(file),
        sources=(source,),
        notes=_notes(file, "e2el", asked - completed, asked),
        about={"measured_at": file.get("date")},
    )


def sglang(data: Any, source: str) -> Measured:
    """Read one line of the file that `python -m sglang.bench_serving --output-file` writes.

    Raises:
        UserError: a required key is missing, or the load cannot be compared.
    """
    file = ResultFile(data, source, "sglang bench_serving")
    return Measured(
        tool="sglang bench_serving",
        levels=(_level(file, "e2e_latency"),),
        model=str(file.get("server_info", "served_model_name") or file.get("server_info", "model_path") or "unknown"),
        engine="sglang" if str(file.need("backend")).startswith("sglang") else None,
        served=_server_info(file),
        sources=(source,),
        notes=_notes(file, "e2e_latency"),
        about={"version": file.get("server_info", "version")},
    )


def _level(file: ResultFile, e2e: str) -> MeasuredLevel:
    completed = file.finished("completed")
    arrival, users, rate, cv = _load(file)
    streamed = _streamed(file, e2e)
    return MeasuredLevel(
        arrival=arrival,
        concurrency=users,
        request_rate=rate,
        cv=cv,
        isl=file.number("total_input_tokens") / completed,
        osl=file.number("total_output_tokens") / completed,
        requests=completed,
        requests_per_s=file.number("request_throughput"),
        ttft_s=_milliseconds(file, "ttft") if streamed else Distribution(0),
        itl_s=_milliseconds(file, "tpot") if streamed else Distribution(0),
        e2e_s=_milliseconds(file, e2e) if file.get(f"mean_{e2e}_ms") is not None else Distribution(0),
        steady=False,  # from the first request to the last
    )


def _load(file: ResultFile) -> tuple[str, int | None, float | None, float]:
    """Return arrival, concurrency, rate and coefficient of variation."""
    if file.need("request_rate") == "trace":
        raise file.unsupported("trace", "one request rate, or a concurrency")
    rate, users = file.number("request_rate"), file.whole("max_concurrency")
    if math.isinf(rate):
        return ("closed" if users else "burst"), users, None, 1.0
    if users and _held_back(file, rate, users):
        return "closed", users, None, 1.0
    burstiness = float(file.get("burstiness") or 1.0)  # shape of the gamma distribution of the gaps
    return ("poisson" if burstiness == 1.0 else "gamma"), None, rate, burstiness**-0.5


def _held_back(file: ResultFile, rate: float, users: int) -> bool:
    """Return whether requests waited in the client, because as many as allowed were running."""
    most = file.whole("max_concurrent_requests")
    return (most is None or most >= users) and file.number("request_throughput") < KEPT_UP * rate


def _streamed(file: ResultFile, e2e: str) -> bool:
    first, whole = file.number("mean_ttft_ms"), file.get(f"mean_{e2e}_ms")
    return first > 0 and first != whole  # 0, or that of the whole response, without streaming


def _milliseconds(file: ResultFile, name: str) -> Distribution:
    names = {"mean": (f"mean_{name}_ms",), "p50": (f"median_{name}_ms",)}
    names |= {p: (f"{p}_{name}_ms",) for p in ("p90", "p95", "p99")}
    return file.distribution((), 1e-3, names, count=int(file.number("completed")))


def _notes(file: ResultFile, e2e: str, lost: float = 0, asked: float = 0) -> tuple[str, ...]:
    notes = file.notes(streamed=_streamed(file, e2e), lost=lost, total=asked)
    rate, users = file.number("request_rate"), file.whole("max_concurrency")
    if users and not math.isinf(rate) and _held_back(file, rate, users):
        notes.append(file.held_note(rate, users))
    return tuple(notes)


def _metadata(file: ResultFile) -> Served:
    """Return the ranks that were given as --metadata, or that a sweep set."""

    def ranks(*names: str) -> int | None:
        spellings = [each for name in names for each in (name, name.replace("_", "-"))]
        return next((found for name in spellings if (found := file.whole(name))), None)

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
