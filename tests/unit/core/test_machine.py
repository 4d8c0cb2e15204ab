"""Facts of the machine, and which engine they choose."""

import subprocess

import pytest

from pipelines.engines.registry import choose, lacks_for_tensorrt_engines
from pipelines.host import machine
from pipelines.host.machine import (
    GpuFacts,
    Machine,
    gather,
    has_amx,
    has_vnni,
    int8_saturates,
    library_versions,
    native_bf16,
)

MACHINE = Machine(2, 2**36, (), "nvidia-smi is not installed", has_tensorrt_llm=False, platform="test")
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 81559 * 2**20)


@pytest.fixture(autouse=True)
def _shown(monkeypatch):
    """The tests see no GPU; here, they see what nvidia-smi lists."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def with_gpu(**changes):
    values = {"cpu_count": 8, "memory_bytes": 2**38, "gpus": (H100,), "no_gpu_reason": "", "platform": "test"}
    return Machine(**{"has_tensorrt_llm": True, **values, **changes})


@pytest.mark.parametrize(
    ("wanted", "here", "name", "reason"),
    [
        ("auto", MACHINE, "openvino", "engine=auto: no NVIDIA GPU here, nvidia-smi is not installed"),
        ("auto", with_gpu(has_tensorrt_llm=False), "openvino", "engine=auto: the Python package tensorrt_llm is not"),
        ("auto", with_gpu(), "tensorrt_llm", "engine=auto: NVIDIA H100 80GB HBM3 and tensorrt_llm are available"),
        ("openvino", with_gpu(), "openvino", "asked for"),
        ("tensorrt_llm", MACHINE, "tensorrt_llm", "asked for"),
    ],
)
def test_the_engine_is_chosen_and_the_reason_said(wanted, here, name, reason):
    choice = choose(wanted, here)
    assert choice.engine.name == name
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize(
    ("version", "name", "reason"),
    [
        ("1.2.1", "tensorrt_llm", "engine=auto: NVIDIA H100 80GB HBM3 and tensorrt_llm are available"),
        ("1.3.0rc20", "openvino", "engine=auto: tensorrt_llm 1.3.0rc20 no longer supports TensorRT engines; 1.2 does"),
        ("2.0", "openvino", "engine=auto: tensorrt_llm 2.0 no longer supports TensorRT engines; 1.2 does"),
    ],
)
def test_a_tensorrt_llm_without_engines_is_not_chosen(monkeypatch, version, name, reason):
    monkeypatch.setattr(machine, "_version", lambda _path, _name: version)
    assert (choose("auto", with_gpu()).engine.name, choose("auto", with_gpu()).reason) == (name, reason)
    assert any("no longer supports TensorRT engines" in lack for lack in lacks_for_tensorrt_engines(with_gpu())) == (
        name == "openvino"
    )


def test_gpus_are_read_from_nvidia_smi(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    answer = subprocess.CompletedProcess([], 0, "NVIDIA H100 80GB HBM3, 9.0, 81559\nNVIDIA A10, 8.6, 23028\n", "")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: answer)
    gpus, reason = machine._gpus()
    assert gpus == (H100, GpuFacts("NVIDIA A10", 8.6, 23028 * 2**20))
    assert reason == ""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "B", "C"]),
        ("1", ["B"]),
        ("2,0", ["C", "A"]),
        ("0,7,1", ["A"]),  # as CUDA does: the first that does not exist ends the list
        ("GPU-bb", ["B"]),
        ("MIG-1234", ["A", "B", "C"]),
    ],
)
def test_gpus_that_cuda_does_not_show_are_not_there(monkeypatch, visible, names):
    """A job of a cluster sees its own GPUs; nvidia-smi lists all."""
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    listed = "".join(f"{name}, 9.0, 81559, 580.1, GPU-{name.lower() * 2}-1\n" for name in "ABC")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: subprocess.CompletedProcess([], 0, listed, ""))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, reason = machine._gpus()
    assert ([gpu.name for gpu in gpus], reason) == (names, "")
    assert {gpu.driver for gpu in gpus} == {"580.1"}


@pytest.mark.parametrize("visible", ["", "-1", "3", "GPU-"])
def test_hidden_gpus_are_said(monkeypatch, visible):
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    listed = "A, 9.0, 81559, 580.1, GPU-aa\nB, 9.0, 81559, 580.1, GPU-bb\n"
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: subprocess.CompletedProcess([], 0, listed, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine._gpus() == ((), f"CUDA_VISIBLE_DEVICES='{visible}' hides what nvidia-smi lists")


def test_a_broken_driver_is_said(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    answer = subprocess.CompletedProcess([], 9, "", "NVIDIA-SMI has failed because it couldn't communicate\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: answer)
    assert machine._gpus() == ((), "nvidia-smi says: NVIDIA-SMI has failed because it couldn't communicate")


def test_gather_knows_memory_and_processors():
    here = gather()
    assert here.memory_bytes > 2**28
    assert here.cpu_count >= 1


def test_an_absent_library_has_a_version_word():
    assert library_versions(("no-such-distribution",)) == {"no-such-distribution": "absent"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (subprocess.CompletedProcess([], 0, "Tesla V100, [N/A], 16160, 470.1\n", ""), "nvidia-smi reports too little"),
        (subprocess.CompletedProcess([], 0, "NVIDIA GB10, 12.1, [N/A], 580.1\n", ""), "nvidia-smi reports too little"),
        (subprocess.CompletedProcess([], 3, "", ""), "nvidia-smi says: nothing, exit code 3"),
        (subprocess.CompletedProcess([], 0, "", ""), "nvidia-smi lists none"),
    ],
)
def test_a_strange_answer_of_nvidia_smi_is_no_crash(monkeypatch, answer, reason):
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: answer)
    gpus, said = machine._gpus()
    assert gpus == ()
    assert said.startswith(reason)


def test_the_driver_is_read_where_it_is_told(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    answer = subprocess.CompletedProcess([], 0, "NVIDIA L4, 8.9, 23034, 590.44.01\n", "")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_a, **_k: answer)
    assert machine._gpus()[0] == (GpuFacts("NVIDIA L4", 8.9, 23034 * 2**20, "590.44.01"),)


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\n\n", True),
        ("Features\t: fp asimd i8mm bf16\n\n", True),
        ("flags\t\t: avx2\n\nflags\t\t: avx512_bf16\n\n", False),  # the first processor decides
    ],
)
def test_bf16_is_native_where_linux_shows_the_flag(tmp_path, cpuinfo, native):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert native_bf16(tmp_path / "cpuinfo") is native


def test_without_cpuinfo_bf16_is_not_native(tmp_path):
    assert not native_bf16(tmp_path / "cpuinfo")


@pytest.mark.parametrize(
    ("cpuinfo", "saturates"),
    [
        ("flags\t\t: fpu sse2 avx2\n\n", True),
        ("flags\t\t: fpu sse2 avx2 avx512f avx512bw\n\n", True),
        ("flags\t\t: fpu sse2 avx2 avx_vnni\n\n", False),
        ("flags\t\t: fpu sse2 avx512f avx512_vnni\n\n", False),
        ("flags\t\t: fpu sse2 amx_tile amx_int8\n\n", False),
        ("Features\t: fp asimd asimddp\n\n", False),
    ],
)
def test_int8_sums_are_cut_off_on_x86_without_vnni(tmp_path, cpuinfo, saturates):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert int8_saturates(tmp_path / "cpuinfo") is saturates


@pytest.mark.parametrize(
    ("cpuinfo", "vnni", "amx"),
    [
        ("flags\t\t: fpu sse2 avx2\n\n", False, False),
        ("flags\t\t: fpu sse2 avx2 avx_vnni\n\n", True, False),
        ("flags\t\t: fpu avx512f avx512_vnni avx512_bf16\n\n", True, False),
        ("flags\t\t: fpu avx512f avx512_vnni amx_bf16 amx_int8\n\n", True, True),
        ("Features\t: fp asimd i8mm bf16\n\n", False, False),
    ],
)
def test_vnni_and_amx_are_where_linux_shows_the_flags(tmp_path, cpuinfo, vnni, amx):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert (has_vnni(tmp_path / "cpuinfo"), has_amx(tmp_path / "cpuinfo")) == (vnni, amx)


def test_a_version_is_that_of_where_packages_are_looked_for(tmp_path, monkeypatch):
    """What was read before is not told of another path."""
    for number in ("1.0", "2.0"):
        info = tmp_path / number / "its_own-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: its-own\nVersion: {number}\n")
        assert number not in library_versions(("its-own",)).values()
        monkeypatch.syspath_prepend(str(tmp_path / number))
        assert library_versions(("its-own",)) == {"its-own": number}
