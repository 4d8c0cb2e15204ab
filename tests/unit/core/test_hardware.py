"""Which row of conf/hardware a GPU is, by what nvidia-smi says of it."""

import pytest

from pipelines.host.machine import GpuFacts
from pipelines.predict.performance.gpus import describe, resolved, row_of, rows, usable_bytes
from pipelines.settings.compose import load
from tests.unit.core.test_machine import H100, MACHINE, with_gpu

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "sm", "mib", "row"),
    [
        ("NVIDIA H100 80GB HBM3", 9.0, 81559, "h100_sxm"),
        ("NVIDIA H100 PCIe", 9.0, 81559, "h100_pcie"),
        ("NVIDIA H200", 9.0, 143771, "h200_sxm"),
        ("NVIDIA A10", 8.6, 23028, "a10"),
        ("NVIDIA A100-SXM4-40GB", 8.0, 40960, "a100_sxm_40gb"),
        ("NVIDIA A100-SXM4-80GB", 8.0, 81920, "a100_sxm_80gb"),
        ("NVIDIA GH200 480GB", 9.0, 97871, "gh200_96gb"),
        ("NVIDIA GH200 480GB", 9.0, 146831, "gh200_144gb"),
        ("NVIDIA L4", 8.9, 23034, "l4"),
        ("NVIDIA B200", 10.0, 183359, "b200_sxm"),
        ("NVIDIA B300 SXM6 AC", 10.3, 275040, "b300_sxm"),
        ("NVIDIA GB300", 10.3, 284208, "gb300"),
        ("NVIDIA H20", 9.0, 97871, "h20_sxm"),
        ("NVIDIA A10G", 8.6, 23028, "a10g"),
        ("Tesla T4", 7.5, 15360, "t4"),
        ("NVIDIA GeForce RTX 5090", 12.0, 32607, "rtx_5090"),
    ],
)
def test_a_gpu_is_found_by_name_and_memory(name, sm, mib, row):
    assert row_of(GpuFacts(name, sm, mib * MIB)).name == row


@pytest.mark.parametrize(
    ("name", "sm", "mib"),
    [("NVIDIA A40", 8.6, 46068), ("NVIDIA H100 80GB HBM3", 9.0, 40000), ("NVIDIA GeForce RTX 3090", 8.6, 24576)],
)
def test_a_gpu_that_is_not_listed_is_no_near_one(name, sm, mib):
    """A slice of an H100 has not its bandwidth."""
    assert row_of(GpuFacts(name, sm, mib * MIB)) is None


def test_every_row_says_what_nvidia_smi_calls_it():
    assert [row.name for row in rows() if not row.nvidia_smi] == ["auto"]


def test_auto_takes_rates_of_the_row_and_memory_of_the_gpu():
    found = resolved(load([]).hardware, with_gpu())
    assert (found.name, found.mem_bw_gb_s, found.sm) == ("h100_sxm", 3350, 9.0)
    assert (found.memory_gb, usable_bytes(found)) == (80.0, pytest.approx(81559 * MIB))


def test_memory_of_a_data_sheet_is_close_to_what_the_driver_counts():
    """MiB of nvidia-smi; an L40S has ECC in its GDDR6."""
    named = {row.name: usable_bytes(row) / MIB for row in rows()}
    assert named["h100_sxm"] == pytest.approx(81559, rel=0.005)
    assert named["l40s"] == pytest.approx(46068, rel=0.005)
    assert named["h200_sxm"] == pytest.approx(143771, rel=0.005)
    others = {"b300_sxm": 275040, "gb300": 284208, "h20_sxm": 97871, "a10g": 23028, "t4": 15360, "rtx_5090": 32607}
    assert {name: named[name] for name in others} == pytest.approx(others, rel=0.005)


def test_auto_keeps_what_is_said_of_an_unknown_gpu():
    unknown = with_gpu(gpus=(GpuFacts("NVIDIA A40", 8.6, 46068 * MIB),) * 2)
    found = resolved(load([]).hardware, unknown)
    assert (found.name, found.gpu, found.sm, found.mem_bw_gb_s) == ("auto", "NVIDIA A40", 8.6, None)
    assert describe(load([]).hardware, unknown).startswith(
        "hardware: 2 x NVIDIA A40 (from nvidia-smi); not in conf/hard"
    )


def test_a_gpu_that_is_named_is_taken_whatever_is_here():
    named = load(["hardware=a10"]).hardware
    assert resolved(named, with_gpu()) == named
    assert describe(named, with_gpu()) == ""


def test_without_a_gpu_auto_stands_for_nothing():
    assert resolved(load([]).hardware, MACHINE) == load([]).hardware


def test_gpus_of_two_kinds_are_told_apart():
    mixed = with_gpu(gpus=(H100, GpuFacts("NVIDIA A10", 8.6, 23028 * MIB)))
    said = describe(load([]).hardware, mixed)
    assert said.endswith("= hardware=h100_sxm, 3,350 GB/s; also present and not used: NVIDIA A10")
