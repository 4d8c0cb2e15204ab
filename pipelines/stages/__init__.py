"""Stages: each knows its inputs and outputs, and nothing about other stages, the store or Hydra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipelines.domain.progress import Progress


class Stage(Protocol):
    """One step from input folders to an output folder.

    Attributes:
        name: verb; also the folder of its artifacts in the store.
        version: raised when the same inputs should produce different bytes.
        libraries: distributions whose version determines the bytes.
        needs: packages that must be importable when the stage runs.
        measures: whether it measures; then it runs every time, and finished results are kept whatever stops it.
        writes: what its output is, in names of folders and in the last lines of a run.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def version(self) -> str:
        """See the class."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """See the class."""

    @property
    def needs(self) -> tuple[str, ...]:
        """See the class."""

    @property
    def measures(self) -> bool:
        """See the class."""

    @property
    def writes(self) -> str:
        """See the class."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the bytes, and no others, as JSON."""

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Read `inputs`, fill `out_dir`, and return facts for the manifest as JSON."""

    def headline(self, facts: Mapping[str, Any]) -> str:
        """Show the one number that matters most of what `run` returned."""
