"""The accuracy baseline is built without the options that belong to a quantized or sparse format."""

from typing import Any

import pytest

from pipelines.domain.formats import QFormat
from pipelines.engines.tensorrt_llm.config import OF_A_FORMAT, OPTIONS, BuildSettings
from pipelines.rules.rulebook import check, refused
from pipelines.settings.compose import load
from tests.support.build_options import of_options
from tests.support.rule_cases import LLAMA, deployment
from tests.unit.features.test_feature_inputs import plan

H100 = ["engine=tensorrt_llm", "hardware=h100_sxm", "model=llama_3_1_70b"]
FP8_LLAMA = ["quant=fp8", "build.tp_size=4", "build.gemm_swiglu_plugin=fp8", "build.reduce_fusion=enable"]
FP8_LLAMA += ["build.user_buffer=enable"]


def test_the_baseline_of_an_fp8_deployment_has_no_fp8_kernels():
    """TensorRT-LLM asserts on them: layers/mlp.py:356, models/llama/model.py:176."""
    build = load([*H100, *FP8_LLAMA]).baseline().build
    assert (build.gemm_swiglu_plugin, build.user_buffer) == ("disable", "disable")
    assert (build.reduce_fusion, build.tp_size) == ("enable", 4)  # runs in every format, so both sides keep it


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, own in OF_A_FORMAT.items() for value in own])
def test_every_option_of_a_format_is_reset(name: str, value: Any):
    given = of_options(**{name: value}).in_16_bit()
    assert given[name] == BuildSettings()[name]
    assert refused(check(deployment(shape=LLAMA, qformat=QFormat.NONE, build={name: given[name]}))) == []


def test_no_option_that_names_a_format_is_forgotten():
    """An option that can be fp8 or nvfp4 belongs to a format."""
    named = {name for name, option in OPTIONS.items() if {"fp8", "nvfp4"} & set(option.choices or ())}
    assert named <= OF_A_FORMAT.keys()


def test_options_that_fit_every_format_are_kept():
    build = BuildSettings(gemm_plugin="auto", multiple_profiles="enable", max_batch_size=64)
    assert build.in_16_bit() == build


def test_a_draft_in_another_format_is_built_without_the_targets_kernels(tmp_path):
    words = ["model=llama_3_1_8b", "engine=tensorrt_llm", "hardware=h100_sxm", "quant=fp8", "build.max_batch_size=8"]
    words += ["speculative=draft_target", "model@speculative.draft=llama_3_2_1b", "speculative.draft_qformat=none"]
    made = plan(tmp_path, [*words, "build.gemm_swiglu_plugin=fp8"], "repository")
    stages = {step.node.id: step.node.stage for step in made.steps}
    assert stages["build"].build.gemm_swiglu_plugin == "fp8"
    assert stages["draft.build"].build.gemm_swiglu_plugin == "disable"
