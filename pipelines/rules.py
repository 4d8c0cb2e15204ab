"""What can be refused before anything is spent: combinations, memory, disk, missing packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines import serving_rules
from pipelines.domain import quant_rules
from pipelines.domain.errors import Fault
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.registry import ENGINES
from pipelines.flavours import Flavour
from pipelines.flow import Target, is_elsewhere
from pipelines.machine import Machine
from pipelines.settings import Settings
from pipelines.sizing.memory import checkpoint_bytes, weight_bytes
from pipelines.sources import BuiltEngine
from pipelines.stages import Stage


@dataclass
class Checked:
    """What the rules found.

    Attributes:
        faults: the run is refused.
        notes: what fits where.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def check(
    settings: Settings,
    shape: ModelShape | None,
    flavour: Flavour,
    machine: Machine,
    target: Target,
    built: BuiltEngine | None = None,
) -> Checked:
    """Apply every rule that needs no file of the model.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        flavour: engine flavour that was chosen.
        machine: facts of this machine.
        target: what is asked for.
        built: the engine given with engine.path; then nothing is compressed or built.
    """
    checked = Checked(serving_rules.check(settings, shape, flavour, target, built))
    if built is not None or is_elsewhere(settings, target):
        return checked
    if flavour.name != "llmapi" and flavour.name not in ENGINES:
        checked.faults.append(_no_flavour(flavour.name))
    checked.faults += _limits(settings, shape, flavour)
    if shape is not None:
        checked.faults += _shape(settings, shape, machine)
    checked.faults += quant_rules.check_kv_features(
        settings.quant.qformat,
        settings.kv_cache.dtype,
        kv_reuse=settings.kv_cache.enable_block_reuse,
        chunked_context=settings.runtime.enable_chunked_context,
    )
    _target_gpu(settings, shape, machine, checked)
    return checked


def _shape(settings: Settings, shape: ModelShape, machine: Machine) -> list[Fault]:
    """The format and the split against the model's sizes, and calibration against this machine's memory."""
    build = settings.build
    faults = quant_rules.check_shape(
        shape,
        settings.quant.qformat,
        group_size=settings.quant.group_size,
        tp_size=build.tp_size,
        pp_size=build.pp_size,
    )
    if settings.sparsity.method != "none":
        faults += quant_rules.check_sparsity(shape, method=settings.sparsity.method, tp_size=build.tp_size)
    return faults + _host_memory(settings, shape, machine)


def _no_flavour(name: str) -> Fault:
    return Fault(
        f"engine={name} cannot be built by this version yet.",
        f"Built are: {', '.join(ENGINES)}.",
        "With engine=openvino the same TensorRT-LLM checkpoint is written and executed; "
        "trtllm-build takes it from artifacts/quantize/ in NVIDIA's container. "
        "An engine built there is served with engine.path=/its/folder.",
    )


def _limits(settings: Settings, shape: ModelShape | None, flavour: Flavour) -> list[Fault]:
    """The build limits among themselves and against the model (trtllm-build; facts on the scheduler)."""
    build, faults = settings.build, []
    longest = build.max_seq_len or (shape.max_position_embeddings if shape else None)
    if shape and build.max_seq_len and build.max_seq_len > shape.max_position_embeddings:
        faults.append(
            Fault(
                f"build.max_seq_len={build.max_seq_len} is more than {settings.model.label} was made for.",
                f"Its limit is {shape.max_position_embeddings} tokens.",
            )
        )
    if longest is not None and build.max_input_len > longest:
        faults.append(
            Fault(
                f"build.max_input_len={build.max_input_len} is more than max_seq_len={longest}, "
                "which counts prompt and output together.",
                todo=f"Set build.max_input_len={longest} or less.",
            )
        )
    if not settings.runtime.enable_chunked_context and build.max_num_tokens < build.max_input_len:
        faults.append(
            Fault(
                f"build.max_num_tokens={build.max_num_tokens} is less than max_input_len={build.max_input_len}: "
                "without chunked context a prompt must fit one iteration.",
                todo=f"Set build.max_num_tokens={build.max_input_len} or more, lower build.max_input_len, "
                "or set runtime.enable_chunked_context=true.",
            )
        )
    if build.tokens_per_block & (build.tokens_per_block - 1):
        faults.append(
            Fault(
                f"build.tokens_per_block={build.tokens_per_block} is not a power of two.",
                "Allowed: 8, 16, 32, 64, 128.",
            )
        )
    elif flavour.name == "openvino" and build.tokens_per_block != 32:
        faults.append(
            Fault(
                f"build.tokens_per_block={build.tokens_per_block} cannot be had with engine=openvino.",
                "OpenVINO's CPU cache has blocks of 32 tokens.",
                "Leave it at 32, or build for engine=tensorrt_llm.",
            )
        )
    return faults


def _host_memory(settings: Settings, shape: ModelShape, machine: Machine) -> list[Fault]:
    """Calibration holds the 16-bit model and, while exporting, its quantized copy."""
    needed = quantize_memory_bytes(shape, settings)
    if needed <= machine.memory_bytes:
        return []
    return [
        Fault(
            f"{settings.model.label} needs about {show_bytes(needed)} of memory while quantizing "
            f"(16-bit weights and their {settings.quant.qformat} copy; modelled); "
            f"this machine has {show_bytes(machine.memory_bytes)}.",
            todo="Take a smaller model, or quantize on a machine with more memory.",
        )
    ]


def quantize_memory_bytes(shape: ModelShape, settings: Settings) -> float:
    """Host memory of the quantize stage, bytes (modelled): 16-bit weights + exported copy + 2 GiB of libraries."""
    return weight_bytes(shape, QFormat.NONE) + checkpoint_bytes(shape, settings.quant.qformat) + 2 * GIB


def _target_gpu(settings: Settings, shape: ModelShape | None, machine: Machine, checked: Checked) -> None:
    """Format against GPU generation, and weights against GPU memory."""
    hardware = settings.hardware
    sm, memory, name = hardware.sm, (hardware.memory_gb or 0) * 1e9, hardware.name
    if hardware.name == "auto":
        if not machine.gpus:
            return
        gpu = machine.gpus[0]
        sm, memory, name = gpu.sm, float(gpu.memory_bytes), gpu.name
    if sm is None:
        return
    family = shape.family if shape else ""
    checked.faults += quant_rules.check_hardware(settings.quant.qformat, settings.kv_cache.dtype, sm, family)
    if shape is not None and memory:
        _gpu_memory(settings, shape, name, memory, checked)


def _gpu_memory(settings: Settings, shape: ModelShape, name: str, memory: float, checked: Checked) -> None:
    world = settings.build.tp_size * settings.build.pp_size
    weights = weight_bytes(shape, settings.quant.qformat) / world
    if weights > memory:
        ranks = next((n for n in (2, 4, 8, 16) if weight_bytes(shape, settings.quant.qformat) / n < 0.9 * memory), None)
        fixes = [f"build.tp_size={ranks}"] if ranks else []
        fixes += [
            f"quant={q}" for q in (QFormat.FP8, QFormat.INT4_AWQ) if weight_bytes(shape, q) / world < 0.9 * memory
        ]
        checked.faults.append(
            Fault(
                f"{settings.model.label} in {settings.quant.qformat} needs {show_bytes(weights)} of weights per GPU; "
                f"one {name} has {show_bytes(memory)} (modelled).",
                todo=f"Fits with {' or '.join(fixes)}." if fixes else "Take a larger GPU.",
            )
        )
        return
    kv_bits = 16 if settings.kv_cache.dtype == KvFormat.AUTO else 8
    kv_token = shape.kv_bytes_per_token_16bit * kv_bits / 16 / world
    tokens = int((memory - weights) * 0.9 / kv_token)
    checked.notes += (
        f"on {name}: weights {show_bytes(weights)} of {show_bytes(memory)} per GPU, "
        f"at most {tokens:,} tokens of KV cache (modelled, activations not counted)",
    )


def check_steps(stages: Sequence[Stage], store: Path) -> list[Fault]:
    """What the stages that will really run need: packages, their versions, and a place to write."""
    faults = [_missing(package, stages) for package in sorted(_absent(stages))]
    if stages:
        faults += _store(store)
    return faults


def _absent(stages: Iterable[Stage]) -> set[str]:
    return {package for stage in stages for package in stage.needs if importlib.util.find_spec(package) is None}


def _missing(package: str, stages: Sequence[Stage]) -> Fault:
    users = sorted({stage.name for stage in stages if package in stage.needs})
    return Fault(
        f"Stage {', '.join(users)} needs the Python package '{package}', which is not installed.",
        todo="Run: make setup",
    )


def _store(store: Path) -> list[Fault]:
    """The store must be writable; the nearest existing parent decides before it is made."""
    parent = next(path for path in (store, *store.parents) if path.exists())
    if not parent.is_dir():
        return [Fault(f"paths.store='{store}' cannot be made: {parent} is a file.")]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [Fault(f"paths.store='{store}' is not writable.", todo="Give another folder: paths.store=/some/folder")]
    return []
