"""Defaults that give way to what a user gives, and shipped experiments, which are planned on any machine."""

from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.host.machine import GpuFacts
from pipelines.plan.plan import make_plan
from pipelines.plan.targets import farthest
from pipelines.settings.compose import load
from pipelines.settings.groups import choices
from pipelines.store.store import Store
from tests.unit.core.test_machine import MACHINE, with_gpu

A10 = GpuFacts("NVIDIA A10", 8.6, 23028 * 2**20)
MACHINES = {
    "no GPU": MACHINE,
    "no GPU and little memory": replace(MACHINE, memory_bytes=2**33),
    "an H100": with_gpu(),
    "an H100 and little memory": with_gpu(memory_bytes=2**33),
    "an A10": with_gpu(gpus=(A10,)),
    "an A10 without TensorRT-LLM": with_gpu(gpus=(A10,), has_tensorrt_llm=False),
}


def plan(tmp_path, words, target="all", machine=MACHINE):
    return make_plan(load(words), target, Store(tmp_path / "store"), machine)


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_is_planned_on_any_machine(tmp_path, experiment):
    settings = load([f"experiment={experiment}"])
    for machine in MACHINES.values():
        assert make_plan(settings, farthest(settings), Store(tmp_path), machine).steps


def test_memory_that_this_machine_lacks_stops_a_run_and_not_a_plan(tmp_path, monkeypatch):
    """A GPU that is named is planned for; what keeps it from running here is said beside the plan."""
    monkeypatch.setattr("pipelines.engines.registry.lacks_for_tensorrt_engines", lambda _machine: [])
    monkeypatch.setattr("pipelines.engines.registry.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("pipelines.host.machine._version", lambda _path, _name: "1.2.1")
    words = ["experiment=llama_3_1_70b_h100_int4_awq_tp2"]
    (fault,) = plan(tmp_path, words, machine=with_gpu(memory_bytes=2**33)).not_here
    assert "llama_3_1_70b needs about" in fault.message
    assert "this machine has 8.0 GiB" in fault.message


@pytest.mark.parametrize("quant", ["none", "int8_sq", "int4_awq", "int8_wo", "int4_wo"])
def test_an_fp8_kv_cache_turns_reuse_off_where_it_must_and_says_so(tmp_path, quant):
    made = plan(tmp_path, ["kv_cache=fp8", f"quant={quant}"], "repository")
    assert made.settings.kv_cache.enable_block_reuse is False
    (note,) = [note for note in made.notes if "enable_block_reuse" in note]
    assert note.startswith("kv_cache.enable_block_reuse=false: ")
    assert f"kv_cache=fp8 and quant={quant}" in note
    assert made.steps[-1].node.stage.identity()["enable_block_reuse"] is False


def test_reuse_that_is_asked_for_is_not_turned_off(tmp_path):
    for asked in ("kv_cache.enable_block_reuse=true", "reuse=system_prompt"):
        with pytest.raises(UserError, match=r"kv_cache=fp8 with quant=int4_awq rules out KV-cache reuse"):
            plan(tmp_path, ["kv_cache=fp8", "quant=int4_awq", asked])


def test_reuse_stays_on_where_the_format_allows_it(tmp_path):
    for words in (["kv_cache=fp8", "quant=fp8"], ["quant=int4_awq"], ["kv_cache=auto"]):
        made = plan(tmp_path, words, "repository")
        assert made.settings.kv_cache.enable_block_reuse is True
        assert not any("enable_block_reuse" in note for note in made.notes)


@pytest.mark.parametrize("where", [[], ["engine=tensorrt_llm"], ["hardware=h100_sxm", "model=llama_3_2_1b"]])
def test_a_short_sequence_alone_shortens_the_prompt(tmp_path, where):
    made = plan(tmp_path, ["build.max_seq_len=512", *where], "repository")
    assert (made.settings.build.max_seq_len, made.settings.build.max_input_len) == (512, 512)
    assert "build.max_input_len=512: no prompt is longer than build.max_seq_len=512" in made.notes
    assert not made.settings.build.given("max_input_len") or where


def test_a_prompt_that_is_given_is_not_shortened(tmp_path):
    with pytest.raises(UserError, match=r"max_input_len=1024 is more than max_seq_len=512"):
        plan(tmp_path, ["build.max_seq_len=512", "build.max_input_len=1024"])


def test_visual_tokens_without_images_mean_nothing(tmp_path):
    """They were refused with the advice to use multimodal=none, which it was."""
    assert plan(tmp_path, ["multimodal.visual_tokens=60"], "repository").steps
