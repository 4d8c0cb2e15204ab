"""Processor and memory, and how much of them a container leaves."""

from __future__ import annotations

import platform
from pathlib import Path

from pipelines.doctor.record import ProbeResult
from pipelines.document.show import count
from pipelines.domain.units import GIB, show_bytes
from pipelines.host.machine import CGROUP, Machine, cpu_quota, native_bf16

FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "bf16": "BF16",
    "i8mm": "I8MM",
}
"""Flags of /proc/cpuinfo that decide what the CPU engine computes with -> their common names."""


def look(machine: Machine, *, cpuinfo: Path = Path("/proc/cpuinfo"), cgroup: Path = CGROUP) -> list[ProbeResult]:
    """Describe processor and memory.

    Args:
        machine: cores and memory.
        cpuinfo: the file in which Linux lists features.
        cgroup: the folder with a container's limits.
    """
    return [_cores(machine, cpuinfo, cgroup), _features(cpuinfo), _memory(machine), _python()]


def _cores(machine: Machine, cpuinfo: Path, cgroup: Path) -> ProbeResult:
    fields = _read(cpuinfo)
    model = fields.get("model name") or platform.machine()
    quota = cpu_quota(cgroup)
    if quota is not None and quota < machine.cpu_count:
        return ProbeResult(
            "processor",
            f"{model}, {count(machine.cpu_count, 'core')}, of which this container may use {quota:g}",
            "note",
            "Set engine.openvino.num_threads to that, or give the container more.",
        )
    return ProbeResult("processor", f"{model}, {count(machine.cpu_count, 'core')}")


def _features(cpuinfo: Path) -> ProbeResult:
    fields = _read(cpuinfo)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    if not flags:
        return ProbeResult("features", f"unknown: {cpuinfo} does not say", "note")
    found = list(dict.fromkeys(name for flag, name in FEATURES.items() if flag in flags))
    computes = (
        "the CPU engine computes in bf16" if native_bf16(cpuinfo) else "no native bf16: the CPU engine computes in f32"
    )
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return ProbeResult(
            "features", "no AVX2", "bad", "OpenVINO's CPU plugin is slow or fails here; use another machine."
        )
    return ProbeResult("features", f"{', '.join(found) or 'none of note'}; {computes}")


def _memory(machine: Machine) -> ProbeResult:
    text = show_bytes(machine.memory_bytes)
    if machine.memory_limited:
        text += " (limit of this container)"
    if machine.memory_bytes < 4 * GIB:
        return ProbeResult("memory", text, "note", "While quantizing, the libraries alone take 2 GiB.")
    return ProbeResult("memory", text)


def _python() -> ProbeResult:
    return ProbeResult("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")


def _read(cpuinfo: Path) -> dict[str, str]:
    """Read the first processor's fields; empty where there is no such file."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
