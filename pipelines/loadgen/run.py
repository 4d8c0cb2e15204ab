"""The entry: measure one server under every level of load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.domain.benchmark import BenchmarkResult
from pipelines.loadgen.settings import BenchmarkSettings, WorkloadSettings


@dataclass(frozen=True, slots=True)
class Target:
    """The server to measure.

    Attributes:
        url: host:port of its gRPC.
        model_name: model to ask, e.g. "ensemble".
        metrics_url: its Prometheus page, None when there is none.
    """

    url: str
    model_name: str
    metrics_url: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What the server is, as the caller knows it; copied into the result.

    Attributes:
        model: label of the model.
        precision: compression in one word.
        engine: what executes it.
        tp_size: tensor parallel ranks.
        world_size: tp x pp.
        machine: where client and server run.
        versions: of libraries and servers.
    """

    model: str
    precision: str
    engine: str = "unknown"
    tp_size: int = 1
    world_size: int = 1
    machine: Mapping[str, Any] | None = None
    versions: Mapping[str, str] | None = None


def run_benchmark(
    target: Target,
    workload: WorkloadSettings,
    settings: BenchmarkSettings,
    *,
    tokenizer_dir: Path,
    identity: Identity,
    out_dir: Path,
) -> BenchmarkResult:
    """Measure every level and write `benchmark.json` and `requests-<n>.json.gz` into `out_dir` as each finishes.

    Args:
        target: the server.
        workload: what is asked.
        settings: how it is measured.
        tokenizer_dir: folder with the model's tokenizer.json.
        identity: what the server is.
        out_dir: an existing folder.

    Returns:
        the result; `complete` is False when it was interrupted (Ctrl-C) or the server died, and holds all until then.

    Raises:
        UserError: contradicting settings, no server, unknown model, a model without the interface, no tokenizer.
    """
    raise NotImplementedError
