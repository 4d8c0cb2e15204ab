"""What is found where tensors are compared one by one, and the names of a checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from eval.diagnose.result import Finding, Place, StageResult, StageVerdict

AGAIN = "Quantize the model again, and compare the file with the one that was exported."
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
QKV = ("q", "k", "v")
SCALE, SECOND = "weights_scaling_factor", "weights_scaling_factor_2"
PREQUANT, ACTIVATION = "prequant_scaling_factor", "activation_scaling_factor"


@dataclass
class Examined:
    """Everything that was looked at in a checkpoint or a simulation.

    Attributes:
        findings: what is wrong, in the order of the model.
        tensors: number of tensors compared.
        worst: largest ratio to what is allowed.
        where: its tensor.
        todo: what helps against a difference.
    """

    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    worst: float = 0.0
    where: str = ""
    todo: str = AGAIN

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
        return StageResult(
            stage=stage,
            against=against,
            worst=self.findings[0].figure if self.findings else f"{self.worst:.2g} x allowed",
            noise="1 x",
            verdict=StageVerdict.ACCUSED if self.findings else StageVerdict.CLEAN,
            note="" if self.findings or not self.where else f"worst: {self.where}",
            findings=tuple(self.findings),
        )
