"""Checks of the weights before any work starts: imported as they are, pruned, or trained."""

from collections.abc import Iterator
from math import lcm
from pathlib import Path

from pipelines.checkpoint.given import import_faults
from pipelines.checkpoint.llava import NEWLINE, VisionShape, check_processor, vision_name
from pipelines.checkpoint.tensors import stored_tensors
from pipelines.compress.config import CalibrationSettings, PruningSettings, QuantSettings, RecoverSettings
from pipelines.domain.adapter import linear_widths
from pipelines.domain.errors import Fault, collecting
from pipelines.domain.formats import FORMATS, UNIFORM, QFormat, rounding_is_known
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.registry import ServerBackend
from pipelines.host.machine import Machine, torch_device
from pipelines.plan.deployment import Deployment
from pipelines.plan.other_memory import one_layer_bytes
from pipelines.predict.performance.memory import weight_bytes
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config

# A model that is already quantized: whether the configuration takes it over as it is.


def given_faults(d: Deployment) -> Iterator[Fault]:
    """Yield why such a folder cannot be used like that; none for a folder in 16 bit."""
    settings, engine = d.settings, d.engine
    folder, build = d.model_folder, settings.build
    if folder is None:
        return
    name = f"model.path='{folder}'" if settings.model.folder else f"model.hub_id={settings.model.hub_id}"
    faults = import_faults(
        folder,
        model_config(folder),
        qformat=settings.quant.qformat,
        group_size=settings.quant.group_size,
        kv_cache=settings.kv_cache.dtype,
        world_size=build.tp_size * build.pp_size,
        effective_bits=settings.quant.effective_bits,
        candidates=settings.quant.mixed,
        name=name,
    )
    yield from faults
    if faults or d.quantization is None:
        return
    what = f"{name} is already quantized"
    if not engine.writes_engine:
        yield Fault(f"{what}; engine={engine.setting} takes models in 16 bit.", todo="Use another engine.")
    for name in ("smoothquant_alpha", "awq_alpha_step", "int4_scales", "fp4_inputs"):
        if (value := getattr(settings.quant, name)) not in (None, "max"):
            yield Fault(f"{what}; quant.{name}={value} has no effect.", todo=f"Leave quant.{name} out.")
    for group in ("prune", "sparsity", "recover"):
        if (method := getattr(settings, group).method) != "none":
            yield Fault(f"{what}, so {group}={method} cannot change its weights.", todo=f"Set {group}=none.")
    if d.target == "diagnose":
        yield Fault(
            f"{what}: make diagnose compares a checkpoint with its 16-bit model.",
            todo="Build it, then set model.path=/the/original diagnose.checkpoint=FOLDER.",
        )
    if d.has_baseline:
        yield Fault(
            f"{what}: the 16-bit model to compare it with is not known.",
            todo="Set eval.baseline=skip, which measures without a verdict"
            " (make fidelity: fidelity.reference_path=/the/original).",
        )


# Pruning.

PRUNING_LOGITS_HELD = 4
"""Arrays of the size of a batch's logits that the loss holds, in float32."""


def pruning_faults(d: Deployment) -> Iterator[Fault]:
    """Yield why the pruning that is asked for cannot be; sizes alone are checked where the shape is made."""
    settings, engine, shape, pruning = d.settings, d.engine, d.shape, d.settings.prune
    if not pruning.prunes:
        return
    word = f"prune={pruning.method}"
    if not engine.writes_engine or settings.speculative.mode in HEADS:
        what = f"engine={engine.name}" if not engine.writes_engine else f"speculative={settings.speculative.mode}"
        yield Fault(f"{word} conflicts with {what}, which uses the model unchanged.", todo="Set prune=none.")
    if settings.lora.adapters:
        yield Fault(
            f"{word} conflicts with lora.adapters, which were trained for the sizes of the whole model.",
            todo="Set prune=none, or leave lora out.",
        )
    if settings.fidelity.by_layer:
        yield Fault(
            f"{word} conflicts with fidelity.by_layer=true: layers of different sizes cannot be compared.",
            todo="Leave fidelity.by_layer out.",
        )
    if shape is None or shape.pruned_from is None:
        return
    yield from _divided(settings, shape)
    needed = pruning_memory_bytes(shape.unpruned, pruning, settings.calibration)
    if needed > d.machine.memory_bytes:
        yield Fault(
            f"{settings.model.label} needs about {show_bytes(needed)} of memory while pruning (modelled); this"
            f" machine has {show_bytes(d.machine.memory_bytes)}.",
            todo="Set prune=width, which holds one layer at a time, or take a smaller model.",
        )


def _divided(settings: Settings, shape: ModelShape) -> Iterator[Fault]:
    """Name the numbers of MLP channels that ranks and groups divide, where the model's own is one of them."""
    size, has = settings.prune.mlp, shape.unpruned.intermediate_size
    group = max((FORMATS[each].weights.group_size(settings.quant.group_size) or 1) for each in settings.quant.formats)
    sparse = {"none": 1, "magnitude": 16, "sparsegpt": 4}[settings.sparsity.method]
    multiple = settings.build.tp_size * lcm(group, sparse)
    if size is None or size % multiple == 0 or has % multiple:
        return
    works = [near for near in (size // multiple * multiple, (size // multiple + 1) * multiple) if 0 < near < has]
    yield Fault(
        f"prune.mlp={size} conflicts with build.tp_size={settings.build.tp_size},"
        f" quant={settings.quant.qformat} and sparsity={settings.sparsity.method}: it is not a"
        f" multiple of {multiple}.",
        f"Nearest: prune.mlp={' or prune.mlp='.join(map(str, works))}." if works else "",
    )


def pruning_notes(d: Deployment) -> tuple[str, ...]:
    """Say what pruning leaves of the model, and what memory it needs."""
    shape, pruning = d.shape, d.settings.prune
    if not pruning.prunes or shape is None or shape.pruned_from is None:
        return ()
    before, after = shape.unpruned.num_params, shape.num_params
    needed = show_bytes(pruning_memory_bytes(shape.unpruned, pruning, d.settings.calibration))
    held = "the whole model" if pruning.method == "depth" else "one layer at a time"
    return (
        f"pruning leaves {after:,} of {before:,} parameters ({100 * after / before:.1f} %), and needs about {needed} of"
        f" memory, {held} (modelled)",
    )


def pruning_memory_bytes(shape: ModelShape, pruning: PruningSettings, text: CalibrationSettings) -> float:
    """Return the host memory of pruning a model of this shape, in bytes."""
    if pruning.method == "width":
        return one_layer_bytes(shape)
    logits = PRUNING_LOGITS_HELD * 4 * text.batch_size * text.seq_len * shape.vocab_size
    return weight_bytes(shape, QFormat.NONE) + logits + GIB


# Recovery training.

WEIGHT_BYTES, LEARNED_BYTES = 4, 12
"""Of a weight in float32, and of gradient and Adam's two moments of each weight that training changes."""
TRAINING_LOGITS_HELD = 6
"""Arrays of the size of a batch's logits, in float32: of student and teacher, their logarithms and gradients."""


def recovery_faults(d: Deployment) -> Iterator[Fault]:
    """Yield why the training that is asked for cannot be, or would win back nothing."""
    settings, engine, shape = d.settings, d.engine, d.shape
    recover, qformat = settings.recover, settings.quant.qformat
    if not recover.trains:
        return
    word = f"recover={recover.method}"
    if not engine.writes_engine or settings.speculative.mode in HEADS:
        what = f"engine={engine.name}" if not engine.writes_engine else f"speculative={settings.speculative.mode}"
        yield Fault(f"{word} conflicts with {what}: it uses the model unchanged.", todo="Set recover=none.")
    if settings.sparsity.method == "none" and not settings.prune.prunes and not _sees_rounding(settings.quant):
        scales = " quant.int4_scales=mse" if FORMATS[qformat].rounds_alone else ""
        seen = [name for name in UNIFORM if FORMATS[name].rounds_alone]
        yield Fault(
            f"{word} with prune=none, sparsity=none and quant={qformat}{scales} has nothing to recover: training"
            " makes up for pruning, 2:4 sparsity and the rounding of weights, and there is none of these.",
            f"It needs prune=..., sparsity=..., or quant={' or quant='.join(seen)}.",
            "Set recover=none.",
        )
    if recover.sharding != "none" and training_processes(recover, d.machine) == 1:
        yield Fault(
            f"recover.sharding={recover.sharding} needs recover.processes >= 2: one process trains.",
            f"It needs recover.processes of 2 or more that divides recover.batch_size={recover.batch_size}, on"
            " GPUs one for each.",
            "Set recover.processes=2, or recover.sharding=none.",
        )
    if shape is None:
        return
    if shape.num_experts > 1:
        yield Fault(f"{word} does not train a mixture of experts.", todo="Set recover=none.")
    positions = shape.max_position_embeddings
    if recover.seq_len is not None and recover.seq_len > positions:
        yield Fault(f"recover.seq_len={recover.seq_len} is longer than the model's {positions} positions.")
    yield from _rank_faults(recover, shape)
    yield from _machine_faults(d, shape)


def _sees_rounding(quant: QuantSettings) -> bool:
    return rounding_is_known(quant.qformat, quant.int4_scales)


def _rank_faults(recover: RecoverSettings, shape: ModelShape) -> Iterator[Fault]:
    """Yield which linears are smaller than the rank of what is trained beside them."""
    rank = recover.lora_rank
    if rank is None:
        return
    sizes = _targets(recover, shape)
    smallest = min(sizes, key=lambda name: min(sizes[name]))
    inputs, out = sizes[smallest]
    if rank <= min(out, inputs):
        return
    yield Fault(
        f"recover.lora_rank={rank} is larger than the weight of {smallest}, which is {out} x {inputs}.",
        f"At most {min(out, inputs)}; usually 8 to 64.",
        "Set a smaller recover.lora_rank, or recover.lora_rank=null, which trains all weights.",
    )


def _machine_faults(d: Deployment, shape: ModelShape) -> Iterator[Fault]:
    """Yield training settings that do not fit this machine."""
    machine, recover = d.machine, d.settings.recover
    on_gpu, processes = d.device == "cuda", training_processes(recover, machine)
    if on_gpu and processes > len(machine.gpus):
        yield Fault(
            f"recover.processes={processes} is more than the {len(machine.gpus)} GPUs of this machine.",
            "Each process needs its own GPU.",
            "Leave recover.processes out.",
        )
        return
    needed = training_memory_bytes(shape, d.settings, processes) * (1 if on_gpu else processes)
    has = machine.gpus[0].memory_bytes if on_gpu else machine.memory_bytes
    if needed <= has:
        return
    where = "each GPU has" if on_gpu else "this machine has"
    yield Fault(
        f"{d.settings.model.label} needs about {show_bytes(needed)} of memory while training (modelled); {where}"
        f" {show_bytes(has)}.",
        todo=f"Set {_smaller(recover, processes, on_gpu)}take a smaller model, or recover=none.",
    )


def _smaller(recover: RecoverSettings, processes: int, on_gpu: bool) -> str:
    """List the settings that would lower the memory, of those that do not have that value."""
    could = {
        "recover.lora_rank=16": recover.lora_rank is None,
        "recover.batch_size=1": recover.batch_size != 1 and (on_gpu or processes == 1),
        "recover.processes=1": processes > 1 and not on_gpu and recover.sharding == "none",
        "recover.sharding=full": processes > 1 and on_gpu and recover.sharding == "none",
        "recover.gradient_checkpointing=true": not recover.gradient_checkpointing,
    }
    return "".join(f"{change}, " for change, helps in could.items() if helps)


def recovery_notes(d: Deployment) -> tuple[str, ...]:
    """Say what training needs, and what of the compression it does not see."""
    settings, shape = d.settings, d.shape
    recover, qformat = settings.recover, settings.quant.qformat
    if not recover.trains or shape is None:
        return ()
    processes = training_processes(recover, d.machine)
    needed = show_bytes(training_memory_bytes(shape, settings, processes))
    what = "the whole model" if recover.sharding == "none" else "its part of the model"
    each = f", in each of {processes} processes" if processes > 1 else ""
    notes = [f"training needs about {needed} of memory, {what}{each} (modelled)"]
    if recover.lora_rank is not None:
        notes.append(
            f"of {shape.num_params:,} weights none is trained itself: {_learned(shape, recover):,} of rank"
            f" {recover.lora_rank} are, and are added to them"
        )
    if qformat is not QFormat.NONE and not _sees_rounding(settings.quant):
        notes.append(f"training does not see the rounding of quant={qformat}, only what pruning and sparsity removed")
    elif qformat is not QFormat.NONE and FORMATS[qformat].activation != "16bit":
        notes.append(f"training sees the rounding of weights of quant={qformat}, not that of activations")
    if settings.build.tp_size > 1 and FORMATS[qformat].weights.at_build:
        notes.append(
            f"training rounds the rows of o_proj and down_proj as a whole; with build.tp_size={settings.build.tp_size},"
            " trtllm-build gives the part of each GPU a scale of its own"
        )
    return tuple(notes)


def training_processes(recover: RecoverSettings, machine: Machine) -> int:
    """Return how many processes share each batch on this machine."""
    return recover.sharing(len(machine.gpus) if torch_device(machine) == "cuda" else 1)


def training_memory_bytes(shape: ModelShape, settings: Settings, processes: int = 1) -> float:
    """Return the memory of one process while training, in bytes.

    Weights, gradients and moments; a teacher; the weights that linears compute with where these are others; logits and
    activations of its part of a batch.
    """
    recover, sparse = settings.recover, settings.sparsity.method != "none"
    weights, learned = weight_bytes(shape, QFormat.NONE) / 2, _learned(shape, recover)
    if recover.lora_rank is not None:
        weights += learned
    sharded = recover.sharding != "none"
    shared = WEIGHT_BYTES * learned if processes > 1 and not sharded else 0  # gradients again, while they are exchanged
    teacher = 2 * weight_bytes(shape.unpruned, QFormat.NONE) if recover.method == "distill" else 0
    layers = 1 if recover.gradient_checkpointing else shape.num_hidden_layers
    summed = sparse and recover.lora_rank is not None  # then the mask belongs to what is computed
    each = (WEIGHT_BYTES if _sees_rounding(settings.quant) or summed else 0) + summed
    computed = each * shape.linear_params * layers / shape.num_hidden_layers
    masks = shape.linear_params if sparse and not summed else 0
    tokens = -(-(recover.batch_size or 1) // processes) * (recover.seq_len or 1)
    logits = TRAINING_LOGITS_HELD * 4 * tokens * shape.vocab_size
    activations = 4 * tokens * layers * (10 * shape.hidden_size + 4 * shape.intermediate_size)
    held = WEIGHT_BYTES * weights + LEARNED_BYTES * learned + shared + teacher + masks
    if sharded:
        # whole weights of embedding, output head, this layer and the next, and of three the gradients, twice
        others, layer = shape.num_params - shape.linear_params, shape.linear_params / shape.num_hidden_layers
        gradients = 0 if recover.lora_rank is not None else 2 * (others + layer)
        held = held / processes + WEIGHT_BYTES * (others + 2 * layer + gradients)
    return held + computed + logits + activations + GIB


def _learned(shape: ModelShape, recover: RecoverSettings) -> int:
    """Return how many numbers training changes: all weights, or those of low rank."""
    rank = recover.lora_rank
    if rank is None:
        return shape.num_params
    return shape.num_hidden_layers * rank * sum(sum(size) for size in _targets(recover, shape).values())


def _targets(recover: RecoverSettings, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear of a layer that is trained with low rank."""
    widths = linear_widths(shape)
    return {name: widths[name] for name in recover.targets}


def vision_faults(d: Deployment) -> list[Fault]:
    """Find an encoder that the CPU engine does not build, or whose features fit neither the table nor the model."""
    images, faults = d.settings.multimodal, list[Fault]()
    if images.model_type != "llava" or d.engine.server is not ServerBackend.PYTHON or images.path is None:
        return []
    if not images.path.exists():  # named among the inputs
        return []
    with collecting(faults):
        shape = VisionShape.read(images.path)
        with collecting(faults):
            check_processor(images.path, shape)
        if shape.visual_tokens != images.visual_tokens:
            most = f"up to {shape.visual_tokens}" if shape.grids else f"{shape.visual_tokens}"
            faults.append(
                Fault(
                    f"multimodal.visual_tokens={images.visual_tokens}, but the encoder of {images.path} gives"
                    f" {most} for one picture.",
                    todo=f"Set multimodal.visual_tokens={shape.visual_tokens}.",
                )
            )
        longest = d.settings.build.max_input_len
        if shape.grids and d.built is None and longest <= shape.visual_tokens:
            faults.append(
                Fault(
                    f"build.max_input_len={longest} has no room for a picture's {shape.visual_tokens} visual tokens and"
                    " a text.",
                    todo=f"Set build.max_input_len to more than {shape.visual_tokens}, and build.max_seq_len likewise.",
                )
            )
        if shape.grids and (sizes := _newline_sizes(images.path)) != [(shape.output_size,)]:
            shown = f"{NEWLINE} of the shape {list(sizes[0])}" if sizes else f"no {NEWLINE}"
            fault = f"{images.path} has {shown}; features have {shape.output_size} values."
            faults.append(Fault(fault, todo="Download the model again, as safetensors."))
        if d.shape is not None and shape.output_size != d.shape.hidden_size:
            faults.append(
                Fault(
                    f"multimodal.path='{images.path}' gives features of {shape.output_size} values, but the model's"
                    f" hidden size is {d.shape.hidden_size}.",
                    todo="Give the LLaVA that the language model is from.",
                )
            )
    return faults


def _newline_sizes(folder: Path) -> list[tuple[int, ...]]:
    stored = stored_tensors(folder, vision_name)
    return [file.header[name].shape for own, (file, name) in stored.items() if own == NEWLINE]
