"""Refuse before anything is spent: impossible combinations, too little memory or disk, missing packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.domain.errors import Fault
from pipelines.domain.formats import QFormat, formats_for
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, show_bytes
from pipelines.engines.description import EngineDescription
from pipelines.host.machine import Machine
from pipelines.plan import memory_checks, serving_checks
from pipelines.plan.deployment import deployment
from pipelines.plan.targets import Target, is_elsewhere
from pipelines.plan.user_inputs import Found
from pipelines.predict.performance import hardware
from pipelines.predict.performance.limits import EngineLimits, with_limits
from pipelines.predict.performance.memory import checkpoint_bytes, weight_bytes
from pipelines.rules.table import check as check_table
from pipelines.rules.table import check_checkpoint, refused, warned
from pipelines.settings.root import Settings
from pipelines.stages import Stage


@dataclass
class Checked:
    """Result of the checks.

    Attributes:
        faults: reasons to refuse the run.
        notes: what fits where.
        warnings: valid, but perhaps not what the user meant.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    warnings: tuple[Fault, ...] = ()


def check(
    settings: Settings,
    shape: ModelShape | None,
    engine: EngineDescription,
    machine: Machine,
    target: Target,
    found: Found,
    limits: EngineLimits | None = None,
) -> Checked:
    """Apply every rule that does not need the model's files.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        engine: the chosen engine.
        machine: facts of this machine.
        target: of the command.
        found: what the user has on disk; with an engine already built, nothing is compressed or built.
        limits: of an engine on the GPU, where they were chosen for the load.
    """
    served = serving_checks.check(settings, shape, engine, target, found.built)
    if found.built is not None or is_elsewhere(settings, target):
        return Checked(served)
    checked = Checked()
    findings = check_table(deployment(settings, shape, engine, machine, found))
    checked.faults += refused(findings)
    checked.warnings = tuple(warned(findings))
    checked.faults += _draft(settings, found)
    if shape is not None and (not engine.builder or machine.gpus):  # else nothing is quantized here
        checked.faults += _host_memory(settings, shape, machine)
    _gpu_memory(with_limits(settings, limits), shape, machine, checked, limits)
    if shape is not None and engine.memory_model == "process":
        checked.notes += memory_checks.cpu_note(settings, shape)
    checked.faults += served
    return checked


def _draft(settings: Settings, found: Found) -> list[Fault]:
    """Check the draft model's format and split; it runs on the GPUs of its target."""
    guess = settings.speculative
    if guess.draft is None or guess.draft_qformat is None:
        return []
    shape = found.draft or guess.draft_shape
    if shape is None:
        return []
    build = settings.build
    faults = check_checkpoint(
        shape,
        guess.draft_qformat,
        group_size=settings.quant.group_size,
        tp_size=build.tp_size,
        pp_size=build.pp_size,
    )
    return [Fault(f"speculative.draft: {fault.message}", fault.allowed, fault.todo) for fault in faults]


def check_machine(engine: EngineDescription, machine: Machine, stages: Sequence[Stage]) -> list[Fault]:
    """Find what keeps an engine from being built and evaluated on this machine; `plan` can still describe it."""
    used = any(stage.name in ("convert", "vision", "build", "evaluate") for stage in stages)
    lacks = engine.lacks(machine) if engine.builder and used else []
    if not lacks:
        return []
    return [
        Fault(
            f"engine={engine.setting} cannot run here: {'; '.join(lacks)}.",
            engine.place,
            "Run the same command there (make shell); use engine=openvino, which executes the same checkpoint here; "
            "or serve an engine that is already built with engine.path=/its/folder.",
        )
    ]


def _host_memory(settings: Settings, shape: ModelShape, machine: Machine) -> list[Fault]:
    """Check host memory: calibration holds the 16-bit model and, while exporting, its quantized copy."""
    needed = quantize_memory_bytes(shape, settings)
    if needed <= machine.memory_bytes:
        return []
    return [
        Fault(
            f"{settings.model.label} needs about {show_bytes(needed)} of memory while quantizing "
            f"(16-bit weights and the exported copy; modelled); "
            f"this machine has {show_bytes(machine.memory_bytes)}.",
            todo="Use a smaller model, or quantize on a machine with more memory.",
        )
    ]


def quantize_memory_bytes(shape: ModelShape, settings: Settings) -> float:
    """Return the host memory of quantizing in bytes (modelled): 16-bit weights, exported copy, 2 GiB of libraries."""
    return weight_bytes(shape, QFormat.NONE) + checkpoint_bytes(shape, settings.quant.qformat) + 2 * GIB


def _gpu_memory(
    settings: Settings, shape: ModelShape | None, machine: Machine, checked: Checked, limits: EngineLimits | None
) -> None:
    """Check the engine against the memory of its GPU."""
    target = hardware.resolved(settings.hardware, machine)
    if about := hardware.describe(settings.hardware, machine):
        checked.notes += (about,)
    if shape is not None and target.memory_gb:
        if limits is not None:
            checked.notes += tuple(f"chosen for the load: build.{line}" for line in limits.lines())
        chosen = () if limits is None else tuple(limits.reasons)
        fit = memory_checks.check(settings, shape, target, formats_for(target.sm or 0), chosen)
        checked.faults += fit.faults
        checked.notes += fit.notes
        checked.warnings += fit.warnings


def check_steps(stages: Sequence[Stage], store: Path) -> list[Fault]:
    """Check what the stages that will run need: packages, their versions, and a place to write."""
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
    """Check that the store is writable; before it exists, its nearest existing parent decides."""
    parent = next(path for path in (store, *store.parents) if path.exists())
    if not parent.is_dir():
        return [Fault(f"paths.store='{store}' cannot be created: {parent} is a file.")]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [Fault(f"paths.store='{store}' is not writable.", todo="Give another folder: paths.store=/some/folder")]
    return []
