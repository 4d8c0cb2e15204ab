"""Prune: a model in, a smaller one out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.compress.config import CalibrationSettings, PruningSettings
from pipelines.domain.progress import Progress
from pipelines.stages.quantize import calibration_identity, texts_of


@dataclass(frozen=True)
class PruneModel:
    """Hugging Face folder and text in, Hugging Face folder with fewer channels, heads or layers out."""

    pruning: PruningSettings
    calibration: CalibrationSettings
    device: str
    name = "prune_model"
    version = "1"
    measures = False
    writes = "pruned"
    libraries: tuple[str, ...] = ("torch", "transformers")
    needs: tuple[str, ...] = ("torch", "transformers")

    def identity(self) -> dict[str, Any]:
        """Return the sizes, and which tokens importance is observed on."""
        text = calibration_identity(self.calibration) | {"size": self.pruning.texts}
        return {"method": self.pruning.method, **self.pruning.sizes, "device": self.device, "calibration": text}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{facts['parameters_before']:,} -> {facts['parameters_after']:,} parameters"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Judge, remove, and count the parameters in the written files."""
        from pipelines.compress.pruning import prune_model

        return prune_model(
            inputs["model"],
            out_dir,
            self.pruning,
            texts_of(self.calibration, inputs),
            self.calibration,
            device=self.device,
            progress=progress,
        )
