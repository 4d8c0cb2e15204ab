"""The plan tunes every engine for itself, says what that sets, and leaves the CPU engine alone."""

import pytest

from pipelines.plan.plan import make_plan
from pipelines.predict.simulate.case import make_case
from pipelines.predict.sizing.question import ask
from pipelines.run.console import plan_text
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.engine_folders import write_engine
from tests.unit.sizing.test_limits_for_load import NO_GPU, planned

LLAMA_70B = ("engine=tensorrt_llm", "model=llama_3_1_70b", "hardware=h100_sxm", "quant=fp8", "parallel=tp4")


def stages(plan):
    return {step.node.id: step.node.stage for step in plan.steps}


def keys(tmp_path, *words):
    plan = make_plan(load((*words, f"paths.store={tmp_path}")), "all", Store(tmp_path), NO_GPU)
    return {step.node.id: step.node.stage.identity() for step in plan.steps}


def test_engine_and_baseline_are_tuned_each_for_its_format(tmp_path):
    found = stages(planned(tmp_path, *LLAMA_70B, "eval=mini_mmlu", target="evaluate"))
    engine, baseline = found["build"].build, found["baseline.build"].build
    assert (engine.gemm_plugin, baseline.gemm_plugin) == (None, "auto")
    assert (engine.user_buffer, baseline.user_buffer) == ("enable", "disable")
    assert (engine.gemm_swiglu_plugin, baseline.gemm_swiglu_plugin) == ("fp8", "disable")
    for each in (engine, baseline):
        assert (each.multiple_profiles, each.reduce_fusion) == ("enable", "enable")
    assert (found["quantize"].kv_cache.dtype, found["baseline.quantize"].kv_cache.dtype) == ("fp8", "auto")
    assert (found["evaluate"].variant, found["baseline.evaluate"].variant) == ("fp8-kv_fp8", "none")


def test_the_baseline_with_other_ranks_is_tuned_for_them(tmp_path):
    words = ("engine=tensorrt_llm", "model=llama_3_1_8b", "hardware=h100_sxm", "quant=fp8")
    found = stages(planned(tmp_path, *words, "build.tp_size=2", "eval.baseline_tp_size=1", target="evaluate"))
    assert (found["build"].build.reduce_fusion, found["baseline.build"].build.reduce_fusion) == ("enable", "disable")


def test_a_draft_model_is_tuned_for_its_own_format(tmp_path):
    """An FP8 cache beside 16-bit weights would rule out the reuse that drafting needs."""
    words = ("engine=tensorrt_llm", "model=llama_3_1_8b", "hardware=h100_sxm", "quant=fp8", "build.max_batch_size=8")
    words += ("speculative=draft_target", "model@speculative.draft=llama_3_2_1b")
    half = stages(planned(tmp_path, *words, "speculative.draft_qformat=none", target="repository"))
    assert (half["quantize"].kv_cache.dtype, half["draft.quantize"].kv_cache.dtype) == ("fp8", "auto")
    assert (half["build"].build.gemm_plugin, half["draft.build"].build.gemm_plugin) == (None, "auto")
    same = stages(planned(tmp_path, *words, target="repository"))
    assert same["draft.quantize"].kv_cache.dtype == "fp8"
    assert same["draft.build"].build.gemm_plugin is None


def test_the_plan_gives_a_reason_and_a_source_for_each_setting(tmp_path):
    notes = [note for note in planned(tmp_path, *LLAMA_70B, target="evaluate").notes if note.startswith("tuning")]
    own = [note for note in notes if note.startswith("tuning: ")]
    assert [note.split()[1].rstrip(":") for note in own] == [
        "build.multiple_profiles=enable", "kv_cache.dtype=fp8", "build.reduce_fusion=enable",
        "build.user_buffer=enable", "build.gemm_swiglu_plugin=fp8", "triton.kv_cache_free_gpu_mem_fraction=0.95",
    ]  # fmt: skip
    assert all("performance-tuning-guide/" in note for note in own)
    assert any("baseline: build.gemm_plugin=auto: cuBLASLt" in note for note in notes)
    assert any(
        "baseline: without kv_cache.dtype=fp8, build.user_buffer=enable, build.gemm_swiglu_plugin=fp8" in note
        for note in notes
    )


def test_the_plan_says_that_it_is_plain(tmp_path):
    plan = planned(tmp_path, *LLAMA_70B, "tuning=plain", target="evaluate")
    assert [note for note in plan.notes if note.startswith("tuning")] == [
        "tuning=plain: nothing is set for speed; tuning=recommended does"
    ]
    assert stages(plan)["build"].build.multiple_profiles == "disable"
    assert stages(plan)["evaluate"].variant == "fp8"


def test_the_command_of_the_build_has_what_is_chosen(tmp_path):
    text = plan_text(planned(tmp_path, *LLAMA_70B))
    for option in ("--multiple_profiles enable", "--user_buffer enable", "--gemm_swiglu_plugin fp8"):
        assert option in text
    assert "--gemm_plugin" not in text


def test_what_is_chosen_changes_the_key_of_the_engine(tmp_path):
    words = ("engine=tensorrt_llm", "model=tiny_llama", "hardware=h100_sxm", "quant=none")
    fast, plain = keys(tmp_path, *words), keys(tmp_path, *words, "tuning=plain")
    assert fast["build"] == plain["build"] | {"gemm_plugin": "auto", "multiple_profiles": "enable"}
    assert fast["quantize"] == plain["quantize"]
    assert fast["repository"]["triton"]["kv_cache_free_gpu_mem_fraction"] == 0.95


def test_the_server_of_an_engine_that_is_built_already_is_tuned_too(tmp_path):
    words = ("model=tiny_llama", "quant=none", f"paths.store={tmp_path}")
    engine = write_engine(tmp_path / "engine", "tensorrt_llm")
    plan = make_plan(load((*words, f"engine.path={engine}")), "repository", Store(tmp_path), NO_GPU)
    assert plan.settings.triton.kv_cache_free_gpu_mem_fraction == 0.95
    assert plan.settings.build.multiple_profiles == "disable"


@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_the_cpu_engine_has_the_same_keys_with_either_tuning(tmp_path, quant):
    words = ("engine=openvino", "model=tiny_llama", f"quant={quant}")
    assert keys(tmp_path, *words) == keys(tmp_path, *words, "tuning=plain")
    assert keys(tmp_path, *words) == keys(tmp_path, *words, "kv_cache=auto")
    assert not [note for note in planned(tmp_path, *words).notes if "tuning" in note]


def test_proposals_are_judged_as_they_would_be_tuned(tmp_path):
    """70B in FP8 does not fit an A100 of 40 GB; in INT4 its KV cache would not be FP8, so reuse stays possible."""
    words = ("engine=tensorrt_llm", "model=llama_3_1_70b", "hardware=l40s", "quant=fp8", "eval.baseline=skip")
    with pytest.raises(Exception, match=r"Fits with .*quant=int4_awq"):
        planned(tmp_path, *words)


@pytest.mark.parametrize("quant", ["none", "fp8", "int4_awq"])
def test_size_and_simulate_count_with_the_same_kv_cache(tmp_path, quant):
    words = ("model=llama_3_8b", f"quant={quant}", "hardware=h100_sxm", "sizing.average_rate=5", "sizing.tp=1")
    settings = load(words)
    (setup,) = ask(settings, NO_GPU).setups()
    tuned = planned(tmp_path, *words, "engine=tensorrt_llm").settings
    assert setup.kv_format == tuned.kv_cache.dtype
    assert f" {tuned.variant.label} on" in make_case(settings, NO_GPU).what


def test_each_format_that_is_sized_has_its_own_kv_cache():
    words = ("model=llama_3_8b", "hardware=h100_sxm", "sizing.average_rate=5", "sizing.tp=1", "sizing.formats=auto")
    found = {setup.qformat: setup.kv_format for setup in ask(load(words), NO_GPU).setups()}
    assert (found["fp8"], found["none"], found["int4_awq"]) == ("fp8", "auto", "auto")
    plain = {setup.kv_format for setup in ask(load((*words, "tuning=plain")), NO_GPU).setups()}
    assert plain == {"auto"}
    given = {setup.kv_format for setup in ask(load((*words, "sizing.kv_formats=[auto]")), NO_GPU).setups()}
    assert given == {"auto"}
    one = {setup.kv_format for setup in ask(load((*words, "kv_cache=int8")), NO_GPU).setups()}
    assert one == {"int8"}
