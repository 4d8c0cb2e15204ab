"""The groups `paths` and `verify`, and where the project itself is."""

from __future__ import annotations

from pathlib import Path

from pipelines.settings.base import Group

PROJECT_ROOT = Path(__file__).resolve().parents[2]


class PathSettings(Group):
    """Where things are kept, relative to the current folder, and where TensorRT-LLM's example scripts are."""

    store: Path
    runs: Path
    trtllm_examples: Path


class VerifySettings(Group):
    """What `verify` looks at."""

    path: Path | None
