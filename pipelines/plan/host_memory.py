"""Memory of this machine that compressing needs, and the model itself in float32, before anything is spent on it."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.plan.deployment import Deployment
from pipelines.predict.performance.memory import checkpoint_bytes, weight_bytes

LINEAR_COPIES = 4
"""Bytes of the largest linear in 16 bit that copying a checkpoint holds at most, as a multiple of them (measured)."""
COPYING_BYTES = GIB / 2
"""What copying holds beside: PyTorch and pieces of the embedding."""
LAYER_COPIES = 7
"""Bytes of a layer in 16 bit that compressing holds at most, as a multiple of them (measured for quantizing)."""


def check(d: Deployment) -> list[Fault]:
    """Check host memory of everything before the engine."""
    return check_compressing(d) + _reference(d)


def check_compressing(d: Deployment) -> list[Fault]:
    """Check host memory of quantizing and sparsifying."""
    if d.shape is None:
        return []
    faults = []
    quantizing = Quantizing.of(d, d.shape)
    if quantizing.bytes > d.machine.memory_bytes:
        faults.append(_too_large(d, quantizing.bytes, quantizing.doing, quantizing.held))
    method = d.settings.sparsity.method
    if method != "none" and (needed := sparsify_memory_bytes(d.shape, method)) > d.machine.memory_bytes:
        faults.append(_too_large(d, needed, "sparsifying", "one layer at a time"))
    return faults


def _too_large(d: Deployment, needed: float, doing: str, what: str) -> Fault:
    return Fault(
        f"{d.settings.model.label} needs about {show_bytes(needed)} of memory while {doing} ({what}; modelled); "
        f"this machine has {show_bytes(d.machine.memory_bytes)}.",
        todo=f"Use a smaller model, or a machine with more memory for {doing}.",
    )


def _reference(d: Deployment) -> list[Fault]:
    """Check the memory of the model in float32, which the engine is compared with."""
    shape, machine = d.shape, d.machine
    if shape is None or not d.has_reference:
        return []
    needed, where, held = 2 * weight_bytes(shape.unpruned, QFormat.NONE) + 2 * GIB, "this machine", machine.memory_bytes
    if d.device == "cuda" and machine.gpus[0].memory_bytes < held:
        where, held = f"one {machine.gpus[0].name}", machine.gpus[0].memory_bytes
    if needed <= held:
        return []
    return [
        Fault(
            f"eval.baseline=hugging_face evaluates {d.settings.model.label} in float32, which takes about "
            f"{show_bytes(needed)} (modelled); {where} has {show_bytes(held)}.",
            todo="Use eval.baseline=build, or evaluate on a larger machine.",
        )
    ]


def one_layer_bytes(shape: ModelShape) -> float:
    """Return the host memory of compressing layer by layer in bytes: a layer and its copies, and the libraries.

    Modelled on `scripts/measure_streaming.py`; see docs/benchmarks.md for what was measured.
    """
    return LAYER_COPIES * 2 * shape.linear_params / shape.num_hidden_layers + GIB


@dataclass(frozen=True, slots=True)
class Quantizing:
    """The host memory of quantizing."""

    bytes: float
    doing: str
    held: str

    @classmethod
    def of(cls, d: Deployment, shape: ModelShape) -> Quantizing:
        """Return what a deployment's model needs: held as a whole to search a mix, and for a mixture of experts."""
        quant = d.settings.quant
        spec = QuantSpec(quant.of(quant.qformat), d.settings.kv_cache.dtype)
        # in 16 bit the checkpoint is the model's tensors under other names; the LLM API reads the model
        if spec.sixteen_bit or (spec.by_tensor and d.engine.writes_engine):
            # of a mixture, up and gate of all experts are one tensor
            inner = shape.intermediate_size * (2 * shape.num_experts if shape.num_experts > 1 else 1)
            widest = max(shape.hidden_size, shape.num_attention_heads * shape.head_dim, inner)
            needed = LINEAR_COPIES * 2.0 * shape.hidden_size * widest + COPYING_BYTES
            return cls(needed, "writing the checkpoint", "one tensor at a time")
        if quant.mean_bits is not None or shape.num_experts > 1:
            written = checkpoint_bytes(shape, quant.qformat, quant.mean_bits)  # beside the model
            return cls(weight_bytes(shape, QFormat.NONE) + written + 2 * GIB, "quantizing", "the whole model")
        return cls(one_layer_bytes(shape), "quantizing", "one layer at a time")

    @property
    def note(self) -> str:
        """The line of the plan."""
        return f"{self.doing} needs about {show_bytes(self.bytes)} of memory, {self.held} (modelled)"


def sparsify_memory_bytes(shape: ModelShape, method: str) -> float:
    """Return the host memory of sparsifying in bytes (modelled).

    SparseGPT also holds a float32 Hessian for each input of the layer's linears, and three copies of the largest.
    """
    if method != "sparsegpt":
        return one_layer_bytes(shape)
    heads = shape.num_attention_heads * shape.head_dim
    squares = [4.0 * width**2 for width in (shape.hidden_size, heads, shape.hidden_size, shape.intermediate_size)]
    return one_layer_bytes(shape) + sum(squares) + 3 * max(squares)
