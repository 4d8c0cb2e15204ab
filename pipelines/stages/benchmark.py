"""Benchmark: a Triton repository in, measurements under load out. Being a measurement, it is never cached."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.document.show import count
from pipelines.domain.benchmark import LoadPoint
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.host.machine import library_versions
from pipelines.loadgen.config import BenchmarkSettings, WorkloadSettings
from pipelines.serving.config import ServingSettings
from triton_repo.llmapi import BESIDE_THE_ARGUMENTS, CHECKPOINT_DIR, MODEL_YAML, read_arguments
from triton_repo.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from pipelines.serving.process import TritonServer
    from pipelines.serving.trtllm_serve import TrtllmServe


@dataclass(frozen=True)
class Benchmark:
    """Repository and tokenizer (or a server running elsewhere) in, `benchmark.json` and one file per level out.

    Attributes:
        benchmark: loads, window, limits; `url` names a server that is already running.
        serving: how the server is started when there is no `url`.
        labels: model, precision, engine, tp_size, world_size, gpu_count for the result.
        logs: folder for the server's log, which outlives a failure.
        libraries: whose versions are recorded in the result.
        predicted: modelled memory of the engine's process under this load, bytes by part; empty where not modelled.
        visual_tokens: input tokens of a picture; None for a model that sees none.
    """

    workload: WorkloadSettings
    benchmark: BenchmarkSettings
    serving: ServingSettings
    labels: Mapping[str, Any]
    machine: Mapping[str, Any]
    logs: Path
    libraries: tuple[str, ...]
    predicted: Mapping[str, float] = field(default_factory=dict)
    visual_tokens: int | None = None
    needs: tuple[str, ...] = ("tritonclient", "tokenizers")
    name = "benchmark"
    version = "1"
    measures = True
    writes = "benchmark"

    def identity(self) -> dict[str, Any]:
        """Return the load."""
        return {
            "workload": self.workload.model_dump(mode="json"),
            "benchmark": self.benchmark.model_dump(mode="json"),
            **self.labels,
        }

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        mark = "" if facts["complete"] else ", incomplete"
        best = facts["best_output_tokens_per_s"]
        rate = "none counts" if best is None else f"best {best:,.0f} output tokens/s"
        largest = f", largest within the limits {facts['largest_load']}" if facts.get("largest_load") else ""
        return f"{count(facts['levels'], 'load')}, {rate}{largest}{mark}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Start a server unless one is given, apply the load, and record every request."""
        from pipelines.loadgen.run import run_benchmark

        labels = {**self.labels, "machine": dict(self.machine), "versions": library_versions(self.libraries)}
        with self._server(inputs, progress) as (url, metrics_url):
            result = run_benchmark(
                url,
                self.workload,
                self.benchmark.model_copy(update={"url": url} if url.startswith("http") else {}),
                labels=labels,
                tokenizer_dir=inputs["model"],
                out_dir=out_dir,
                metrics_url=metrics_url,
                visual_tokens=self.visual_tokens,
                note=progress.note,
            )
        return {
            "levels": len(result.levels),
            "complete": result.complete,
            "reason": result.reason,
            "best_output_tokens_per_s": best_rate(result.levels),
            "workload": self.workload.name,
            "memory_predicted": dict(self.predicted),
            "memory_observed": _observed(result.levels),
            **({"largest_load": result.search.text} if result.search else {}),
        }

    @contextmanager
    def _server(self, inputs: Mapping[str, Path], progress: Progress) -> Iterator[tuple[str, str | None]]:
        """Yield (url, metrics url) of the server to measure."""
        if self.benchmark.url is not None:
            yield self.benchmark.url, self.benchmark.metrics_url
            return
        if self.serving.server == "trtllm_serve":
            with trtllm_serve(inputs["repository"], self.serving, self.logs, progress) as llm_api:
                yield llm_api.url, None
            return
        with logged_server(inputs["repository"], self.serving, self.logs, progress) as server:
            yield server.grpc_url, server.metrics_url


@contextmanager
def logged_server(repository: Path, serving: ServingSettings, logs: Path, progress: Progress) -> Iterator[TritonServer]:
    """Start a server on a repository, with a log that outlives a failure, and stop it at the end."""
    from pipelines.serving.process import TritonServer

    logs.mkdir(parents=True, exist_ok=True)
    log = _log(logs, "tritonserver")
    with TritonServer(repository, serving.on_free_ports, progress=progress, log_file=log) as server:
        yield server


def trtllm_serve(
    repository: Path, serving: ServingSettings, logs: Path, progress: Progress, *, usual_ports: bool = False
) -> TrtllmServe:
    """Return TensorRT-LLM's own server of a repository of the LLM API; it starts with its `with` block.

    Raises:
        UserError: the repository is another engine's.
    """
    from pipelines.serving.trtllm_serve import TrtllmServe

    path = repository / TENSORRT_LLM / "1" / MODEL_YAML
    if not path.is_file():
        raise UserError(
            f"serving.server=trtllm_serve cannot serve '{repository}': it has no {TENSORRT_LLM}/1/{MODEL_YAML}.",
            allowed="It serves repositories of engine=tensorrt_llm_llmapi.",
            todo="Leave out serving.server, or write such a repository: make repository engine=tensorrt_llm_llmapi",
        )
    options, log = read_arguments(path, BESIDE_THE_ARGUMENTS), _log(logs, "trtllm-serve")
    serving = serving if usual_ports else serving.on_free_ports
    return TrtllmServe(
        repository, CHECKPOINT_DIR, options, serving, progress=progress, log_file=log, usual_ports=usual_ports
    )


def _log(logs: Path, program: str) -> Path:
    return logs / f"{datetime.now():%Y%m%d-%H%M%S}-{program}-{os.getpid()}.log"


def _observed(levels: Sequence[LoadPoint]) -> dict[str, float]:
    """Return the highest gauges of all levels: resident bytes of the engine's process, KV blocks, KV blocks in use."""
    names = {"total": "memory_cpu", "kv_blocks": "kv_cache_block_max", "kv_blocks_used": "kv_cache_block_used"}
    highest = {}
    for ours, gauge in names.items():
        values = [level.server.get("metrics", {}).get(gauge, {}).get("max") for level in levels]
        if measured := [value for value in values if value is not None]:
            highest[ours] = max(measured)
    return highest


def best_rate(levels: Sequence[LoadPoint]) -> float | None:
    """Return the most output tokens/s of the loads that count; None if none does."""
    return max((level.summary.output_tokens_per_s for level in levels if level.counts), default=None)
