"""What is found in a checkpoint, and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from eval.diagnose.result import Finding

AGAIN = "Quantize the model again, and compare the file with the one that was exported."
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
QKV = ("q", "k", "v")
SCALE, SECOND = "weights_scaling_factor", "weights_scaling_factor_2"
PREQUANT, ACTIVATION = "prequant_scaling_factor", "activation_scaling_factor"


@dataclass
class Examined:
    """Everything that was looked at in a checkpoint.

    Attributes:
        findings: what is wrong, in the order of the model.
        tensors: number of tensors compared.
        worst: largest ratio to what is allowed.
        where: its tensor.
    """

    findings: list[Finding] = field(default_factory=list)
    tensors: int = 0
    worst: float = 0.0
    where: str = ""

    def saw(self, name: str, ratio: float) -> None:
        """Count a tensor, and remember the worst."""
        self.tensors += 1
        if ratio > self.worst:
            self.worst, self.where = ratio, name

    def add(self, layer: int | None, tensor: str, figure: str, cause: str) -> None:
        """Add what is wrong."""
        self.findings.append(Finding(layer, tensor, figure, cause, AGAIN))
