"""Stages: short files that know their inputs and outputs, and nothing of each other, the store or Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipelines.domain.progress import Progress


class Stage(Protocol):
    """One step from input folders to an output folder.

    Attributes:
        name: verb; also the folder of its artifacts in the store.
        version: raised when the same inputs should give other bytes.
        libraries: distributions whose version decides the bytes.
        needs: packages that must be importable when it runs.
        measures: it measures, so it runs every time and what it finished is kept whatever stops it.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def version(self) -> str:
        """See the class."""
        ...

    @property
    def libraries(self) -> tuple[str, ...]:
        """See the class."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """See the class."""
        ...

    @property
    def measures(self) -> bool:
        """See the class."""
        ...

    def identity(self) -> dict[str, Any]:
        """The settings that decide the bytes, as JSON; nothing else."""
        ...

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Do the work: read `inputs`, fill `out_dir`, return facts for the manifest (JSON)."""
        ...
