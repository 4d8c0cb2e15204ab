"""Stages: each knows its inputs and outputs, and nothing about other stages, the store or Hydra."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipelines.domain.progress import Progress


class Stage(Protocol):
    """One step from input folders to an output folder."""

    @property
    def name(self) -> str:
        """Verb; also the folder of its artifacts in the store."""

    @property
    def version(self) -> str:
        """Raised when the same inputs should produce different bytes."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose version determines the bytes."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages that must be importable when the stage runs."""

    @property
    def measures(self) -> bool:
        """Whether it measures; then it runs every time, and finished results are kept whatever stops it."""

    @property
    def writes(self) -> str:
        """What its output is, in names of folders and in the last lines of a run."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the bytes, and no others, as JSON."""

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Read `inputs`, fill `out_dir`, and return facts for the manifest as JSON."""

    def headline(self, facts: Mapping[str, Any]) -> str:
        """Show the one number that matters most of what `run` returned."""
