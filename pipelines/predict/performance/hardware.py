"""Match the GPUs of this machine with conf/hardware, to resolve `hardware=auto`."""

from __future__ import annotations

from typing import Any

from pipelines.host.machine import GpuFacts, Machine
from pipelines.predict.performance.gpus import rows
from pipelines.settings.engine import HardwareSettings

MEMORY_TOLERANCE = 0.12
"""Tolerance of memory when matching GPUs of one name; nvidia-smi differs from the data sheet by up to this share."""


def row_of(gpu: GpuFacts) -> HardwareSettings | None:
    """Find the entry of a GPU: same name, same compute capability, about the same memory; None if there is none."""
    return next((row for row in rows() if is_a(gpu, row)), None)


def is_a(gpu: GpuFacts, row: HardwareSettings) -> bool:
    """Return whether a GPU of this machine is the one that an entry describes."""
    if gpu.name not in row.nvidia_smi or row.sm != gpu.sm or not row.memory_gb:
        return False
    return abs(gpu.memory_bytes / (row.memory_gb * 1e9) - 1) <= MEMORY_TOLERANCE


def resolved(wanted: HardwareSettings, machine: Machine) -> HardwareSettings:
    """Resolve `wanted` here: `auto` means the first GPU of this machine, if it has one.

    Name, compute capability and memory come from nvidia-smi; bandwidth and peak rates from the data sheet, or None
    for a GPU without an entry in conf/hardware.
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
    """Describe what `hardware=auto` resolved to; empty if it resolved to nothing."""
    if wanted.name != "auto" or not machine.gpus:
        return ""
    gpu = machine.gpus[0]
    row = row_of(gpu)
    count = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
    others = sorted({other.name for other in machine.gpus} - {gpu.name})
    mixed = f"; also present and not used: {', '.join(others)}" if others else ""
    if row is None:
        known = "not in conf/hardware, so its bandwidth is unknown"
        return f"hardware: {count}{gpu.name} (from nvidia-smi); {known}{mixed}"
    return f"hardware: {count}{gpu.name} = hardware={row.name}, {row.mem_bw_gb_s:,.0f} GB/s{mixed}"
