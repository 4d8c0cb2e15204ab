"""GPUs as described by their data sheets: the files of conf/hardware, in SI units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.units import GIB
from pipelines.settings.engine import HardwareSettings
from pipelines.settings.groups import CONF

BRIDGED = {"a30": 2, "a100_pcie_40gb": 2, "a100_pcie_80gb": 2, "h100_pcie": 2, "h100_nvl": 2, "h200_nvl": 4}
"""Number of GPUs that an NVLink bridge joins, by the notes of their data sheets; larger groups use PCIe."""
ACROSS_SERVERS = {"gb200": 72, "gh200_96gb": 32, "gh200_144gb": 32}
"""Number of GPUs that NVLink joins where it leaves the server: NVIDIA's GB200 NVL72 and GH200 NVL32."""
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
        gpus_per_server: GPUs of the usual server.
        tdp_w: power, W.
        sm: compute capability.
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
    def family(self) -> str:
        """Generation: ampere, ada, hopper or blackwell."""
        return self.arch.split()[0].lower()


@cache
def rows() -> tuple[HardwareSettings, ...]:
    """Read all files of conf/hardware."""
    import yaml

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
    inline_ecc = (hardware.arch or "").lower().startswith("ada") or hardware.name == "a10"
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
    rates = {"16bit": "fp16_dense_tflops", "fp8": "fp8_dense_tflops", "int8": "int8_dense_tops"}
    rates["fp4"] = "fp4_dense_tflops"
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
    known: dict[str, GpuSpec] = {}
    for spec in gpus().values():
        memory = f"{spec.memory_gb:.0f}gb"
        known |= {_plain(name): spec for name in (spec.name, spec.gpu, spec.gpu + memory)}
    found = known.get(_plain(text))
    if found is None:
        names = sorted(name for spec in gpus().values() for name in (spec.gpu, spec.name))
        raise UserError(
            f"The GPU '{text}' is not known.",
            allowed=f"Known: {', '.join(names)}.",
            todo=did_you_mean(text.lower(), [name.lower() for name in names]),
        )
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
