"""Facts of this machine, gathered once while planning."""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipelines.domain.units import MIB

CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number of this size where there is no limit."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as nvidia-smi reports it: name, compute capability (9.0), memory in bytes, driver version."""

    name: str
    sm: float
    memory_bytes: int
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide which engine runs on this machine and what fits.

    Attributes:
        cpu_count: processors this process may use.
        memory_bytes: RAM, or the container's share of it.
        gpus: NVIDIA GPUs; empty when there is none.
        no_gpu_reason: why `gpus` is empty, for messages.
        has_tensorrt_llm: the Python package is installed.
        memory_limited: whether `memory_bytes` is the limit of a container.
    """

    cpu_count: int
    memory_bytes: int
    gpus: tuple[GpuFacts, ...]
    no_gpu_reason: str
    has_tensorrt_llm: bool
    platform: str
    memory_limited: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON, for manifests."""
        return asdict(self)


def gather() -> Machine:
    """Gather the facts of this machine; starts nothing heavier than nvidia-smi."""
    gpus, reason = _gpus()
    ram, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit(CGROUP)
    return Machine(
        cpu_count=cpu_count(),
        memory_bytes=min(ram, limit or ram),
        gpus=gpus,
        no_gpu_reason=reason,
        has_tensorrt_llm=importlib.util.find_spec("tensorrt_llm") is not None,
        platform=f"{platform.system()} {platform.machine()} Python {platform.python_version()}",
        memory_limited=limit is not None and limit < ram,
    )


def cpu_count() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def trim_heap() -> None:
    """Return memory that this process has freed to the system, where the C library is glibc; others may keep it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor has native bf16 products (AVX512, AMX or Arm), by the flags Linux reports."""
    return bool(_flags(cpuinfo) & {"avx512_bf16", "amx_bf16", "bf16"})


def has_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor has AVX-512, by the flags Linux reports."""
    return "avx512f" in _flags(cpuinfo)


def has_vnni(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether an x86 processor has VNNI, in its AVX-512 or AVX form, by the flags Linux reports."""
    return bool(_flags(cpuinfo) & {"avx512_vnni", "avx_vnni"})


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies tiles of bf16 (AMX), by the flags Linux reports."""
    return "amx_bf16" in _flags(cpuinfo)


def int8_saturates(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether sums of two INT8 products are cut off at 16 bits: x86 processors without VNNI (or AMX)."""
    flags = _flags(cpuinfo)
    return "sse2" in flags and not has_vnni(cpuinfo) and "amx_int8" not in flags


@cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    """Return the words of the first processor; none where Linux does not say."""
    try:
        return frozenset(cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].split())
    except OSError:
        return frozenset()


def memory_limit(cgroup: Path) -> int | None:
    """Return the memory limit of the container in bytes (control groups version 2, then 1), or None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _control(cgroup / name)
        if text.isdigit() and int(text) < UNLIMITED:
            return int(text)
    return None


def cpu_quota(cgroup: Path) -> float | None:
    """Return how many processors the container may use (control groups version 2, then 1), or None without a limit."""
    fields = _control(cgroup / "cpu.max").split() or [
        _control(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")
    ]
    if len(fields) == 2 and all(word.isdigit() for word in fields) and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    return None


def _control(file: Path) -> str:
    """Read a file of the control group; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _gpus() -> tuple[tuple[GpuFacts, ...], str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "nvidia-smi is not installed"
    query = [tool, "--query-gpu=name,compute_cap,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi failed: {error}"
    if answer.returncode != 0:
        output = (answer.stdout or answer.stderr).strip().splitlines() or [f"nothing, exit code {answer.returncode}"]
        return (), f"nvidia-smi says: {output[-1]}"
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if lines and visible is not None and not (lines := _visible(lines, visible)):
        return (), f"CUDA_VISIBLE_DEVICES='{visible}' hides what nvidia-smi lists"
    gpus = []
    for line in lines:
        try:
            name, sm, memory, *driver = (cell.strip() for cell in line.split(","))
            gpus.append(GpuFacts(name, float(sm), int(memory) * MIB, *driver[:1]))
        except ValueError:  # "[N/A]" from a driver too old to report it, or for memory shared with the CPU
            return (), f"nvidia-smi reports too little about '{lines[0].strip()}'"
    return tuple(gpus), "" if gpus else "nvidia-smi lists none"


def _visible(lines: Sequence[str], visible: str) -> list[str]:
    """Return the lines of the GPUs that CUDA shows its programs, by index or beginning of the UUID.

    As in CUDA, the first word that is no GPU ends the list. Slices of a GPU (MIG) have no lines, so all are returned.
    """
    chosen: list[str] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.startswith("MIG-"):
            return list(lines)
        named = [line for line in lines if word.startswith("GPU-") and line.rpartition(",")[2].strip().startswith(word)]
        if word.isdigit() and int(word) < len(lines):
            named = [lines[int(word)]]
        if len(named) != 1:
            break
        chosen += named
    return chosen


def torch_device(machine: Machine) -> str:
    """Return where PyTorch computes here: "cuda" with a GPU and a PyTorch that can use it, else "cpu"."""
    without_cuda = library_versions(("torch",))["torch"].endswith("+cpu")
    return "cuda" if machine.gpus and not without_cuda else "cpu"


def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the installed version of each distribution, "absent" where it is not installed."""
    return {name: _version(tuple(sys.path), name) for name in names}


@cache  # a plan asks dozens of times, and each reading parses a file of some hundred lines
def _version(_path: tuple[str, ...], name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def git(root: Path, *arguments: str) -> str | None:
    """Return what `git WORDS` prints in a folder, or None.

    None also where the folder is not the top of a checkout: an installed package may lie inside a repository of someone
    else, whose commit says nothing about this project.
    """
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
