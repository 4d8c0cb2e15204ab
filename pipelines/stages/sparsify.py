"""Sparsify: a model in, the same model with 2:4 sparse linears out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.compress.config import CalibrationSettings, SparsitySettings
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress
from pipelines.stages.quantize import calibration_identity, check_model, texts_of


@dataclass(frozen=True)
class Sparsify:
    """Hugging Face folder in, Hugging Face folder with two zeros among every four weights out."""

    sparsity: SparsitySettings
    calibration: CalibrationSettings
    device: str
    name = "sparsify"
    version = "1"
    measures = False
    writes = "sparse"
    libraries: tuple[str, ...] = ("nvidia-modelopt", "torch", "transformers")
    needs: tuple[str, ...] = ("modelopt", "torch", "transformers")

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration: SparseGPT does, magnitude does not."""
        return self.sparsity.method == "sparsegpt"

    def identity(self) -> dict[str, Any]:
        """Return the method, and calibration where it is used."""
        used = {"calibration": calibration_identity(self.calibration)} if self.calibrated else {}
        return {"method": self.sparsity.method, "device": self.device, **used}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{facts['linears']} linears 2:4 sparse"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Prune, then verify the pattern on the written weights."""
        from pipelines.compress.sparsifying import sparsify

        check_model(inputs["model"], QFormat.NONE, sparsity=self.sparsity.method)
        return sparsify(
            inputs["model"],
            out_dir,
            self.sparsity,
            texts_of(self.calibration, inputs) if self.calibrated else (),
            self.calibration,
            device=self.device,
            progress=progress,
        )
