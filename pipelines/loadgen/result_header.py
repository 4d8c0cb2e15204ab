"""The header of a result: what was measured, where and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipelines.domain.benchmark import BenchmarkResult
from pipelines.domain.summary import CONVENTIONS
from pipelines.host.machine import library_versions
from pipelines.loadgen.interface import Interface
from pipelines.loadgen.plan import is_whole
from pipelines.loadgen.server import Server
from pipelines.settings.load import AUTO_PER_USER, AUTO_REQUESTS, AUTO_SECONDS, BenchmarkSettings, WorkloadSettings


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Identity of the server as the caller knows it; copied into the result.

    Attributes:
        model: label of the model.
        precision: compression as one word.
        engine: that executes it.
        tp_size: tensor parallel ranks.
        world_size: tp x pp.
        gpu_count: GPUs of all instances together; None is those of one.
        machine: where client and server run.
        versions: of libraries and servers.
    """

    model: str
    precision: str
    engine: str = "unknown"
    tp_size: int = 1
    world_size: int = 1
    gpu_count: int | None = None
    machine: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None


def empty_result(
    server: Server,
    interface: Interface,
    workload: WorkloadSettings,
    settings: BenchmarkSettings,
    identity: ServerIdentity,
) -> BenchmarkResult:
    """Return the result before anything is measured."""
    return BenchmarkResult(
        model=identity.model,
        precision=identity.precision,
        engine=identity.engine,
        tp_size=identity.tp_size,
        world_size=identity.world_size,
        gpu_count=identity.gpu_count,
        workload=workload.model_dump(mode="json"),
        protocol=protocol(interface, workload, settings),
        server=server.facts(interface.model_name),
        machine=dict(identity.machine or {}),
        versions={**library_versions(("tritonclient", "grpcio", "uvloop", "tokenizers")), **(identity.versions or {})},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        slo=settings.slo.to_slo(),
        levels=(),
    )


def protocol(interface: Interface, workload: WorkloadSettings, settings: BenchmarkSettings) -> dict[str, Any]:
    """Describe how it was measured, as far as the numbers depend on it."""
    whole = is_whole(workload, settings)
    keys = ("streaming", "warmup_s", "warmup_requests", "num_requests", "min_requests", "timeout_s")
    exact = f"{interface.stop_input} forbids to stop before" if interface.stop_input else "the model may stop before"
    return {
        **{key: getattr(settings, key) for key in keys},
        **_duration(settings),
        "window": "whole" if whole else "steady",
        "start_burst_in_window": workload.arrival == "closed" and (whole or not _warms(settings)),
        "after_error": "a user pauses 0.2 s",
        "after_window": "nobody sends; what is under way is followed to its end",
        "osl": exact if workload.ignore_eos else "the model may stop before",
        "osl_counted_by": "server" if interface.counts_output else "responses with text",
        "isl_counted_by": "server" if interface.counts_input else "tokenizer",
        "special_tokens_in_isl": interface.add_special_tokens,
        "streams": "one request at a time on each of several long-lived gRPC streams",
        "conventions": CONVENTIONS,
    }


def _duration(settings: BenchmarkSettings) -> dict[str, Any]:
    """Return the length of a window; of one that may end early with enough requests, the shortest and the longest."""
    if settings.duration_s != "auto":
        return {"duration_s": settings.duration_s}
    least, most = AUTO_SECONDS
    return {
        "duration_s": least,
        "most_duration_s": most,
        "enough_requests": AUTO_REQUESTS,
        "enough_per_user": AUTO_PER_USER,
    }


def _warms(settings: BenchmarkSettings) -> bool:
    """Return whether users are already sending before a steady window begins."""
    return bool(settings.warmup_s or settings.warmup_requests)
