"""Each probe by itself: what it finds, and that it fails soft with its reason."""

import shutil
from collections import namedtuple

import pytest

from pipelines.doctor import doctor_command, versions
from pipelines.engines.tensorrt_edge import exporter
from pipelines.engines.tensorrt_llm import releases
from pipelines.host.machine import GpuFacts, cpu_quota, gather, memory_limit
from pipelines.serving.config import ServingSettings
from tests.conftest import ROOT
from tests.support.hub_server import HubServer
from tests.unit.core.test_machine import H100, MACHINE, with_gpu

SECRET = "hf_loopbackSecretThatNobodyMaySee"


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_a_gpu_is_told_with_its_row_driver_and_cuda(gpu):
    found = by_name(versions.probe_gpus(gather(), releases.release_for("1.2.1")))
    assert found["GPU 0"].value.endswith("compute capability 9.0, 79.6 GiB = hardware=h100_sxm")
    assert (found["driver"].value, found["driver"].status) == ("590.44.01, CUDA 13.1", "ok")


def test_a_driver_for_an_older_cuda_is_told(programs):
    programs("nvidia-smi", 'echo "CUDA Version: 12.4"')
    found = by_name(versions.probe_gpus(with_gpu(), releases.release_for("1.2.1")))["driver"]
    assert found.status == "note"
    assert "CUDA 12.4; TensorRT-LLM 1.2.1 is built for CUDA 13.1" in found.value
    assert found.todo == "Install a driver for CUDA 13 (590.44.01 or newer)."


def test_an_old_or_unknown_gpu_says_so():
    old, unknown = (GpuFacts(name, sm, 2**34) for name, sm in (("Tesla V100", 7.0), ("NVIDIA A10G", 8.6)))
    found = by_name(versions.probe_gpus(with_gpu(gpus=(old, unknown)), None))
    assert "8.0" in found["GPU 0"].todo
    assert found["GPU 1"].value.endswith("not in conf/hardware")


def test_no_gpu_and_a_broken_driver_have_their_reasons():
    (absent,) = versions.probe_gpus(MACHINE, None)
    assert (absent.value, absent.todo) == ("none: nvidia-smi is not installed", "")
    (broken,) = versions.probe_gpus(with_gpu(gpus=(), no_gpu_reason="nvidia-smi says: no devices"), None)
    assert broken.todo.startswith("Repair the driver")


def installed(monkeypatch, **found):
    """Pretend that these distributions are installed, and no others."""
    monkeypatch.setattr(
        "pipelines.host.machine._version", lambda _path, name: found.get(name.replace("-", "_"), "absent")
    )


CONTAINER = {
    "tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48", "nvidia_modelopt": "0.37.0", "transformers": "4.57.3",
    "torch": "2.10.0a0+b4e4ee81d3.nv25.12", "numpy": "1.26.4", "openvino": "2026.4.1", "openvino_genai": "2026.4.1.0",
}  # fmt: skip


def test_what_belongs_together_is_in_order(monkeypatch):
    installed(monkeypatch, **CONTAINER)
    found = by_name(versions.probe_software(ServingSettings()))
    assert [name for name in versions.LIBRARIES if found[name].status != "ok"] == []
    assert found["TensorRT-LLM"].value == "1.2.1 (container 26.04 to 26.07)"


def test_nvidias_container_needs_no_openvino(monkeypatch):
    installed(monkeypatch, **{name: version for name, version in CONTAINER.items() if "openvino" not in name})
    found = by_name(versions.probe_software(ServingSettings()))
    assert (found["openvino"].status, found["openvino"].todo) == ("note", "Only engine=openvino needs it.")


@pytest.mark.parametrize(
    ("name", "dist", "version", "wanted"),
    [
        ("TensorRT", "tensorrt", "10.13.3.9", "10.14.1"),
        ("transformers", "transformers", "5.14.1", "4.57.3"),
        ("torch", "torch", "2.13.0+cpu", "2.9.1 to 2.10.0"),
        ("ModelOpt", "nvidia_modelopt", "0.47.0", "0.37"),
    ],
)
def test_a_version_beside_the_table_is_told_with_the_right_one(monkeypatch, name, dist, version, wanted):
    installed(monkeypatch, **{**CONTAINER, dist: version})
    found = by_name(versions.probe_software(ServingSettings()))[name]
    assert found.status == "note"
    assert found.value.endswith(f"TensorRT-LLM 1.2.1 goes with {wanted}")


def test_releases_without_engines_and_unknown_ones_are_told(monkeypatch):
    installed(monkeypatch, **{**CONTAINER, "tensorrt_llm": "1.3.0rc20"})
    now = by_name(versions.probe_software(ServingSettings()))
    assert "no longer supports TensorRT engines" in now["TensorRT-LLM"].value
    installed(monkeypatch, **{**CONTAINER, "tensorrt_llm": "7.0"})
    assert "not in the table" in by_name(versions.probe_software(ServingSettings()))["TensorRT-LLM"].value


def test_what_is_missing_or_breaks_triton_is_broken(monkeypatch):
    installed(monkeypatch, numpy="2.3.0")
    found = by_name(versions.probe_software(ServingSettings()))
    assert {name for name in versions.LIBRARIES if found[name].status == "bad"} == {
        "ModelOpt", "transformers", "torch", "numpy", "openvino", "openvino-genai",
    }  # fmt: skip


def test_a_server_that_is_not_there_is_broken(tmp_path):
    found = by_name(versions.probe_software(ServingSettings(tritonserver=tmp_path / "nowhere")))["tritonserver"]
    assert found.status == "bad"
    assert "nowhere' is not an executable program" in found.value


def test_a_builder_with_other_options_is_told_option_by_option(programs):
    tool = programs("trtllm-build", "printf 'usage: trtllm-build\\n\\noptions:\\n  --brand_new_option N  of 1.9\\n'")
    found = versions.help_of_builder(str(tool))
    assert any("brand_new_option" in finding.value for finding in found)
    assert {finding.status for finding in found} == {"note"}


def test_a_builder_that_fails_is_told_with_its_last_words(programs):
    tool = programs("trtllm-build", "echo 'libcuda.so.1: cannot open shared object file' >&2; exit 1")
    (found,) = versions.help_of_builder(str(tool))
    assert found.value.endswith("libcuda.so.1: cannot open shared object file (exit code 1)")


def test_the_hub_answers_and_the_token_is_never_shown(tmp_path):
    with HubServer() as server:
        found = doctor_command.probe_hub({"HF_ENDPOINT": server.url, "HF_TOKEN": SECRET, "HF_HOME": str(tmp_path)}, 5)
    assert [(finding.value, finding.status) for finding in found] == [
        (f"{server.url} answers", "ok"),
        ("in HF_TOKEN", "ok"),
    ]
    (tmp_path / "token").write_text(SECRET)
    found = doctor_command.probe_hub({"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, 5)
    assert found[0].value.startswith("offline mode")
    assert found[1].value == f"in {tmp_path / 'token'}"
    assert SECRET not in repr(found)


def test_a_hub_that_is_not_there_is_a_note_with_a_way_out(tmp_path):
    with HubServer() as server:
        gone = server.url
    found = by_name(doctor_command.probe_hub({"HF_ENDPOINT": gone, "HF_HOME": str(tmp_path)}, 1))
    assert (found["Hub"].status, found["token"].status) == ("note", "note")
    assert f"{gone} does not answer" in found["Hub"].value
    assert (
        doctor_command.probe_hub({"HF_ENDPOINT": "huggingface.co"}, 1)[0].value
        == "HF_ENDPOINT='huggingface.co' is not an address"
    )


def test_a_folder_that_cannot_be_written_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.doctor.doctor_command.os.access", lambda *_: False)
    found = by_name(doctor_command.probe_places(tmp_path / "store", tmp_path / "runs", {"HF_HOME": str(tmp_path)}))
    assert {finding.status for finding in found.values()} == {"bad"}
    assert found["store"].todo == f"Give another folder than paths.store={tmp_path / 'store'}."


def test_a_file_in_the_way_is_broken(tmp_path):
    (tmp_path / "store").write_text("")
    found = by_name(doctor_command.probe_places(tmp_path / "store" / "deep", tmp_path, {}))["store"]
    assert found.value.endswith("store is a file")


def test_a_full_disk_is_broken_and_a_small_one_told(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    for free, status in ((2**29, "bad"), (2**32, "note"), (2**40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: usage(2**41, 0, free))
        assert by_name(doctor_command.probe_places(tmp_path, tmp_path, {}))["store"].status == status


def test_a_container_s_limits_are_told(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{8 * 2**30}\n")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Xeon\nflags\t\t: avx2 avx512f amx_bf16\n\nmodel name\t: second\n")
    found = by_name(doctor_command.probe_processor(MACHINE, cpuinfo=cpuinfo, cgroup=tmp_path))
    assert found["processor"].value == "Xeon, 2 cores, of which this container may use 1.5"
    assert found["features"].value == "AVX2, AVX512, AMX-BF16; the CPU engine computes in bf16"
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (1.5, 8 * 2**30)


@pytest.mark.parametrize(("memory", "cpu"), [("max", "max 100000"), ("9223372036854771712", "")])
def test_no_limit_is_no_limit(tmp_path, memory, cpu):
    (tmp_path / "memory.max").write_text(memory)
    (tmp_path / "cpu.max").write_text(cpu)
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (None, None)


def test_limits_of_version_1_are_read(tmp_path):
    for name, value in (("cpu/cpu.cfs_quota_us", 200000), ("cpu/cpu.cfs_period_us", 100000),
                        ("memory/memory.limit_in_bytes", 2**32)):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (2.0, 2**32)


def test_a_system_without_cpuinfo_is_no_crash(tmp_path):
    assert (
        by_name(doctor_command.probe_processor(MACHINE, cpuinfo=tmp_path / "none", cgroup=tmp_path))["features"].status
        == "note"
    )


def test_templates_are_held_against_our_table(tmp_path):
    assert doctor_command.probe_templates(tmp_path / "no container") == []
    for model in ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm_bls", "tensorrt_llm"):
        (tmp_path / model).mkdir()
        names = doctor_command.json.loads(doctor_command.TABLE.read_text())[model]
        (tmp_path / model / "config.pbtxt").write_text("\n".join(f'string_value: "${{{name}}}"' for name in names))
    (found,) = doctor_command.probe_templates(tmp_path)
    assert found.status == "ok"
    (tmp_path / "tensorrt_llm" / "config.pbtxt").write_text("${brand_new}")
    new, gone = doctor_command.probe_templates(tmp_path)
    assert new.value == "tensorrt_llm takes brand_new, unknown to this project"
    assert "does not take" in gone.value


def test_the_table_says_its_sources():
    table = releases.compatibility()
    assert set(table["sources"]) == {"tensorrt_llm", "containers", "engines", "edge"}
    assert H100.sm == 9.0


def test_versions_that_go_together_are_told_for_each_engine():
    found = by_name(versions.go_together("nvcr.io/nvidia/tensorrt-llm/release:9.9"))
    assert found["tensorrt_llm"].value.startswith(
        "TensorRT-LLM 1.2.1, Triton 26.04 to 26.07, TensorRT 10.14.1, ModelOpt"
    )
    assert found["llm_api"].value == "nvcr.io/nvidia/tensorrt-llm/release:9.9; Triton has none"
    assert "ModelOpt 0.37 and 0.47" in found["openvino"].value
    assert found["edge"].value.startswith(f"tensorrt-edgellm {exporter.VERSION}, torch ")


def test_the_page_has_the_table_of_versions():
    rows = releases.compatibility()["releases"]
    keys = ("tensorrt", "cuda", "driver", "modelopt", "transformers")
    for row in rows:
        tags = row["containers"]
        triton = "none" if not tags else tags[0] if len(tags) == 1 else f"{tags[0]} to {tags[-1]}"
        cells = (row["tensorrt_llm"], "yes" if row["engines"] else "no", triton, *(row[key] or "–" for key in keys))
        assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "row"), [("1.0.3.2510", "1.0.3"), ("1.0.0", "1.0"), ("0.17.0.post1", "0.17"), ("1.3.0rc20", "1.3")]
)
def test_the_row_of_a_version(version, row):
    assert releases.release_for(version)["tensorrt_llm"] == row
