"""Read benchmark results from files: our own, or those of other tools."""

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipelines.domain.benchmark import RESULT, BenchmarkResult, LoadPoint
from pipelines.domain.errors import UserError, yaml_fault
from pipelines.domain.summary import SECOND
from pipelines.engines.registry import runs_on_cpu
from pipelines.host.files import parse_json, sha256_file
from pipelines.loadgen.health import from_stored
from pipelines.predict.performance.measured import (
    Measured,
    MeasuredLevel,
    ResultFile,
    Sent,
    Served,
    guidellm,
    is_guidellm,
    normal_deviation,
)
from pipelines.predict.performance.measured_open import inference_perf, llm_d, sglang, vllm
from pipelines.predict.performance.measured_tools import PHASES, aiperf, genai_perf, is_aiperf, trtllm_bench
from pipelines.store.manifest import MANIFEST, check_files, read_manifest

Reader = Callable[[Any, str], Measured]
READERS: tuple[tuple[Callable[[dict[str, Any]], bool], Reader], ...] = (
    (lambda data: data.keys() >= {"request_info", "performance"}, trtllm_bench),
    (is_aiperf, aiperf),
    (lambda data: isinstance(data.get("input_config"), dict) and "request_throughput" in data, genai_perf),
    (is_guidellm, guidellm),
    (lambda data: data.keys() >= {"load_summary", "successes"}, inference_perf),
    (lambda data: data.keys() >= {"version", "scenario"} and ("results" in data or "metrics" in data), llm_d),
    (lambda data: data.keys() >= {"mean_e2e_latency_ms", "request_throughput", "backend"}, sglang),
    (lambda data: data.keys() >= {"tokenizer_id", "num_prompts", "request_throughput"}, vllm),
)
"""How a tool's file is recognised, and what reads it; the first that fits."""
ELSEWHERE = "unknown"
"""Engine of a result of this project, if the server was not ours."""
LLM_D = "benchmark_report_v0.2*,_*.yaml"
NUMBERS = ("concurrency", "request_rate", "isl", "osl", "isl_stdev", "osl_stdev", "requests", "requests_per_s")
"""Numbers of a level besides its latencies."""
LARGEST = 1e12
LEAST_IN_FLIGHT = 0.5
"""Share of the stated concurrency of a closed loop that must have been in flight."""
LEAST_OF_E2E = 0.67
"""Share of the mean E2E that TTFT and the later tokens must fill: lengths that differ move it, but not to a half."""
NAMES = (
    *(RESULT, "profile_export_aiperf.json", "profile_export_genai_perf.json", "benchmarks.json", "benchmarks.yaml"),
    *("stage_*_lifecycle_metrics.json", "*qps-*.json", "run=*.json", "*_[0-9][0-9][0-9][0-9]_[0-9]*.jsonl", LLM_D),
)
"""Names of files to look for in a folder: those that the tools choose by themselves."""
KINDS = (
    "benchmark.json of this project, AIPerf's profile_export_aiperf.json, genai-perf's profile_export_genai_perf.json, "
    "the --report_json of trtllm-bench, vllm bench serve --save-result, SGLang's bench_serving --output-file, "
    "GuideLLM's benchmarks.json, inference-perf's stage_N_lifecycle_metrics.json and llm-d's benchmark_report_v0.2"
)


def read_measured(paths: Sequence[Path]) -> Measured:
    """Read one or more results of one deployment.

    Args:
        paths: files, or folders that are searched for files of the known names.

    Raises:
        UserError: one is missing, incomplete or not a result of a known tool, or the deployments differ.
    """
    return joined([each for path in paths for file in _files(path.expanduser()) for each in _read(file)])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    results = {
        file
        for name in NAMES
        for file in path.rglob(name)
        if not file.name.endswith((".pytorch.json", ".failure.json"))
    }
    results -= {
        file for file in results if file.parent.parent.name == PHASES and file.parents[2] / file.name in results
    }
    reports = set(path.rglob(LLM_D))  # llm-d keeps the files that they are made from beside them
    if not results:
        raise UserError(
            f"There is no benchmark result in {path}.", allowed=f"Looked for {', '.join(NAMES)}, in subfolders too."
        )
    return sorted(reports or results)


def _read(path: Path) -> list[Measured]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"sizing.measured={path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"sizing.measured={path} is not text: {error}.", allowed=f"Supported: {KINDS}.") from None
    return [_result(data, path) for data in _parsed(text, path)]


def _parsed(text: str, path: Path) -> list[Any]:
    if path.suffix in (".yaml", ".yml"):
        try:
            return [yaml.safe_load(text)]
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            what = f"sizing.measured={path} is not YAML: {yaml_fault(error)}."
            raise UserError(what, allowed=f"Supported: {KINDS}.") from None
    try:
        return [parse_json(text)]
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        with suppress(ValueError):  # vLLM and SGLang append one line per load
            if lines:
                return [parse_json(line) for line in lines]
        raise UserError(f"sizing.measured={path} is not JSON: {error}.", allowed=f"Supported: {KINDS}.") from None


def _result(data: Any, path: Path) -> Measured:
    try:
        measured = None
        if isinstance(data, dict) and data.keys() >= {"schema", "levels"}:
            _refuse_altered(path)
            measured = from_result(BenchmarkResult.from_json(data, str(path)), path)
        elif isinstance(data, dict):
            reader = next((reader for recognises, reader in READERS if recognises(data)), None)
            measured = reader(data, str(path)) if reader else None
        if measured is not None:
            for level in measured.levels:
                _check(level)
            return _used(measured)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"sizing.measured={path} is not as its tool writes it: {str(error)[:200]}.",
            todo="Give the file as the tool wrote it.",
        ) from None
    raise UserError(
        f"sizing.measured={path} is not a benchmark result of a supported tool.", allowed=f"Supported: {KINDS}."
    )


def _used(measured: Measured) -> Measured:
    """Leave out loads whose own figures contradict each other."""
    faults = [(level, _contradiction(level)) for level in measured.levels]
    levels = tuple(level for level, fault in faults if not fault)
    notes = [f"Not used: {level.load}: {fault}." for level, fault in faults if fault]
    if not levels:
        raise UserError(
            f"{', '.join(measured.sources)} has no level that describes the server.",
            allowed=" ".join(notes),
            todo="Measure again, with a current version of the tool.",
        )
    return replace(measured, levels=levels, notes=(*measured.notes, *notes))


def _contradiction(level: MeasuredLevel) -> str:
    """Return what cannot be right in a level, or "".

    In flight (Little's law) there must be as many requests as stated, or half, because a short run begins and ends
    with an emptier server. An ITL that is no mean of a request (gaps between events, as inference-perf counts up to
    0.4) leaves a part of the E2E unexplained.
    """
    e2e, itl = level.e2e_s.mean or 0.0, level.itl_s.mean or 0.0
    tokens = (level.ttft_s.mean or 0.0) + itl * (level.osl - 1)
    if itl and tokens < LEAST_OF_E2E * e2e:
        return f"TTFT and {level.osl - 1:.0f} ITL of {1e3 * itl:.3g} ms are {tokens:.3g} s, not the E2E of {e2e:.3g} s"
    served = level.requests_per_s * (e2e + level.think_s)
    short = level.requests is not None and level.requests < 2 * (level.concurrency or 0)
    if level.concurrency is None or not served or short or served >= LEAST_IN_FLIGHT * level.concurrency:
        return ""
    return (
        f"{level.requests_per_s:.3g} requests/s of {e2e:.3g} s are {served:.2g} in flight, not {level.concurrency}; "
        "the client did not hold the load"
    )


def _check(level: MeasuredLevel) -> None:
    """Refuse a level with a number that nobody can measure; ValueError names it."""
    numbers = {name: getattr(level, name) for name in NUMBERS}
    for name in ("ttft_s", "itl_s", "e2e_s"):
        numbers |= {f"{name}.{key}": value for key, value in asdict(getattr(level, name)).items()}
    for name, value in numbers.items():
        if value is not None and not 0 <= value < LARGEST:
            raise ValueError(f"{name} is {value:g}, which nobody can measure")


def _refuse_altered(path: Path) -> None:
    """Compare a result in its artifact, and the request files beside it, with the artifact's manifest."""
    folder = path.parent
    if path.name != RESULT or not (folder / MANIFEST).is_file():
        return  # a copy of the file alone
    manifest = read_manifest(folder)
    files = {name: entry for name, entry in manifest["files"].items() if (folder / name).is_file()}
    check_files(folder, {**manifest, "files": files}, sha256_file)


def joined(parts: list[Measured]) -> Measured:
    """Join the levels of several files of one deployment."""
    first = parts[0]
    for other in parts[1:]:
        for what, here in _deployment(first).items():
            if here != (there := _deployment(other)[what]):
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


def _deployment(measured: Measured) -> Mapping[str, Any]:
    """Return the common facts of files of one deployment."""
    served = measured.served
    names = ("tool", "model", "precision", "engine", "gpu")
    return {name: getattr(measured, name) for name in names} | {
        "number of GPUs": served.gpus, "tp": served.tp, "pp": served.pp
    }  # fmt: skip


def from_result(result: BenchmarkResult, path: Path) -> Measured:
    """Read a result of this project.

    Args:
        result: contents of `path`.
        path: file of the result, with the request files beside it; missing ones are left out.

    Raises:
        UserError: no level describes the server.
    """
    pairs = [(level, measured_level(result, level, path.parent)) for level in result.levels if level.counts]
    levels = [level for level, measured in pairs if measured is not None]
    notes = [f"Not used: {level.load}, {_why_not(level)}." for level in result.levels if not level.counts]
    if not levels:
        raise UserError(
            f"{path} has no level that describes the server.",
            allowed=" ".join(notes),
            todo="Measure again: make benchmark",
        )
    for level in levels:
        lost, done, file = sum(level.summary.errors.values()), level.summary.e2e_s.count, f"{path}, {level.load}"
        notes += ResultFile(None, file, "").notes(streamed=True, lost=lost, total=lost + done)
    blocks = [level.server.get("metrics", {}).get("kv_cache_block_max", {}).get("max") for level in levels]
    gpus = result.machine.get("gpus") or [{}]
    elsewhere = result.engine == ELSEWHERE  # and then `machine` is only that of the client
    served = Served()  # 1 GPU of a remote server may also mean that benchmark.tp_size is unset
    if not elsewhere or result.world_size > 1:
        stated = "its benchmark.tp_size" if elsewhere else "its engine"
        served = Served(result.gpus, result.tp_size, result.world_size // result.tp_size, stated)
    return Measured(
        tool="trtllm-pipelines",
        levels=tuple(measured for _, measured in pairs if measured is not None),
        model=result.model,
        precision=result.precision,
        engine=result.engine,
        gpu=None if elsewhere or runs_on_cpu(result.engine) else gpus[0].get("name"),
        served=served,
        limits={"kv_blocks": int(counts[0])} if (counts := [value for value in blocks if value]) else {},
        sources=(str(path),),
        notes=tuple(notes),
        about={
            "measured_at": result.measured_at,
            "versions": dict(result.versions),
            "machine": {} if elsewhere else dict(result.machine),
            "images": result.workload.get("images", 0),
        },
    )


def measured_level(result: BenchmarkResult, level: LoadPoint, folder: Path) -> MeasuredLevel | None:
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
        isl_stdev=normal_deviation(summary.isl),
        osl_stdev=normal_deviation(summary.osl),
        requests=summary.requests,
        requests_per_s=summary.requests_per_s,
        ttft_s=summary.ttft_s,
        itl_s=summary.itl_s,
        e2e_s=summary.e2e_s,
        steady=result.protocol.get("window") == "steady" and level.arrival not in ("burst", "trace"),
        cv=float(result.workload.get("cv", 1.0)),
        think_s=float(result.workload.get("think_time_s", 0.0)),
        sent=_sent(folder / level.requests_file),
    )


def _sent(path: Path) -> Sent | None:
    """Return the requests of a level in the order they were due; None if they were not kept with the result."""
    try:
        with gzip.open(path, "rt") as file:
            data = parse_json(file.read())
        requests, (start, end) = from_stored(data), data["window_ns"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        return None
    order = np.argsort(requests.due, kind="stable")
    order = order[requests.fine()[order]]
    due, isl, osl, window = requests.due, requests.isl, np.maximum(requests.osl, 1), (start / SECOND, end / SECOND)
    if not len(order) or np.isnan(requests.first_token[order]).any():
        return Sent(due[order] / SECOND, isl[order], osl[order], window)
    times = (latency[order] / SECOND for latency in (requests.ttft(), requests.itl()))
    return Sent(due[order] / SECOND, isl[order], osl[order], window, *times)


def _why_not(level: LoadPoint) -> str:
    if not level.complete:
        return f"cut short ({level.reason})" if level.reason else "cut short"
    if not level.summary.requests:
        return "where no request finished"
    served = f"{level.summary.requests_per_s:.3g} requests/s are a lower bound"
    return f"where the load generator was the limit ({level.client.reason}): {served}"
