"""A served engine for the measurements: its repository in a temporary folder, and tritonserver before it."""

from __future__ import annotations

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
