"""Memory of this machine that compressing needs, and the model itself in float32, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat, calibrates
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.host.machine import Machine, torch_device
from pipelines.plan.targets import Target, has_reference
from pipelines.predict.performance.memory import checkpoint_bytes, weight_bytes
from pipelines.settings.root import Settings
from pipelines.stages import Stage

LINEAR_COPIES = 4
"""Bytes of the largest linear in 16 bit that copying a checkpoint holds at most, as a multiple of them (measured)."""
COPYING_BYTES = GIB / 2
"""What copying holds beside: PyTorch and pieces of the embedding."""
LAYER_COPIES = 7
"""Bytes of a layer in 16 bit that compressing holds at most, as a multiple of them (measured for quantizing)."""


def check(settings: Settings, shape: ModelShape | None, machine: Machine, target: Target) -> list[Fault]:
    """Check host memory of everything before the engine."""
    return _compressing(settings, shape, machine) + _reference(settings, shape, machine, target)


def check_stages(
    settings: Settings, shape: ModelShape | None, machine: Machine, stages: Sequence[Stage]
) -> list[Fault]:
    """Check host memory for stages that run on this machine whether or not the engine is built here."""
    return _compressing(settings, shape, machine) if any(stage.name == "quantize" for stage in stages) else []


def _compressing(settings: Settings, shape: ModelShape | None, machine: Machine) -> list[Fault]:
    """Check host memory of quantizing and sparsifying."""
    if shape is None:
        return []
    faults = []
    if (needed := quantize_memory_bytes(shape, settings)) > machine.memory_bytes:
        faults.append(_too_large(settings, machine, needed, _doing(settings), _held(shape, settings)))
    method = settings.sparsity.method
    if method != "none" and (needed := sparsify_memory_bytes(shape, method)) > machine.memory_bytes:
        faults.append(_too_large(settings, machine, needed, "sparsifying", "one layer at a time"))
    return faults


def _too_large(settings: Settings, machine: Machine, needed: float, doing: str, what: str) -> Fault:
    return Fault(
        f"{settings.model.label} needs about {show_bytes(needed)} of memory while {doing} ({what}; modelled); "
        f"this machine has {show_bytes(machine.memory_bytes)}.",
        todo=f"Use a smaller model, or a machine with more memory for {doing}.",
    )


def _reference(settings: Settings, shape: ModelShape | None, machine: Machine, target: Target) -> list[Fault]:
    """Check the memory of the model in float32, which the engine is compared with."""
    if shape is None or not has_reference(settings, target):
        return []
    needed, where, held = 2 * weight_bytes(shape.unpruned, QFormat.NONE) + 2 * GIB, "this machine", machine.memory_bytes
    if torch_device(machine) == "cuda" and machine.gpus[0].memory_bytes < held:
        where, held = f"one {machine.gpus[0].name}", machine.gpus[0].memory_bytes
    if needed <= held:
        return []
    return [
        Fault(
            f"eval.baseline=hugging_face evaluates {settings.model.label} in float32, which takes about "
            f"{show_bytes(needed)} (modelled); {where} has {show_bytes(held)}.",
            todo="Use eval.baseline=build, or evaluate on a larger machine.",
        )
    ]


def one_layer_bytes(shape: ModelShape) -> float:
    """Return the host memory of compressing layer by layer in bytes: a layer and its copies, and the libraries.

    Modelled on `scripts/measure_streaming.py`; see docs/benchmarks.md for what was measured.
    """
    return LAYER_COPIES * 2 * shape.linear_params / shape.num_hidden_layers + GIB


def quantize_memory_bytes(shape: ModelShape, settings: Settings) -> float:
    """Return the host memory of quantizing in bytes; in one piece, the model is held as a whole, then its copy too."""
    if _copied(settings):
        widest = max(shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.intermediate_size)
        return LINEAR_COPIES * 2.0 * shape.hidden_size * widest + COPYING_BYTES
    if quantized_whole(shape, settings):
        written = checkpoint_bytes(shape, settings.quant.qformat, settings.quant.mean_bits)
        return weight_bytes(shape, QFormat.NONE) + written + 2 * GIB
    return one_layer_bytes(shape)


def quantized_whole(shape: ModelShape, settings: Settings) -> bool:
    """Return whether quantizing holds the whole model: to search a mix, and for a mixture of experts."""
    return settings.quant.mean_bits is not None or shape.num_experts > 1


def quantize_note(shape: ModelShape | None, settings: Settings) -> tuple[str, ...]:
    """Say what memory quantizing needs on this machine."""
    if shape is None:
        return ()
    needed = show_bytes(quantize_memory_bytes(shape, settings))
    return (f"{_doing(settings)} needs about {needed} of memory, {_held(shape, settings)} (modelled)",)


def _copied(settings: Settings) -> bool:
    """Return whether the checkpoint is the model's tensors under other names; the LLM API reads the model itself."""
    return not calibrates(settings.quant.formats, settings.kv_cache.dtype)


def _doing(settings: Settings) -> str:
    return "writing the checkpoint" if _copied(settings) else "quantizing"


def _held(shape: ModelShape, settings: Settings) -> str:
    if _copied(settings):
        return "one tensor at a time"
    return "the whole model" if quantized_whole(shape, settings) else "one layer at a time"


def sparsify_memory_bytes(shape: ModelShape, method: str) -> float:
    """Return the host memory of sparsifying in bytes (modelled).

    SparseGPT also holds a float32 Hessian for each input of the layer's linears, and three copies of the largest.
    """
    if method != "sparsegpt":
        return one_layer_bytes(shape)
    heads = shape.num_attention_heads * shape.head_dim
    squares = [4.0 * width**2 for width in (shape.hidden_size, heads, shape.hidden_size, shape.intermediate_size)]
    return one_layer_bytes(shape) + sum(squares) + 3 * max(squares)
