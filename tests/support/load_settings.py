"""Settings of the load generator from conf/, with changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipelines.settings.load import BenchmarkSettings, WorkloadSettings

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "pipelines" / "bundled" / "models" / "tiny_llama"


def workload(**changes: Any) -> WorkloadSettings:
    """Return conf/workload/fixed.yaml with other values."""
    return WorkloadSettings.model_validate(_conf("workload/fixed") | changes)


def benchmark(**changes: Any) -> BenchmarkSettings:
    """Return conf/benchmark/default.yaml with other values."""
    return BenchmarkSettings.model_validate(_conf("benchmark/default") | changes)


def _conf(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
    return values
