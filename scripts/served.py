"""A served engine for the measurements, its repository in a temporary folder, and one load on a server."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.serving.config import ServingSettings
from pipelines.serving.process import TritonServer
from triton_repo.config import TritonSettings
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def served(engine: Path, tokenizer: Path, *, openai: bool = False, **spec: Any) -> Iterator[TritonServer]:
    """Serve an engine of OpenVINO without reuse of KV blocks; `spec` are further fields of `RepositorySpec`."""
    described = RepositorySpec("openvino", "measured", "measured", enable_kv_cache_reuse=False, **spec)
    with tempfile.TemporaryDirectory() as folder:
        repository, settings = Path(folder) / "repository", TritonSettings()
        write_repository(
            repository, engine_dir=engine, tokenizer_dir=tokenizer, settings=settings, spec=described, made_from={}
        )
        with TritonServer(repository, ServingSettings(openai=openai)) as server:
            yield server


def loaded(*overrides: str) -> dict[str, Any]:
    """Run `make benchmark` with one load and a store of its own; return the summary of its window."""
    with tempfile.TemporaryDirectory() as place:
        own = f"paths.store={place}/artifacts", f"paths.runs={place}/runs"
        command = [sys.executable, "-m", "pipelines", "benchmark", *overrides, *own]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"The benchmark failed:\n{done.stdout}{done.stderr}")
        (point,) = json.loads(next(Path(place).rglob("benchmark.json")).read_text())["levels"]
    summary: dict[str, Any] = point["summary"]
    if summary["errors"]:
        raise SystemExit(f"Requests failed: {summary['errors']}")
    return summary
