"""Result of a diagnosis, as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipelines.domain.typed import read_record

if TYPE_CHECKING:
    from pathlib import Path

RESULT = "diagnosis.json"


class Place(StrEnum):
    """The stages of a deployment, in the order in which a model passes through them."""

    ORIGINAL = "hugging_face"
    MODELOPT = "modelopt"
    CHECKPOINT = "checkpoint"
    CPU_ENGINE = "cpu_engine"
    GPU_ENGINE = "tensorrt_llm"
    TRITON = "triton"
    OPENAI = "openai"


class StageVerdict(StrEnum):
    """What was found out about a stage."""

    CLEAN = "clean"
    ACCUSED = "accused"
    AFTER = "not judged"
    """It comes after the accused one."""
    REFERENCE = "reference"
    NOT_RUN = "not run here"


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where a stage differs from the one before it by more than the noise.

    Attributes:
        layer: decoder layer; None for what belongs to no layer.
        tensor: tensor, entry of a configuration or setting.
        figure: how far it differs, in words with the unit.
        cause: probable cause, the end of a sentence: "the scales of fc and gate are exchanged".
        todo: what to do.
    """

    layer: int | None
    tensor: str
    figure: str
    cause: str
    todo: str


@dataclass(frozen=True, slots=True)
class StageResult:
    """What was compared at one stage.

    Attributes:
        stage: where.
        against: the stage it was compared with, and what was compared.
        worst: the worst figure.
        noise: what the figure may be without a fault.
        verdict: what follows.
        note: why nothing was compared, or what else the reader must know; empty for nothing.
        findings: differences beyond the noise, the probable origin first.
    """

    stage: str
    against: str
    worst: str
    noise: str
    verdict: str
    note: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class StageDiagnosis:
    """Stages of one deployment in order.

    Attributes:
        model: label of the model.
        variant: its compression.
        items: what went through the stages, in words.
        stages: results in the order of the stages.
    """

    model: str
    variant: str
    items: str
    stages: tuple[StageResult, ...]

    @property
    def accused(self) -> StageResult | None:
        """The first stage that differs; None if none does."""
        return next((each for each in self.stages if each.verdict == StageVerdict.ACCUSED), None)

    def sentence(self) -> str:
        """Return the outcome in a sentence or two."""
        stage = self.accused
        if stage is None:
            judged = ", ".join(each.stage for each in self.stages if each.verdict == StageVerdict.CLEAN)
            return f"No stage is accused: {judged or 'none'} answered within the noise."
        first = stage.findings[0]
        where = f"layer {first.layer}, " if first.layer is not None else ""
        return f"The first stage beyond the noise is {stage.stage}: {where}{first.tensor}: {first.cause}. {first.todo}"

    def save(self, path: Path) -> None:
        """Write the result as JSON, with the sentence for readers."""
        found = {**asdict(self), "accused": self.accused.stage if self.accused else None, "sentence": self.sentence()}
        path.write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, data: Any, source: str) -> StageDiagnosis:
        """Read what `save` wrote.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        if isinstance(data, Mapping):
            data = {name: value for name, value in data.items() if name not in ("accused", "sentence")}
        return read_record(cls, data, source, what="a diagnosis", todo="Run again: make diagnose")
