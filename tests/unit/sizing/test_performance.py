"""Seconds of an iteration from sizes and data sheets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.sizing.parameters import Parameters
from pipelines.sizing.performance import PerformanceModel, Setup
from pipelines.sizing.specs import gpu_named, model_named

H100 = Setup(model_named("llama-3.1-8b"), gpu_named("h100_sxm"), QFormat.FP8)


@pytest.fixture(scope="module")
def model() -> PerformanceModel:
    return PerformanceModel(Parameters.prior())


def test_weights_are_read_at_the_bandwidth(model):
    """6,979,321,856 linear weights at 1 byte over 0.85 x 3.35 TB/s: 2.451 ms."""
    assert model.cost(H100).cost.weights == pytest.approx(6_979_321_856 / (0.85 * 3.35e12))


def test_weight_only_formats_save_bytes_but_no_compute(model):
    sixteen, four = (model.cost(replace(H100, qformat=each)).cost for each in (QFormat.NONE, QFormat.INT4_AWQ))
    assert four.token_compute == sixteen.token_compute
    assert four.weights == pytest.approx(sixteen.weights * 4.125 / 16)


def test_kv_heads_are_duplicated_beyond_their_number(model):
    """8 KV heads: TP 16 reads as many KV bytes per rank as TP 8."""
    eight, sixteen = (model.cost(replace(H100, tp=tp)).cost for tp in (8, 16))
    assert eight.kv_token == sixteen.kv_token
    assert eight.token_compute == pytest.approx(2 * sixteen.token_compute)


def test_a_mixture_reads_more_experts_with_more_tokens(model):
    mixtral = model.cost(replace(H100, model=model_named("mixtral-8x7b"))).cost
    assert mixtral.seconds(1, 1) < 0.45 * mixtral.seconds(64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": gpu_named("a100_sxm_80gb")}, "quant=fp8 needs FP8 tensor cores; A100-SXM-80GB has none"),
        ({"qformat": QFormat.NVFP4}, "quant=nvfp4 needs FP4 tensor cores; H100-SXM-80GB has none"),
        ({"tp": 3}, r"32 heads; tp_size=3 does not divide them\. Allowed: 1, 2, 4, 8, 16"),
        ({"pp": 33}, "pp_size=33 is not between 1 and llama-3.1-8b's 32 layers"),
        ({"framework": "llama.cpp"}, "framework 'llama.cpp' is not known"),
        (
            {"gpu": gpu_named("a100_sxm_80gb"), "qformat": QFormat.NONE, "kv_format": KvFormat.FP8},
            "A100-SXM-80GB has no FP8 for the KV cache",
        ),
    ],
)
def test_what_the_hardware_cannot_do_is_refused(model, change, message):
    with pytest.raises(UserError, match=message):
        model.cost(replace(H100, **change))


def test_fp8_on_ada_is_allowed(model):
    assert model.cost(replace(H100, gpu=gpu_named("l40s"))).cost.weights > 0


def test_without_measurements_the_provenance_is_the_data_sheet(model):
    costed = model.cost(H100)
    assert costed.provenance == "datasheet"
    assert costed.spread["ttft"] > 0.4
