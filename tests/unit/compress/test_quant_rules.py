"""What is known before calibrating: each rule, with the offending value in its message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.quant_rules import check_hardware, check_kv_features, check_shape, check_sparsity, formats_for

LLAMA_8B = ModelShape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False)
GEMMA_2B = ModelShape("GemmaForCausalLM", 18, 2048, 8, 1, 256, 16384, 256000, 8192, True)
GEMMA2 = replace(GEMMA_2B, architecture="Gemma2ForCausalLM")


def only(faults: list) -> str:
    assert len(faults) == 1, faults
    return str(faults[0])


@pytest.mark.parametrize("qformat", list(QFormat))
def test_llama_8b_takes_every_format_on_two_by_two(qformat) -> None:
    assert check_shape(LLAMA_8B, qformat, tp_size=2, pp_size=2) == []


@pytest.mark.parametrize("qformat", [qformat for qformat in QFormat if qformat is not QFormat.NVFP4])
def test_gemma_2b_takes_every_format_but_nvfp4(qformat) -> None:
    assert check_shape(GEMMA_2B, qformat) == []


@pytest.mark.parametrize(
    ("shape", "qformat", "options", "messages"),
    [
        (GEMMA_2B, QFormat.NVFP4, {}, ["nvfp4 is not supported for GemmaForCausalLM"]),
        (GEMMA_2B, QFormat.FP8, {"pp_size": 2}, ["pp_size=2 does not work with GemmaForCausalLM"]),
        (GEMMA2, QFormat.NONE, {}, ["Gemma2ForCausalLM cannot be exported"]),
        (LLAMA_8B, QFormat.FP8, {"pp_size": 3}, ["pp_size=3 does not divide num_hidden_layers=32"]),
        (
            LLAMA_8B,
            QFormat.FP8,
            {"tp_size": 3},
            ["num_attention_heads=32", "intermediate_size=14336", "tp_size=3 and num_key_value_heads=8"],
        ),
        (LLAMA_8B, QFormat.FP8, {"tp_size": 0}, ["tp_size=0, pp_size=1 is no split"]),
        # 14336 / 8 = 1792 = 14 * 128, but 14336 / 16 = 896 = 7 * 128 works and 14336 / 32 = 448 does not
        (LLAMA_8B, QFormat.INT4_AWQ, {"tp_size": 32}, ["448 inputs of mlp.proj per rank"]),
        (LLAMA_8B, QFormat.INT4_AWQ, {"group_size": 96}, ["groups of 96 inputs.*4096 inputs"] * 4 + ["14336"]),
        (GEMMA_2B, QFormat.INT8_SQ, {"tp_size": 2}, ["tp_size=2 needs copies of the 1 KV head"]),
        (GEMMA_2B, QFormat.FP8, {"quantize_lm_head": True}, ["the head is the embedding"]),
        (LLAMA_8B, QFormat.INT8_SQ, {"quantize_lm_head": True}, ["quantize_lm_head=true does not work with"]),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_its_value(shape, qformat, options, messages) -> None:
    import re

    faults = [str(fault) for fault in check_shape(shape, qformat, **options)]
    assert len(faults) == len(messages), faults
    for fault, message in zip(faults, messages, strict=True):
        assert re.search(message, fault)


def test_a_group_that_does_not_fit_names_one_that_does() -> None:
    """14336 / 32 = 448 = 7 * 64."""
    assert "group_size=64/32/16" in only(check_shape(LLAMA_8B, QFormat.INT4_AWQ, tp_size=32))


def test_sparsity_needs_groups_of_four() -> None:
    assert check_sparsity(LLAMA_8B) == check_sparsity(GEMMA_2B, method="sparsegpt") == []
    assert "mlp.proj has 14338" in only(check_sparsity(replace(LLAMA_8B, intermediate_size=14338), method="sparsegpt"))
    assert "mlp.proj has 14340" in str(check_sparsity(replace(LLAMA_8B, intermediate_size=14340))[0])


@pytest.mark.parametrize(
    ("sm", "formats"),
    [
        (8.0, "none int8_sq int4_awq int8_wo int4_wo"),
        (8.6, "none int8_sq int4_awq int8_wo int4_wo"),
        (8.9, "none fp8 int8_sq int4_awq w4a8_awq int8_wo int4_wo"),
        (9.0, "none fp8 int8_sq int4_awq w4a8_awq int8_wo int4_wo"),
        (10.0, "none fp8 nvfp4"),
        (12.0, "none fp8 int8_sq int4_awq w4a8_awq int8_wo int4_wo nvfp4"),
    ],
)
def test_each_gpu_takes_the_formats_of_the_table(sm, formats) -> None:
    """The builder's table, for Llama; Gemma has no NVFP4 anywhere."""
    assert [str(qformat) for qformat in formats_for(sm, "llama")] == formats.split()
    assert QFormat.NVFP4 not in formats_for(sm, "gemma")


@pytest.mark.parametrize(
    ("qformat", "kv_cache", "sm", "message"),
    [
        (QFormat.FP8, KvFormat.AUTO, 8.6, r"fp8 needs FP8 arithmetic.* has 8\.6.*none, int8_sq, int4_awq"),
        (QFormat.W4A8_AWQ, KvFormat.AUTO, 8.0, r"w4a8_awq needs FP8 .* has 8\.0"),
        (QFormat.NVFP4, KvFormat.AUTO, 9.0, r"nvfp4 needs FP4 .* has 9\.0"),
        (QFormat.INT4_AWQ, KvFormat.AUTO, 10.0, r"int4_awq is refused .* 10\.0 .*none, fp8"),
        (QFormat.NVFP4, KvFormat.AUTO, 10.0, "nvfp4 is not supported for the family 'gemma'"),
        (QFormat.NONE, KvFormat.FP8, 8.6, r"kv_cache=fp8 needs .* has 8\.6.*kv_cache=auto, int8"),
        (QFormat.NONE, KvFormat.INT8, 10.3, r"kv_cache=int8 is refused .* 10\.3.*kv_cache=auto, fp8"),
        (QFormat.NONE, KvFormat.AUTO, 7.5, r"7\.5 is too old"),
    ],
)
def test_a_gpu_that_cannot_says_what_works_there(qformat, kv_cache, sm, message) -> None:
    import re

    assert re.search(message, only(check_hardware(qformat, kv_cache, sm, "gemma")))


@pytest.mark.parametrize(
    ("qformat", "kv_cache", "loses"),
    [
        (QFormat.FP8, KvFormat.FP8, False),
        (QFormat.W4A8_AWQ, KvFormat.FP8, False),
        (QFormat.INT4_AWQ, KvFormat.FP8, True),
        (QFormat.NONE, KvFormat.FP8, True),
        (QFormat.FP8, KvFormat.INT8, True),
        (QFormat.INT8_SQ, KvFormat.INT8, True),
        (QFormat.INT8_SQ, KvFormat.AUTO, False),
    ],
)
def test_some_kv_formats_take_features_away(qformat, kv_cache, loses) -> None:
    faults = check_kv_features(qformat, kv_cache, kv_reuse=True, chunked_context=True)
    assert bool(faults) is loses
    assert check_kv_features(qformat, kv_cache) == []
    if loses:
        assert f"kv_cache={kv_cache} with quant={qformat}" in only(faults)
        assert "KV-cache reuse and chunked context" in only(faults)
