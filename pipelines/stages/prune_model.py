"""Prune: a model in, a smaller one out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compress.config import CalibrationSettings, PruningSettings
from pipelines.domain.progress import Progress
from pipelines.stages.quantize import calibration_identity, calibration_of, texts_of

if TYPE_CHECKING:
    from pipelines.compress import PruningSpec


@dataclass(frozen=True)
class PruneModel:
    """Hugging Face folder and text in, Hugging Face folder with fewer channels, heads or layers out."""

    pruning: PruningSettings
    calibration: CalibrationSettings
    device: str
    name = "prune_model"
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ("torch", "transformers")
    needs: tuple[str, ...] = ("torch", "transformers")

    def identity(self) -> dict[str, Any]:
        """Return the sizes, and which tokens importance is observed on."""
        text = calibration_identity(self.calibration) | {"size": self.pruning.texts}
        return {"method": self.pruning.method, **self.pruning.sizes, "device": self.device, "calibration": text}

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Judge, remove, and count the parameters in the written files."""
        from pipelines.compress import prune_model

        assert self.pruning.texts is not None, "checked by the settings"
        return prune_model(
            inputs["model"],
            out_dir,
            pruning_spec(self.pruning),
            texts_of(self.calibration, inputs),
            replace(calibration_of(self.calibration), size=self.pruning.texts),
            device=self.device,
            progress=progress,
        )


def pruning_spec(pruning: PruningSettings) -> PruningSpec:
    """Convert the settings to the compressor's record."""
    from pipelines.compress import PruningSpec

    assert pruning.method != "none", "the plan has no such stage then"
    return PruningSpec(pruning.method, **pruning.sizes)
