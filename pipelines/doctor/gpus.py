"""GPUs, driver and CUDA, as nvidia-smi reports them."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

from pipelines.doctor.record import ProbeResult
from pipelines.domain.units import show_bytes
from pipelines.host.machine import GpuFacts, Machine
from pipelines.predict.performance.hardware import row_of

OLDEST = 8.0
"""Lowest compute capability that TensorRT-LLM 1.2 supports (support-matrix.md)."""


def look(machine: Machine, release: dict[str, Any] | None) -> list[ProbeResult]:
    """Describe the GPUs.

    Args:
        machine: what nvidia-smi lists.
        release: row of the compatibility table for the installed TensorRT-LLM, or for the one to install.
    """
    if not machine.gpus:
        meant = "not installed" in machine.no_gpu_reason or "CUDA_VISIBLE_DEVICES" in machine.no_gpu_reason
        todo = "" if meant else "Repair the driver: nvidia-smi must list the GPUs."
        return [ProbeResult("GPU", f"none: {machine.no_gpu_reason}", "note", todo)]
    return [*(_gpu(index, gpu) for index, gpu in enumerate(machine.gpus)), _driver(machine.gpus[0], release)]


def _gpu(index: int, gpu: GpuFacts) -> ProbeResult:
    row = row_of(gpu)
    text = f"{gpu.name}, compute capability {gpu.sm}, {show_bytes(gpu.memory_bytes)}"
    if gpu.sm < OLDEST:
        return ProbeResult(
            f"GPU {index}", text, "note", f"TensorRT-LLM needs compute capability {OLDEST} (A100) or newer."
        )
    if row is None:
        return ProbeResult(
            f"GPU {index}", f"{text}; not in conf/hardware", "note", "`make plan` does not know its bandwidth."
        )
    return ProbeResult(f"GPU {index}", f"{text} = hardware={row.name}")


def _driver(gpu: GpuFacts, release: dict[str, Any] | None) -> ProbeResult:
    cuda = _cuda_version()
    text = f"{gpu.driver or 'version unknown'}, CUDA {cuda or 'unknown'}"
    needed = (release or {}).get("cuda")
    if cuda and needed and numbers(cuda)[:1] < numbers(needed)[:1]:
        return ProbeResult(
            "driver",
            f"{text}; TensorRT-LLM {(release or {})['tensorrt_llm']} is built for CUDA {needed}",
            "note",
            f"Install a driver for CUDA {needed.split('.')[0]}"
            + (f" ({release['driver']} or newer)." if release and release.get("driver") else "."),
        )
    return ProbeResult("driver", text)


def _cuda_version() -> str:
    """Return the newest CUDA the driver supports, from the head of nvidia-smi's table; empty when it is not stated."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run([tool], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"CUDA Version:\s*([\d.]+)", answer.stdout)
    return found[1] if found else ""


def numbers(version: str) -> tuple[int, ...]:
    """2.10.0a0+nv25.12 -> (2, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))
