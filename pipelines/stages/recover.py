"""Recover: a compressed model in, the same model trained to answer as the original out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.compress.config import CalibrationSettings, QuantSettings, RecoverSettings
from pipelines.compress.specs import RecoverySpec
from pipelines.document.show import count
from pipelines.domain.formats import FORMATS, rounding_is_known
from pipelines.domain.progress import Progress
from pipelines.stages.quantize import calibration_identity, texts_of

NOT_ITSELF = {"teacher", "processes", "sharding", "lora_rank", "lora_alpha", "lora_targets"}
"""Settings that the stage has in another form, or that are not part of every key."""


@dataclass(frozen=True)
class Recover:
    """Hugging Face folder and text in, Hugging Face folder with trained weights out.

    Attributes:
        calibration: where the text is from.
        sparse: whether the model is 2:4 sparse and stays so.
        quant: what the model is quantized to afterwards.
        device: where it is trained, "cpu" or "cuda".
        processes: that share each batch. Their number decides the order in which gradients are added up, and with it
            the last bits of the weights.
    """

    recover: RecoverSettings
    calibration: CalibrationSettings
    sparse: bool
    quant: QuantSettings
    device: str
    processes: int
    name = "recover"
    version = "2"
    measures = False
    writes = "recovered"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Low-rank training needs peft as well."""
        return ("torch", "transformers", "accelerate", *(("peft",) if self.recover.lora_rank else ()))

    @property
    def needs(self) -> tuple[str, ...]:
        """The same packages."""
        return self.libraries

    @property
    def spec(self) -> RecoverySpec:
        """How to train, and what the written weights are rounded to afterwards."""
        return RecoverySpec(self.recover, self.sparse, self.quant if self._rounded else None, self.processes)

    @property
    def _rounded(self) -> bool:
        return rounding_is_known(self.quant.qformat, self.quant.int4_scales)

    def _rounding_identity(self) -> dict[str, Any] | None:
        """Return what decides how weights are rounded; None if training does not see it."""
        if not self._rounded:
            return None
        weights = FORMATS[self.quant.qformat].weights
        group = weights.group_size(self.quant.group_size)
        return {
            "qformat": self.quant.qformat.value,
            **({"group_size": group} if group else {}),
            **({"dtype": self.quant.dtype} if self.quant.dtype != "auto" else {}),
        }

    def identity(self) -> dict[str, Any]:
        """Return the settings of training, what it keeps and simulates, and how the text is read."""
        text = calibration_identity(self.calibration)
        for name in self.calibration.BATCHING:
            text.pop(name)
        return {
            **self.recover.model_dump(exclude=NOT_ITSELF),
            "precision": self.recover.precision or "float32",  # the value of null
            "lora": self.recover.lora,
            "sparse": self.sparse,
            "rounding": self._rounding_identity(),
            "device": self.device,
            "processes": self.processes,
            **({"sharding": self.recover.sharding} if self.recover.sharding != "none" else {}),
            "text": text,
        }

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"{count(facts['steps'], 'step')}, loss {facts['loss_before']:.3g} -> {facts['loss_after']:.3g}"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Train, and count the zeros of a sparse model in the written files."""
        from pipelines.compress.training_processes import recover

        return recover(
            inputs["model"],
            inputs.get("teacher"),
            out_dir,
            self.spec,
            texts_of(self.calibration, inputs),
            device=self.device,
            progress=progress,
        )
