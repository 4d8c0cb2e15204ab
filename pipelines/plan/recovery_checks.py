"""What must hold for recovery training, before anything is spent on it."""

from __future__ import annotations

from pipelines.domain.adapter import linear_widths
from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, UNIFORM, QFormat, rounding_is_known
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.registry import EngineDescription
from pipelines.host.machine import Machine, torch_device
from pipelines.predict.performance.memory import weight_bytes
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings

WEIGHT_BYTES, LEARNED_BYTES = 4, 12
"""Of a weight in float32, and of gradient and Adam's two moments of each weight that training changes."""
LOGITS_HELD = 6
"""Arrays of the size of a batch's logits, in float32: of student and teacher, their logarithms and gradients."""


def recovery_faults(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine
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
    if settings.sparsity.method == "none" and not settings.prune.prunes and not _sees_rounding(settings):
        scales = " quant.int4_scales=mse" if FORMATS[qformat].rounds_alone else ""
        seen = [name for name in UNIFORM if FORMATS[name].rounds_alone]
        faults.append(
            Fault(
                f"{asked} with prune=none, sparsity=none and quant={qformat}{scales} has nothing to win back: training"
                " sees what pruning and 2:4 sparsity removed and the rounding of weights, and here is none of it.",
                f"It goes with prune=..., sparsity=..., or with quant={' or quant='.join(seen)}.",
                "Set recover=none.",
            )
        )
    if recover.sharding != "none" and training_processes(settings, machine) == 1:
        faults.append(
            Fault(
                f"recover.sharding={recover.sharding} needs recover.processes >= 2: one process trains.",
                f"It goes with recover.processes of 2 or more that divides recover.batch_size={recover.batch_size}, on"
                " GPUs one for each.",
                "Set recover.processes=2, or recover.sharding=none.",
            )
        )
    if shape is None:
        return faults
    if shape.num_experts > 1:
        faults.append(Fault(f"{asked} does not train a mixture of experts.", todo="Set recover=none."))
    positions = shape.max_position_embeddings
    if recover.seq_len is not None and recover.seq_len > positions:
        faults.append(Fault(f"recover.seq_len={recover.seq_len} is longer than the model's {positions} positions."))
    return faults + _rank_faults(settings, shape) + _machine_faults(settings, shape, machine)


def _sees_rounding(settings: Settings) -> bool:
    return rounding_is_known(settings.quant.qformat, settings.quant.int4_scales)


def _rank_faults(settings: Settings, shape: ModelShape) -> list[Fault]:
    """Return which linears are smaller than the rank of what is trained beside them."""
    rank = settings.recover.lora_rank
    if rank is None:
        return []
    sizes = _targets(settings, shape)
    smallest = min(sizes, key=lambda name: min(sizes[name]))
    inputs, out = sizes[smallest]
    if rank <= min(out, inputs):
        return []
    return [
        Fault(
            f"recover.lora_rank={rank} is larger than the weight of {smallest}, which is {out} x {inputs}.",
            f"At most {min(out, inputs)}; usually 8 to 64.",
            "Set a smaller recover.lora_rank, or recover.lora_rank=null, which trains all weights.",
        )
    ]


def _machine_faults(settings: Settings, shape: ModelShape, machine: Machine) -> list[Fault]:
    """Return what of the training does not fit this machine."""
    on_gpu, processes = torch_device(machine) == "cuda", training_processes(settings, machine)
    if on_gpu and processes > len(machine.gpus):
        return [
            Fault(
                f"recover.processes={processes} is more than the {len(machine.gpus)} GPUs of this machine.",
                "Each process trains on a GPU of its own.",
                "Leave recover.processes out.",
            )
        ]
    needed = training_memory_bytes(shape, settings, processes) * (1 if on_gpu else processes)
    has = machine.gpus[0].memory_bytes if on_gpu else machine.memory_bytes
    if needed <= has:
        return []
    where = "each GPU has" if on_gpu else "this machine has"
    return [
        Fault(
            f"{settings.model.label} needs about {show_bytes(needed)} of memory while training (modelled); {where}"
            f" {show_bytes(has)}.",
            todo=f"Set {_smaller(settings, processes, on_gpu)}take a smaller model, or recover=none.",
        )
    ]


def _smaller(settings: Settings, processes: int, on_gpu: bool) -> str:
    """List the settings that would lower the memory, of those that do not have that value."""
    recover = settings.recover
    could = {
        "recover.lora_rank=16": recover.lora_rank is None,
        "recover.batch_size=1": recover.batch_size != 1 and (on_gpu or processes == 1),
        "recover.processes=1": processes > 1 and not on_gpu and recover.sharding == "none",
        "recover.sharding=full": processes > 1 and on_gpu and recover.sharding == "none",
        "recover.gradient_checkpointing=true": not recover.gradient_checkpointing,
    }
    return "".join(f"{change}, " for change, helps in could.items() if helps)


def recovery_notes(settings: Settings, shape: ModelShape | None, machine: Machine) -> tuple[str, ...]:
    """Say what training needs, and what of the compression it does not see."""
    recover, qformat = settings.recover, settings.quant.qformat
    if not recover.trains or shape is None:
        return ()
    processes = training_processes(settings, machine)
    needed = show_bytes(training_memory_bytes(shape, settings, processes))
    what = "the whole model" if settings.recover.sharding == "none" else "its part of the model"
    each = f", in each of {processes} processes" if processes > 1 else ""
    notes = [f"training needs about {needed} of memory, {what}{each} (modelled)"]
    if recover.lora_rank is not None:
        notes.append(
            f"of {shape.num_params:,} weights none is trained itself: {_learned(shape, settings):,} of rank"
            f" {recover.lora_rank} are, and are added to them"
        )
    if qformat is not QFormat.NONE and not _sees_rounding(settings):
        notes.append(f"training does not see the rounding of quant={qformat}, only what pruning and sparsity removed")
    elif qformat is not QFormat.NONE and FORMATS[qformat].activation != "16bit":
        notes.append(f"training sees the rounding of weights of quant={qformat}, not that of activations")
    if settings.build.tp_size > 1 and FORMATS[qformat].weights.at_build:
        notes.append(
            f"training rounds the rows of o_proj and down_proj as a whole; with build.tp_size={settings.build.tp_size},"
            " trtllm-build gives the part of each GPU a scale of its own"
        )
    return tuple(notes)


def training_processes(settings: Settings, machine: Machine) -> int:
    """Return how many processes share each batch on this machine."""
    return settings.recover.sharing(len(machine.gpus) if torch_device(machine) == "cuda" else 1)


def training_memory_bytes(shape: ModelShape, settings: Settings, processes: int = 1) -> float:
    """Return the memory of one process while training, in bytes.

    Weights, gradients and moments; a teacher; the weights that linears compute with where these are others; logits and
    activations of its part of a batch.
    """
    recover, sparse = settings.recover, settings.sparsity.method != "none"
    weights, learned = weight_bytes(shape, QFormat.NONE) / 2, _learned(shape, settings)
    if recover.lora_rank is not None:
        weights += learned
    sharded = recover.sharding != "none"
    shared = WEIGHT_BYTES * learned if processes > 1 and not sharded else 0  # gradients again, while they are exchanged
    teacher = 2 * weight_bytes(shape.unpruned, QFormat.NONE) if recover.method == "distill" else 0
    layers = 1 if recover.gradient_checkpointing else shape.num_hidden_layers
    summed = sparse and recover.lora_rank is not None  # then the mask belongs to what is computed
    each = (WEIGHT_BYTES if _sees_rounding(settings) or summed else 0) + summed
    computed = each * shape.linear_params * layers / shape.num_hidden_layers
    masks = shape.linear_params if sparse and not summed else 0
    tokens = -(-(recover.batch_size or 1) // processes) * (recover.seq_len or 1)
    logits = LOGITS_HELD * 4 * tokens * shape.vocab_size
    activations = 4 * tokens * layers * (10 * shape.hidden_size + 4 * shape.intermediate_size)
    held = WEIGHT_BYTES * weights + LEARNED_BYTES * learned + shared + teacher + masks
    if sharded:
        held = held / processes + _collected(shape, settings)
    return held + computed + logits + activations + GIB


def _collected(shape: ModelShape, settings: Settings) -> float:
    """Return the bytes that a process with a part of the model has of whole weights and gradients at a time.

    They are those of the embedding and the output head, of the layer that computes and of the next, which is on its
    way; gradients of the first three, twice while they are exchanged.
    """
    others, layer = shape.num_params - shape.linear_params, shape.linear_params / shape.num_hidden_layers
    gradients = 0 if settings.recover.lora_rank is not None else 2 * (others + layer)
    return WEIGHT_BYTES * (others + 2 * layer + gradients)


def _learned(shape: ModelShape, settings: Settings) -> int:
    """Return how many numbers training changes: all weights, or those of low rank."""
    rank = settings.recover.lora_rank
    if rank is None:
        return shape.num_params
    return shape.num_hidden_layers * rank * sum(sum(size) for size in _targets(settings, shape).values())


def _targets(settings: Settings, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear of a layer that is trained with low rank."""
    widths = linear_widths(shape)
    return {name: widths[name] for name in settings.recover.targets}
