"""Result of a diagnosis, as a JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from pipelines.domain.errors import JsonFile
from pipelines.host.screen import table, wrapped


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
    """Verdict on one stage."""

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
    """

    layer: int | None
    tensor: str
    figure: str
    cause: str
    todo: str


@dataclass(frozen=True, slots=True)
class StageResult:
    """Comparison at one stage.

    Attributes:
        against: the stage it was compared with, and what was compared.
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

    @classmethod
    def judged(
        cls, stage: Place, against: str, findings: Sequence[Finding], worst: str, noise: str, note: str = ""
    ) -> Self:
        """Return the verdict that follows from findings; `worst` is the figure if there are none."""
        verdict = StageVerdict.ACCUSED if findings else StageVerdict.CLEAN
        return cls(stage, against, findings[0].figure if findings else worst, noise, verdict, note, tuple(findings))


@dataclass(frozen=True, slots=True)
class StageDiagnosis(JsonFile):
    """Stages of one deployment in order."""

    FILE = "diagnosis.json"
    WHAT = "a diagnosis"
    TODO = "Run again: make diagnose"
    INDENT = 1

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

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values, with the sentence for readers."""
        accused = self.accused
        return {**asdict(self), "accused": accused.stage if accused else None, "sentence": self.sentence()}

    @classmethod
    def from_json(cls, data: Any, source: str = "it") -> Self:
        """Read what `to_json` returned, without what follows from the rest."""
        if isinstance(data, Mapping):
            data = {name: value for name, value in data.items() if name not in ("accused", "sentence")}
        return super(StageDiagnosis, cls).from_json(data, source)


# A diagnosis as text for a terminal.

MOST_FINDINGS = 3
"""Further differences that are listed; all of them are in the artifact."""


def diagnosis_text(result: StageDiagnosis) -> str:
    """Return one row per stage, what was compared, and the outcome in a sentence."""
    rows = [("stage", "worst", "noise", "verdict")]
    rows += [(each.stage, each.worst or "-", each.noise or "-", each.verdict) for each in result.stages]
    lines = [f"{result.model} {result.variant}, {result.items}:", "", *table(rows, text_columns=(1, 2, 3)), ""]
    for each in result.stages:
        if notes := [f"against {each.against}"] * bool(each.against) + [each.note] * bool(each.note):
            lines.append(wrapped(f"{each.stage}: {'; '.join(notes)}", 2))
    lines += ["", wrapped(result.sentence(), 0)]
    if (accused := result.accused) and len(accused.findings) > 1:
        more = accused.findings[1 : MOST_FINDINGS + 1]
        rest = len(accused.findings) - 1 - len(more)
        others = "; ".join(f"{each.tensor} ({each.figure})" for each in more)
        lines.append(wrapped(f"Also: {others}" + (f"; and {rest} more." if rest else "."), 0))
    return "\n".join(lines)


# Findings of tensor-by-tensor comparisons, and the names of a checkpoint's tensors.

AGAIN = "Quantize the model again, and compare the file with the one that was exported."
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
QKV = ("q", "k", "v")
SCALE, SECOND = "weights_scaling_factor", "weights_scaling_factor_2"
PREQUANT, ACTIVATION = "prequant_scaling_factor", "activation_scaling_factor"


@dataclass
class Examined:
    """Everything that was looked at in a checkpoint or a simulation."""

    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    worst: float = 0.0
    where: str = ""
    todo: str = AGAIN
    rounded: bool = False

    def saw(self, name: str, ratio: float) -> None:
        """Count a tensor, and remember the worst."""
        self.tensors += 1
        if ratio > self.worst:
            self.worst, self.where = ratio, name

    def add(self, layer: int | None, tensor: str, figure: str, cause: str) -> None:
        """Add what is wrong."""
        self.findings.append(Finding(layer, tensor, figure, cause, self.todo))

    def result(self, stage: Place, against: str) -> StageResult:
        """Return the verdict on the stage."""
        note = "" if self.findings or not self.where else f"worst: {self.where}"
        return StageResult.judged(stage, against, self.findings, f"{self.worst:.2g} x allowed", "1 x", note)
