"""Recover: a compressed model in, the same model trained to answer as the original out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compress.specs import ROUNDED_BITS
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress
from pipelines.settings.compression import CalibrationSettings
from pipelines.settings.recovery import RecoverSettings
from pipelines.stages.quantize import calibration_identity, texts_of

if TYPE_CHECKING:
    from pipelines.compress import RecoverySpec


@dataclass(frozen=True)
class Recover:
    """Hugging Face folder and text in, Hugging Face folder with trained weights out.

    Attributes:
        recover: how to train.
        calibration: where the text is from.
        sparse: whether the model is 2:4 sparse and stays so.
        qformat: what the model is quantized to afterwards.
        device: where it is trained, "cpu" or "cuda".
    """

    recover: RecoverSettings
    calibration: CalibrationSettings
    sparse: bool
    qformat: QFormat
    device: str
    name = "recover"
    version = "1"
    measures = False
    libraries: tuple[str, ...] = ("torch", "transformers", "accelerate")
    needs: tuple[str, ...] = ("torch", "transformers", "accelerate")

    @property
    def spec(self) -> RecoverySpec:
        """How to train, as the compressor's record."""
        from pipelines.compress import RecoverySpec

        chosen = self.recover.model_dump(exclude={"teacher", "precision"})
        rounded = self.qformat if self.qformat in ROUNDED_BITS else None
        precision = self.recover.precision or "float32"
        return RecoverySpec(**chosen, precision=precision, sparse=self.sparse, rounded=rounded)

    def identity(self) -> dict[str, Any]:
        """Return the settings of training, what it keeps and simulates, and how the text is read."""
        text = calibration_identity(self.calibration)
        for name in ("size", "seq_len", "batch_size", "seed"):  # of calibration alone
            text.pop(name)
        return {
            **self.recover.model_dump(mode="json", exclude={"teacher"}),
            "precision": self.recover.precision or "float32",
            "sparse": self.sparse,
            "rounded": self.qformat.value if self.qformat in ROUNDED_BITS else None,
            "device": self.device,
            "text": text,
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Train, and count the zeros of a sparse model in the written files."""
        from pipelines.compress import recover

        return recover(
            inputs["model"],
            inputs.get("teacher"),
            out_dir,
            self.spec,
            texts_of(self.calibration, inputs),
            device=self.device,
            progress=progress,
        )
