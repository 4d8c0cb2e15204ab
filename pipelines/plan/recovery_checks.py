"""What must hold for recovery training, before anything is spent on it."""

from __future__ import annotations

from pipelines.compress.specs import ROUNDED_BITS
from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.description import EngineDescription
from pipelines.predict.performance.memory import weight_bytes
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings

TRAINED_BYTES = 16
"""Of a weight: itself, its gradient and Adam's two moments, each in float32."""
LOGITS_HELD = 6
"""Arrays of the size of a batch's logits, in float32: of student and teacher, their logarithms and gradients."""


def recovery_faults(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, memory_bytes: float
) -> list[Fault]:
    """Return why the training that is asked for cannot be, or would win back nothing."""
    recover, qformat = settings.recover, settings.quant.qformat
    if not recover.trains:
        return []
    asked = f"recover={recover.method}"
    faults = []
    if not engine.writes_engine or settings.speculative.mode in HEADS:
        what = f"engine={engine.name}" if not engine.writes_engine else f"speculative={settings.speculative.mode}"
        faults.append(Fault(f"{asked} does not go with {what}: it takes the model as it is.", todo="Set recover=none."))
    if settings.sparsity.method == "none" and not settings.prune.prunes and qformat not in ROUNDED_BITS:
        faults.append(
            Fault(
                f"{asked} with prune=none, sparsity=none and quant={qformat} has nothing to win back: training sees"
                " what pruning and 2:4 sparsity removed and the rounding of weights, and here is none of it.",
                f"It goes with prune=..., sparsity=..., or with quant={' or quant='.join(ROUNDED_BITS)}.",
                "Set recover=none.",
            )
        )
    if shape is None:
        return faults
    if shape.num_experts > 1:
        faults.append(Fault(f"{asked} does not train a mixture of experts.", todo="Set recover=none."))
    positions = shape.max_position_embeddings
    if recover.seq_len is not None and recover.seq_len > positions:
        faults.append(Fault(f"recover.seq_len={recover.seq_len} is longer than the model's {positions} positions."))
    if (needed := training_memory_bytes(shape, settings)) > memory_bytes:
        faults.append(
            Fault(
                f"{settings.model.label} needs about {show_bytes(needed)} of memory while training (modelled); this"
                f" machine has {show_bytes(memory_bytes)}.",
                todo="Set recover.batch_size=1, take a smaller model, or recover=none.",
            )
        )
    return faults


def recovery_notes(settings: Settings, shape: ModelShape | None) -> tuple[str, ...]:
    """Say what training needs, and what of the compression it does not see."""
    if not settings.recover.trains or shape is None:
        return ()
    needed = show_bytes(training_memory_bytes(shape, settings))
    notes = [f"training needs about {needed} of memory, the whole model (modelled)"]
    qformat = settings.quant.qformat
    if qformat not in (QFormat.NONE, *ROUNDED_BITS):
        notes.append(f"training does not see the rounding of quant={qformat}, only what pruning and sparsity removed")
    return tuple(notes)


def training_memory_bytes(shape: ModelShape, settings: Settings) -> float:
    """Return the host memory of training in bytes: weights, gradients, moments, teacher, logits and activations."""
    recover = settings.recover
    weights = weight_bytes(shape, QFormat.NONE) / 2
    teacher = 2 * weight_bytes(shape.unpruned, QFormat.NONE) if recover.method == "distill" else 0
    tokens = (recover.batch_size or 1) * (recover.seq_len or 1)
    logits = LOGITS_HELD * 4 * tokens * shape.vocab_size
    kept = 1 if recover.gradient_checkpointing else shape.num_hidden_layers
    activations = 4 * tokens * kept * (10 * shape.hidden_size + 4 * shape.intermediate_size)
    return TRAINED_BYTES * weights + teacher + logits + activations + GIB
