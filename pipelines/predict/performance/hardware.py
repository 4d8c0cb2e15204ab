"""Which row of conf/hardware the GPUs of this machine are; what `hardware=auto` stands for."""

from __future__ import annotations

from typing import Any

from pipelines.host.machine import GpuFacts, Machine
from pipelines.predict.performance.gpus import rows
from pipelines.settings.engine import HardwareSettings

MEMORY_TOLERANCE = 0.12
"""GPUs of one name are told apart by memory; nvidia-smi differs from the data sheet by up to this share."""


def row_of(gpu: GpuFacts) -> HardwareSettings | None:
    """The row of a GPU: the same name, compute capability and about the same memory; None when there is none."""
    for row in rows():
        if gpu.name not in row.nvidia_smi or row.sm != gpu.sm or not row.memory_gb:
            continue
        if abs(gpu.memory_bytes / (row.memory_gb * 1e9) - 1) <= MEMORY_TOLERANCE:
            return row
    return None


def resolved(wanted: HardwareSettings, machine: Machine) -> HardwareSettings:
    """What `wanted` stands for here: `auto` is the first GPU of this machine, where it has one.

    Name, compute capability and memory are nvidia-smi's own; bandwidth and peak rates those of the data sheet, or None
    for a GPU that conf/hardware does not know.
    """
    if wanted.name != "auto" or not machine.gpus:
        return wanted
    gpu = machine.gpus[0]
    found: dict[str, Any] = {
        "sm": gpu.sm,
        "reported_gb": gpu.memory_bytes / 1e9,
        "gpus_per_server": len(machine.gpus),
    }
    row = row_of(gpu)
    if row is None:
        return HardwareSettings(name="auto", gpu=gpu.name, memory_gb=gpu.memory_bytes / 1e9, **found)
    return row.model_copy(update=found)


def describe(wanted: HardwareSettings, machine: Machine) -> str:
    """Say for people what `hardware=auto` was taken for; empty when it stands for nothing."""
    if wanted.name != "auto" or not machine.gpus:
        return ""
    gpu = machine.gpus[0]
    row = row_of(gpu)
    count = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
    others = sorted({other.name for other in machine.gpus} - {gpu.name})
    mixed = f"; beside it {', '.join(others)}, which is not counted with" if others else ""
    if row is None:
        known = "conf/hardware does not know it: nothing is said about its bandwidth"
        return f"hardware: {count}{gpu.name}, as nvidia-smi says; {known}{mixed}"
    return f"hardware: {count}{gpu.name} = hardware={row.name}, {row.mem_bw_gb_s:,.0f} GB/s{mixed}"
