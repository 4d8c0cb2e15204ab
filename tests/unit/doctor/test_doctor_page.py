"""The whole diagnosis: what works here, the page, the JSON, the exit code."""

import json
import re
from dataclasses import replace

import pytest

from pipelines.doctor.doctor_command import doctor, examine, judge_combinations
from pipelines.doctor.versions import CombinationVerdict, Diagnosis, ProbeResult, render
from pipelines.settings.compose import load
from tests.unit.core.test_machine import MACHINE, with_gpu

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def judged(machine, *overrides):
    return {(v.engine, v.model, v.quant): v for v in judge_combinations(load(overrides), machine)}


def test_without_a_gpu_the_cpu_engine_runs_and_the_others_say_why():
    found = judged(MACHINE)
    assert found["openvino", "tiny_llama", "int4_awq"].works
    assert found["openvino", "tiny_llava", "int4_awq"].works
    unknown = [found["openvino", "llama_3_1_70b", quant] for quant in ("w4a8_awq", "int4_awq")]
    assert (unknown[0].works, unknown[1].works) == (True, False)
    page = render(Diagnosis({}, unknown))
    assert re.search(r"llama_3_1_70b +\? +a\n", page)
    assert "?: memory: unknown, because the CPU engine's was not measured for w4a8_awq." in " ".join(page.split())
    refused = found["tensorrt_llm", "tiny_llama", "int4_awq"]
    assert "there is no NVIDIA GPU (nvidia-smi is not installed)" in refused.reason
    assert "make shell" in refused.todo
    elsewhere = [found[engine, "tiny_llama", "int4_awq"].todo for engine in ("tensorrt_llm_llmapi", "tensorrt_edge")]
    assert "(image.base_llm_api) serves them" in elsewhere[0]
    assert all("`make build` makes its files here" in todo and "make shell" not in todo for todo in elsewhere)


def test_verdicts_are_those_of_the_rules(monkeypatch):
    """The words of `make plan quant=nvfp4` on an H100, and of a model that this machine cannot hold."""
    monkeypatch.setattr("pipelines.engines.registry.shutil.which", lambda name: f"/usr/bin/{name}")
    found = judged(with_gpu(memory_bytes=2**33))
    assert found["tensorrt_llm", "llama_3_1_8b", "fp8"].works
    assert "needs FP4 arithmetic" in found["tensorrt_llm", "llama_3_1_8b", "nvfp4"].reason
    assert "of memory while quantizing" in found["tensorrt_llm", "llama_3_1_70b", "fp8"].reason


def test_a_model_that_can_be_built_and_not_served_here_does_not_work():
    verdict = judged(replace(MACHINE, memory_bytes=24 * 2**30))["openvino", "llama_3_1_70b", "fp8"]
    assert re.search(
        r"llama_3_1_70b in fp8 with engine=openvino needs 30\d\.\d GiB; this machine has 24", verdict.reason
    )


def test_the_page_fits_60_columns_and_shares_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    settings = load([f"paths.store={tmp_path}/store", f"paths.runs={tmp_path}/runs"])
    page = render(examine(settings, MACHINE, {**OFFLINE, "HF_HOME": "/hf"}))
    assert max(len(line) for line in page.splitlines() if "/" not in line) <= 60
    assert page.count("of memory while") <= 1
    assert "The configured pipeline runs here: make all" in page


def test_a_shared_reason_is_true_for_every_model_under_its_letter():
    """Numbers of other models do not stand as the first one's."""

    def refused(model: str, quant: str, size: str) -> CombinationVerdict:
        return CombinationVerdict(
            "openvino",
            model,
            quant,
            works=False,
            reason=f"{model} needs {size} GiB; here are 23.5 GiB.",
            todo="Take less.",
        )

    cases = [
        refused("gemma_7b", "none", "33.8"),
        refused("gemma_7b", "fp8", "26.6"),
        refused("llama_8b", "none", "31.9"),
        refused("llama_8b", "fp8", "31.9"),
        refused("llama_70b", "none", "264.8"),
        refused("llama_70b", "fp8", "201.1"),
    ]
    page = " ".join(render(Diagnosis({}, cases)).split())
    assert "a: gemma_7b needs 26.6 to 33.8 GiB; here are 23.5 GiB." in page
    assert "Likewise llama_8b (31.9 GiB); llama_70b (201.1 to 264.8 GiB). Take less." in page
    assert "b:" not in page


def test_a_broken_thing_is_said_last_with_what_to_do():
    broken = ProbeResult("store", "/data is not writable", "bad", "Give another folder than paths.store=/data.")
    verdict = CombinationVerdict("openvino", "tiny_llama", "fp8", works=True)
    page = render(Diagnosis({"Places": [broken]}, [verdict], [broken]))
    assert page.splitlines()[-2].startswith("The configured pipeline does not run here:")
    assert "!! store: /data is not writable. Give another folder" in page.splitlines()[-1]


def test_what_the_configured_pipeline_needs_decides_the_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = [f"paths.store={tmp_path}/store", f"paths.runs={tmp_path}/runs", "doctor.format=json"]
    assert doctor(words) == 0
    assert json.loads(capsys.readouterr().out)["works"] is True
    (tmp_path / "file").write_text("")
    assert doctor([*words, f"paths.store={tmp_path}/file/store"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["works"]) == (1, False)
    assert any("cannot be created" in each["value"] for each in said["broken"])
    assert {"name", "value", "status", "todo"} == set(said["sections"]["Places"][0])


@pytest.mark.parametrize("overrides", [["quant=nvfp4", "model=tiny_gemma"]])
def test_a_configuration_that_no_machine_runs_is_broken(tmp_path, overrides):
    settings = load([f"paths.store={tmp_path}/store", *overrides])
    (broken,) = examine(settings, MACHINE, OFFLINE).broken
    assert "nvfp4 is not supported" in broken.value


def test_an_engine_that_this_machine_cannot_run_is_broken(tmp_path):
    settings = load([f"paths.store={tmp_path}/store", "engine=tensorrt_llm"])
    (broken,) = examine(settings, MACHINE, OFFLINE).broken
    assert "engine=tensorrt_llm cannot run here: there is no NVIDIA GPU" in broken.value
