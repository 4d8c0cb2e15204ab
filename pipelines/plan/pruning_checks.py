"""What must hold for pruning, before anything is spent on it."""

from __future__ import annotations

from math import lcm

from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.registry import EngineDescription
from pipelines.plan.host_memory import one_layer_bytes
from pipelines.predict.performance.memory import weight_bytes
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings

LOGITS_HELD = 4
"""Arrays of the size of a batch's logits that the loss holds, in float32."""


def pruning_faults(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, memory_bytes: float
) -> list[Fault]:
    """Return why the pruning that is asked for cannot be; sizes alone are checked where the shape is made."""
    pruning = settings.prune
    if not pruning.prunes:
        return []
    asked, faults = f"prune={pruning.method}", []
    if not engine.writes_engine or settings.speculative.mode in HEADS:
        what = f"engine={engine.name}" if not engine.writes_engine else f"speculative={settings.speculative.mode}"
        faults.append(
            Fault(f"{asked} does not go with {what}, which takes the model as it is.", todo="Set prune=none.")
        )
    if settings.lora.adapters:
        faults.append(
            Fault(
                f"{asked} does not go with lora.adapters, which were trained for the sizes of the whole model.",
                todo="Set prune=none, or leave lora out.",
            )
        )
    if settings.fidelity.by_layer:
        faults.append(
            Fault(
                f"{asked} does not go with fidelity.by_layer=true: layers of different sizes cannot be compared.",
                todo="Leave fidelity.by_layer out.",
            )
        )
    if shape is None or shape.pruned_from is None:
        return faults
    faults += _divided(settings, shape)
    if (needed := pruning_memory_bytes(shape.unpruned, settings)) > memory_bytes:
        faults.append(
            Fault(
                f"{settings.model.label} needs about {show_bytes(needed)} of memory while pruning (modelled); this"
                f" machine has {show_bytes(memory_bytes)}.",
                todo="Set prune=width, which holds one layer at a time, or take a smaller model.",
            )
        )
    return faults


def _divided(settings: Settings, shape: ModelShape) -> list[Fault]:
    """Name the numbers of MLP channels that ranks and groups divide, where the model's own is one of them."""
    size, has = settings.prune.mlp, shape.unpruned.intermediate_size
    group = max((FORMATS[each].weights.group_size(settings.quant.group_size) or 1) for each in settings.quant.formats)
    sparse = {"none": 1, "magnitude": 16, "sparsegpt": 4}[settings.sparsity.method]
    multiple = settings.build.tp_size * lcm(group, sparse)
    if size is None or size % multiple == 0 or has % multiple:
        return []
    works = [near for near in (size // multiple * multiple, (size // multiple + 1) * multiple) if 0 < near < has]
    return [
        Fault(
            f"prune.mlp={size} does not go with build.tp_size={settings.build.tp_size},"
            f" quant={settings.quant.qformat} and sparsity={settings.sparsity.method}: it is not a"
            f" multiple of {multiple}.",
            f"Nearest: prune.mlp={' or prune.mlp='.join(map(str, works))}." if works else "",
        )
    ]


def pruning_notes(settings: Settings, shape: ModelShape | None) -> tuple[str, ...]:
    """Say what pruning leaves of the model, and what memory it needs."""
    if not settings.prune.prunes or shape is None or shape.pruned_from is None:
        return ()
    before, after = shape.unpruned.num_params, shape.num_params
    needed = show_bytes(pruning_memory_bytes(shape.unpruned, settings))
    held = "the whole model" if settings.prune.method == "depth" else "one layer at a time"
    return (
        f"pruning leaves {after:,} of {before:,} parameters ({100 * after / before:.1f} %), and needs about {needed} of"
        f" memory, {held} (modelled)",
    )


def pruning_memory_bytes(shape: ModelShape, settings: Settings) -> float:
    """Return the host memory of pruning a model of this shape, in bytes."""
    if settings.prune.method == "width":
        return one_layer_bytes(shape)
    text = settings.calibration
    logits = LOGITS_HELD * 4 * text.batch_size * text.seq_len * shape.vocab_size
    return weight_bytes(shape, QFormat.NONE) + logits + GIB
