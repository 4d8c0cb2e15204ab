"""Settings of the load generator , with changes."""

from pathlib import Path
from typing import Any

from pipelines.loadgen.config import BenchmarkSettings, WorkloadSettings

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "pipelines" / "bundled" / "models" / "tiny_llama"


def workload(**changes: Any) -> WorkloadSettings:
    """Return conf/workload/fixed.yaml with other values."""
    return WorkloadSettings.model_validate({"name": "fixed", "isl": 128, "osl": 64} | changes)


def benchmark(**changes: Any) -> BenchmarkSettings:
    """Return the defaults with other values."""
    return BenchmarkSettings.model_validate(changes)
