"""Prune, sparsify, recover: a model in, one with fewer, sparse or trained weights out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.compress.config import (
    CalibrationSettings,
    PruningSettings,
    QuantSettings,
    RecoverSettings,
    SparsitySettings,
)
from pipelines.compress.specs import RecoverySpec
from pipelines.document.show import count
from pipelines.domain.formats import FORMATS, QFormat, rounding_is_known
from pipelines.domain.progress import Progress
from pipelines.stages.quantize import calibration_identity, check_model, reading_identity, texts_of


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
    version = "3"
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
        return {
            **self.recover.model_dump(exclude=NOT_ITSELF),
            "precision": self.recover.precision or "float32",  # the value of null
            "lora": self.recover.lora,
            "sparse": self.sparse,
            "rounding": self._rounding_identity(),
            "device": self.device,
            "processes": self.processes,
            **({"sharding": self.recover.sharding} if self.recover.sharding != "none" else {}),
            "text": reading_identity(self.calibration),
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
