"""GPUs as described by their data sheets: the files of conf/hardware, in SI units."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.units import GIB
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import runs_on_cpu
from pipelines.host.machine import GpuFacts, Machine
from pipelines.predict.performance.measured import Measured, Served
from pipelines.settings.groups import CONF
from pipelines.settings.root import Settings

BRIDGED = {"a30": 2, "a100_pcie_40gb": 2, "a100_pcie_80gb": 2, "h100_pcie": 2, "h100_nvl": 2, "h200_nvl": 4}
"""Number of GPUs that an NVLink bridge joins, by the notes of their data sheets; larger groups use PCIe."""
ACROSS_SERVERS = {"gb200": 72, "gb300": 72, "gh200_96gb": 32, "gh200_144gb": 32}
"""Number of GPUs that NVLink joins where it leaves the server: NVIDIA's GB200 and GB300 NVL72, and GH200 NVL32."""
SAME_CHIP = {"a100_pcie_40gb": "a100_pcie_80gb", "a100_sxm_40gb": "a100_sxm_80gb"}
"""GPUs that were not measured, and the measured one that has the same chip in the same form with another memory. How
far that one is from its data sheet is due to what they share, which a mean over all GPUs does not tell."""
NEEDED = (
    "memory_gb", "mem_bw_gb_s", "fp16_dense_tflops", "sparse_multiplier", "nvlink_gb_s_bidir", "pcie_gb_s_per_dir",
    "gpus_per_server", "tdp_w", "sm", "arch",
)  # fmt: skip
"""Fields of a GPU that the performance model needs."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU by its data sheet. Rates are dense, per GPU.

    Attributes:
        name: name of the file in conf/hardware.
        gpu: name for people, e.g. "H100-SXM-80GB".
        memory_gb: memory size by the data sheet.
        reported_bytes: memory that the driver reports, which is what an engine can use.
        bandwidth: memory bandwidth, bytes/s.
        peak: FLOP/s (or integer operations) by activation type: "16bit", "fp8", "int8", "fp4"; absent if unsupported.
        sparse_multiplier: data-sheet rate with 2:4 sparsity over the dense one.
        nvlink: bytes/s in one direction; 0 means none.
        pcie: bytes/s in one direction.
        host: to the host's memory, bytes/s in one direction: PCIe, or NVLink-C2C.
        tdp_w: power, W.
        arch: e.g. "Hopper GH100".
    """

    name: str
    gpu: str
    memory_gb: float
    reported_bytes: float
    bandwidth: float
    peak: Mapping[str, float]
    sparse_multiplier: float
    nvlink: float
    pcie: float
    host: float
    gpus_per_server: int
    tdp_w: float
    sm: float
    arch: str

    @property
    def tp_most(self) -> int:
        """GPUs that NVLink or PCIe joins; more are joined by a network, whose speed is not known."""
        return max(self.gpus_per_server, ACROSS_SERVERS.get(self.name, 0))

    def link(self, ranks: int) -> tuple[str, float]:
        """Return the link between this many GPUs in a server ("nvlink" or "pcie") and its bytes/s in one direction."""
        if self.nvlink and ranks <= BRIDGED.get(self.name, ranks):
            return "nvlink", self.nvlink
        return "pcie", self.pcie

    @property
    def half_rate(self) -> bool:
        """Whether products with sums in float32 run at half the rate of the tensor cores, as on a GeForce."""
        return self.peak.get("int8", 0.0) > 3.9 * self.peak["16bit"]

    @property
    def family(self) -> str:
        """Generation: turing, ampere, ada, hopper, blackwell, or blackwell_rtx, whose SM 120 has other tensor cores."""
        return self.arch.split()[0].lower() + ("_rtx" if self.sm >= 12.0 else "")


@cache
def rows() -> tuple[HardwareSettings, ...]:
    """Read all files of conf/hardware."""
    files = sorted((CONF / "hardware").glob("*.yaml"))
    return tuple(HardwareSettings.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))) for file in files)


@cache
def gpus() -> Mapping[str, GpuSpec]:
    """Return all GPUs of conf/hardware by the name of their file."""
    return {row.name: data_sheet(row) for row in rows() if row.gpu}


def usable_bytes(hardware: HardwareSettings) -> float:
    """Return the GPU memory that its driver reports, bytes; 0 if not known.

    This is what nvidia-smi reported, or else derived from the data sheet, whose GB are rounded GiB. GB200 of 186 GB:
    189,471 MiB; RTX PRO 6000 of 96 GB: 97,887 MiB. ECC on GDDR6 takes a sixteenth of it: L40S of 48 GB: 46,068 MiB. A
    GeForce has no ECC and reports a sixteenth more than is computed here.
    """
    if hardware.reported_gb:
        return hardware.reported_gb * 1e9
    inline_ecc = (hardware.arch or "").lower().startswith(("ada", "turing")) or hardware.name in ("a10", "a10g")
    return (hardware.memory_gb or 0) * GIB * (15 / 16 if inline_ecc else 0.995)


def data_sheet(hardware: HardwareSettings) -> GpuSpec:
    """Convert a GPU of the settings to the form the performance model takes.

    Raises:
        UserError: its file in conf/hardware is incomplete.
    """
    row = hardware.model_dump()
    if missing := [key for key in NEEDED if row[key] is None]:
        raise UserError(
            f"conf/hardware has incomplete data for {hardware.gpu}: {', '.join(missing)} is missing.",
            todo="Choose the nearest GPU with hardware=..., or add a file for it to conf/hardware.",
        )
    rates = {
        "16bit": "fp16_dense_tflops", "fp8": "fp8_dense_tflops", "int8": "int8_dense_tops", "fp4": "fp4_dense_tflops",
    }  # fmt: skip
    return GpuSpec(
        name=row["name"],
        gpu=row["gpu"],
        memory_gb=row["memory_gb"],
        reported_bytes=usable_bytes(hardware),
        bandwidth=row["mem_bw_gb_s"] * 1e9,
        peak={kind: row[key] * 1e12 for kind, key in rates.items() if row[key]},
        sparse_multiplier=row["sparse_multiplier"],
        nvlink=row["nvlink_gb_s_bidir"] / 2 * 1e9,
        pcie=row["pcie_gb_s_per_dir"] * 1e9,
        host=(row["c2c_gb_s_per_dir"] or row["pcie_gb_s_per_dir"]) * 1e9,
        gpus_per_server=row["gpus_per_server"],
        tdp_w=row["tdp_w"],
        sm=row["sm"],
        arch=row["arch"],
    )


def gpu_named(text: str) -> GpuSpec:
    """Find a GPU by a name as people write it: "h100_sxm", "H100-SXM-80GB", "L40S-48GB".

    Raises:
        UserError: it is not known; suggests the nearest name.
    """
    by_name: dict[str, GpuSpec] = {}
    for spec in gpus().values():
        memory = f"{spec.memory_gb:.0f}gb"
        by_name |= {_plain(name): spec for name in (spec.name, spec.gpu, spec.gpu + memory)}
    gpu = by_name.get(_plain(text))
    if gpu is None:
        names = sorted(name for spec in gpus().values() for name in (spec.gpu, spec.name))
        raise UserError(
            f"The GPU '{text}' is not known.",
            allowed=f"Known: {', '.join(names)}.",
            todo=did_you_mean(text.lower(), [name.lower() for name in names]),
        )
    return gpu


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


# Match the GPUs of this machine with conf/hardware, to resolve `hardware=auto`.

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


def resolved(hardware: HardwareSettings, machine: Machine) -> HardwareSettings:
    """Resolve `hardware` here: `auto` means the first GPU of this machine, if it has one.

    Name, compute capability and memory come from nvidia-smi; bandwidth and peak rates from the data sheet, or None
    for a GPU without an entry in conf/hardware.
    """
    if hardware.name != "auto" or not machine.gpus:
        return hardware
    gpu = machine.gpus[0]
    facts: dict[str, Any] = {"sm": gpu.sm, "reported_gb": gpu.memory_bytes / 1e9, "gpus_per_server": len(machine.gpus)}
    row = row_of(gpu)
    if row is None:
        return HardwareSettings(name="auto", gpu=gpu.name, memory_gb=gpu.memory_bytes / 1e9, **facts)
    return row.model_copy(update=facts)


def describe(hardware: HardwareSettings, machine: Machine) -> str:
    """Describe what `hardware=auto` resolved to; empty if it resolved to nothing."""
    if hardware.name != "auto" or not machine.gpus:
        return ""
    gpu = machine.gpus[0]
    row = row_of(gpu)
    count = f"{len(machine.gpus)} x " if len(machine.gpus) > 1 else ""
    others = sorted({other.name for other in machine.gpus} - {gpu.name})
    mixed = f"; also present and not used: {', '.join(others)}" if others else ""
    if row is None:
        note = "not in conf/hardware, so its bandwidth is unknown"
        return f"hardware: {count}{gpu.name} (from nvidia-smi); {note}{mixed}"
    return f"hardware: {count}{gpu.name} = hardware={row.name}, {row.mem_bw_gb_s:,.0f} GB/s{mixed}"


# How many GPUs a measured rate belongs to: as the result says, or else as the user says; never assumed.
#
# 2.4 requests/s are 13 servers for 31 requests/s if a server of 8 GPUs did them, and 13 GPUs if one GPU did.

TELL = (
    "Add sizing.measured_gpus=8 (all GPUs that served the load; 1 for a server without GPUs), or the ranks of the one "
    "instance that was measured: sizing.tp=8 sizing.pp=1."
)


def stated_gpus(settings: Settings) -> Served:
    """Return what the settings say of the GPUs that were measured.

    Raises:
        UserError: they contradict each other.
    """
    sizing, build = settings.sizing, settings.build
    tp = _one(sizing.tp, "sizing.tp") or (build.tp_size if build.tp_size > 1 else None)
    pp = _one(sizing.pp, "sizing.pp") or (build.pp_size if build.pp_size > 1 else None)
    gpus = sizing.measured_gpus
    if tp is None and pp is None:
        ranks = 1 if gpus == 1 else None
        return Served(gpus, ranks, ranks, f"sizing.measured_gpus={gpus}") if gpus else Served()
    tp, pp = tp or 1, pp or 1
    if gpus is not None and gpus % (tp * pp):
        raise UserError(
            f"sizing.measured_gpus={gpus} is not a whole number of instances of TP {tp} x PP {pp} = {tp * pp} GPUs.",
            todo="Correct one of them.",
        )
    where = f"sizing.measured_gpus={gpus}" if gpus else "the ranks in the settings"
    return Served(gpus or tp * pp, tp, pp, where)


def _one(sizes: tuple[int, ...] | None, name: str) -> int | None:
    if sizes is None:
        return None
    if len(set(sizes)) > 1:
        raise UserError(
            f"{name}={list(sizes)} names several sizes, but one was measured.", todo=f"Give that one: {name}={sizes[0]}"
        )
    return sizes[0]


def with_gpus(measured: Measured, settings: Settings) -> Measured:
    """Complete a benchmark with what the settings say of its GPUs.

    Raises:
        UserError: neither says how many there were, or they contradict each other, also in the kind of GPU.
    """
    if runs_on_cpu(measured.engine):
        return measured
    hardware, gpu = settings.hardware.name, (measured.gpu or "").replace("-", " ")
    names = [row.name for row in rows() if gpu in {name.replace("-", " ") for name in row.nvidia_smi}]
    if hardware not in ("auto", *names) and names:
        raise UserError(
            f"hardware={hardware}, but {measured.sources[0]} was measured on {measured.gpu}.",
            todo=f"Set hardware={names[0]}, or give a result of {hardware}.",
        )
    seen, stated = measured.served, stated_gpus(settings)
    if seen.gpus is None and stated.gpus is None:
        raise UserError(
            f"{', '.join(measured.sources)} ({measured.tool}) does not say how many GPUs served the load.", todo=TELL
        )
    if stated.gpus is None:
        return measured
    if seen.gpus is None:
        return replace(measured, served=stated)
    if not seen.certain:
        note = f"{stated.source} counts, not the {seen.gpus} that telemetry shows."
        return replace(measured, served=stated, notes=(*measured.notes, *([note] if stated.gpus != seen.gpus else [])))
    pairs = (("GPUs", stated.gpus, seen.gpus), ("TP", stated.tp, seen.tp), ("PP", stated.pp, seen.pp))
    for name, mine, theirs in pairs:
        if None not in (mine, theirs) and mine != theirs:
            raise UserError(
                f"{name} is {mine} by {stated.source}, but {theirs} by {seen.source} in {measured.sources[0]}.",
                todo="Leave out the setting, or give the file of that deployment.",
            )
    return replace(measured, served=replace(seen, tp=seen.tp or stated.tp, pp=seen.pp or stated.pp))


def ranks(measured: Measured) -> tuple[int, int]:
    """Return TP and PP of the one instance that was measured, for a fit, which simulates one instance.

    Raises:
        UserError: they are not known, or there were several instances.
    """
    served = measured.served
    if served.tp is None or served.pp is None:
        raise UserError(
            f"{measured.sources[0]} ({measured.tool}) was served by {served.gpus} GPUs, but how they shared the model "
            "is not known.",
            todo="Add the ranks of the instance that was measured, e.g. sizing.tp=8 sizing.pp=1.",
        )
    if served.gpus is not None and served.gpus != served.tp * served.pp:
        raise UserError(
            f"{measured.sources[0]} ({measured.tool}) is from {served.gpus} GPUs, several instances of "
            f"TP {served.tp} x PP {served.pp}; a fit simulates one.",
            todo="Measure one instance. `make size sizing.measured=...` sizes from several.",
        )
    return served.tp, served.pp
