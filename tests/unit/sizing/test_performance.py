"""Seconds of an iteration from sizes and data sheets."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.predict.performance.gpus import gpu_named, gpus
from pipelines.predict.performance.models import model_named
from pipelines.predict.performance.performance import PerformanceModel, Setup, runnable
from pipelines.predict.performance.physics import Parameters, facts
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import IterationCost, simulate
from scripts.published.frameworks import framework_named
from scripts.published_fit.priors import PRIORS

H100 = Setup(model_named("llama-3.1-8b"), gpu_named("h100_sxm"), QFormat.FP8)


@pytest.fixture(scope="module")
def model() -> PerformanceModel:
    return PerformanceModel(Parameters({name: prior.value for name, prior in PRIORS.items()}, {}, {}))


def test_weights_are_read_at_the_bandwidth(model):
    """6,979,321,856 linear weights at 1 byte over 0.8 x 3.35 TB/s: 2.604 ms."""
    assert model.cost(H100).cost.weights == pytest.approx(6_979_321_856 / (0.8 * 3.35e12))


def test_weight_only_formats_save_bytes_but_no_compute(model):
    sixteen, four = (model.cost(replace(H100, qformat=each)).cost for each in (QFormat.NONE, QFormat.INT4_AWQ))
    assert four.token_compute == sixteen.token_compute
    assert four.weights == pytest.approx(sixteen.weights * 4.125 / 16)


def test_kv_heads_are_duplicated_beyond_their_number():
    """8 KV heads: TP 16 reads as many KV bytes per rank as TP 8, and half as many weights."""
    spec, gpu = H100.model, H100.gpu
    eight, sixteen = (facts(spec, gpu, QFormat.FP8, KvFormat.AUTO, tp=tp, pp=1, sparse=False) for tp in (8, 16))
    assert eight.kv_bytes == sixteen.kv_bytes == 131_072 / 8
    assert eight.weight_bytes == 2 * sixteen.weight_bytes


def test_a_mixture_reads_more_experts_with_more_tokens(model):
    mixtral = model.cost(replace(H100, model=model_named("mixtral-8x7b"))).cost
    assert mixtral.seconds(1, 1) < 0.45 * mixtral.seconds(64, 64)


def test_all_to_all_sends_a_token_to_the_ranks_of_its_experts_alone():
    """TensorRT-LLM 1.2 on B200: a quarter for one expert on four ranks, nine tenths for eight."""
    maverick = Setup(model_named("llama-4-maverick"), gpu_named("b200_sxm"), QFormat.NVFP4, tp=4, attention_dp=True)
    eight = replace(maverick, model=model_named("qwen3-235b-a22b"))

    def share(setup: Setup) -> float:
        older = replace(setup, runs_on=framework_named("TensorRT-LLM 1.0"))
        return setup.facts().reduce_bytes / older.facts().reduce_bytes

    assert share(maverick) == pytest.approx(1 / 4)
    assert share(eight) == pytest.approx(1 - (3 / 4) ** 8)
    for other in ("h200_sxm", "rtx_pro_6000"):
        assert share(replace(maverick, gpu=gpu_named(other), qformat=QFormat.FP8)) == 1
    assert share(replace(maverick, attention_dp=False)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": gpu_named("a100_sxm_80gb")}, "quant=fp8 needs FP8 tensor cores; A100-SXM-80GB has none"),
        ({"qformat": QFormat.NVFP4}, "quant=nvfp4 needs FP4 tensor cores; H100-SXM-80GB has none"),
        ({"tp": 3}, r"32 heads; tp_size=3 does not divide them\. Allowed: 1, 2, 4, 8, 16"),
        ({"pp": 33}, "pp_size=33 is not between 1 and llama-3.1-8b's 32 layers"),
        (
            {"gpu": gpu_named("a100_sxm_80gb"), "qformat": QFormat.NONE, "kv_format": KvFormat.FP8},
            r"An FP8 KV cache on A100-SXM-80GB is not modelled\. Choose auto or int8",
        ),
        (
            {"gpu": gpu_named("b200_sxm"), "qformat": QFormat.INT4_AWQ},
            r"TensorRT-LLM has no kernels for quant=int4_awq on B200-SXM-180GB\. It supports: none, fp8, nvfp4",
        ),
        (
            {"gpu": gpu_named("b300_sxm"), "qformat": QFormat.INT8_SQ},
            r"TensorRT-LLM has no kernels for quant=int8_sq on B300-SXM-270GB\. It supports: none, fp8, nvfp4",
        ),
        (
            {"gpu": gpu_named("b200_sxm"), "qformat": QFormat.NVFP4, "model": model_named("gemma-7b")},
            r"quant=nvfp4 is not supported for GemmaForCausalLM by TensorRT-LLM\. It supports: none, fp8",
        ),
        ({"gpu": gpu_named("b200_sxm"), "kv_format": KvFormat.INT8}, "INT8 KV cache on B200-SXM-180GB is not modelled"),
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


def linears(costed, tokens):
    """Seconds of the linears of an iteration."""
    cost = costed.cost
    return ((cost.token_compute * tokens) ** cost.knee + cost.weights**cost.knee) ** (1 / cost.knee)


@pytest.mark.parametrize(("batch", "published"), [(32, 1.62), (64, 1.52), (128, 1.35), (896, 1.30)])
def test_2_4_sparsity_speeds_up_as_published(batch, published):
    """Llama 2 70B, H100, FP8 (NVIDIA/TensorRT-Model-Optimizer examples/benchmark.md, section 4.1): within 5 %.

    Published is sparse on one GPU over dense on two, without lengths; taken as the speed-up of the linears, which is
    all that sparsity touches.
    """
    dense = Setup(
        model_named("llama-2-70b"), gpu_named("h100_sxm"), QFormat.FP8, runs_on=framework_named("TensorRT-LLM 0.9.0")
    )
    fitted = PerformanceModel.load()
    ratio = linears(fitted.cost(dense), batch) / linears(fitted.cost(replace(dense, sparse=True)), batch)
    assert ratio == pytest.approx(published, rel=0.05)


def test_sparse_weights_take_the_bytes_of_values_and_positions(model):
    """16 bit: half of the values and 2 bits for each that is left: 9/16; 8 bit: 5/8."""
    for qformat, share in ((QFormat.NONE, 0.5625), (QFormat.FP8, 0.625)):
        dense = replace(H100, qformat=qformat)
        both = (model.cost(each).cost.weights for each in (replace(dense, sparse=True), dense))
        assert next(both) / next(both) == pytest.approx(share)


def test_efficiencies_are_physical():
    """No fitted efficiency is above 1, whatever the labels."""
    parameters = Parameters.load()
    for labels in parameters.document["labels"]:
        values = parameters.values([labels])
        assert all(0 < values[name] <= 1 for name in ("e_c", "e_m", "e_a", "e_d", "e_k", "e_l"))


@pytest.mark.parametrize(
    ("gpu", "framework", "provenance", "why"),
    [
        ("h100_sxm", "TensorRT-LLM 1.2", "fitted", "H100-SXM-80GB with trtllm-torch"),
        ("a10", "vLLM 0.12.0", "transferred", "vllm was measured on other GPUs"),
        ("a100_pcie_80gb", "vLLM 0.12.0", "transferred", "A100-PCIe-80GB was measured with other frameworks"),
        ("rtx_pro_6000", "vLLM 0.19.0", "transferred", "was measured with other frameworks"),  # a trace, and kernels
    ],
)
def test_the_provenance_says_what_was_measured(gpu, framework, provenance, why):
    costed = PerformanceModel.load().cost(
        Setup(model_named("llama-3.1-8b"), gpu_named(gpu), QFormat.NONE, runs_on=framework_named(framework))
    )
    assert costed.provenance == provenance
    assert why in costed.why


def test_a_mixture_is_fitted_only_where_mixtures_were_measured():
    """Their interval is that of models left out of the fit of mixtures, and wider than that of dense models."""
    model, b200 = PerformanceModel.load(), gpu_named("b200_sxm")
    dense, known, other = (
        Setup(model_named(name), b200, QFormat.NVFP4) for name in ("llama-3.3-70b", "qwen3-30b-a3b", "deepseek-r1")
    )
    split = replace(known, tp=4)
    apart = replace(other, tp=4, attention_dp=True)
    costs = [
        model.cost(each)
        for each in (dense, known, split, apart, replace(known, runs_on=framework_named("vLLM 0.15.1")))
    ]
    assert [each.provenance for each in costs] == ["fitted", "fitted", *["transferred"] * 3]
    for cost, why in zip(costs[2:], ("attention data parallel", "than deepseek-r1", "without mixtures"), strict=True):
        assert why in cost.why
    assert costs[0].spread["throughput"] < 0.1 < costs[1].spread["throughput"] == model.mixtures["spread"]
    mixtral = Setup(model_named("mixtral-8x7b"), gpu_named("h100_sxm"), runs_on=framework_named("TensorRT-LLM 0.15.0"))
    assert PerformanceModel.load().cost(mixtral).provenance == "fitted"


def test_one_configuration_on_a_gpu_is_not_enough_to_call_it_fitted(model):
    labels = {"gpu=h100_sxm": 9, "family=trtllm-torch": 9, "gpu=h100_sxm+family=trtllm-torch": 2}
    few, enough = (
        PerformanceModel(
            replace(model.parameters, document={"labels": {**labels, "gpu=h100_sxm+family=trtllm-torch": n}})
        )
        for n in (2, 3)
    )
    assert few.provenance(H100)[0] == "transferred"
    assert enough.provenance(H100)[0] == "fitted"


def test_a_family_has_its_own_spread_where_enough_was_measured(model):
    known = {"all": {"itl": {"fitted": 0.2}, "ttft": {"fitted": 0.3}}, "trtllm-torch": {"itl": {"fitted": 0.1}}}
    found = PerformanceModel(replace(model.parameters, document={"spread": known})).spread("fitted", "trtllm-torch")
    assert (found["itl"], found["ttft"]) == (0.1, 0.3)


def test_a_slower_engine_takes_longer_for_everything_in_proportion(model):
    cost = model.cost(replace(H100, model=model_named("mixtral-8x7b"))).cost
    load = {"q_ctx": 2e5, "kv": 9e4, "kv_window": 3e4, "prefills": 2}
    assert cost.slower(1.3).seconds(700, 50, **load) == pytest.approx(1.3 * cost.seconds(700, 50, **load))
    assert cost.slower(1.3).expert_share == cost.expert_share


def test_attention_data_parallel_ranks_share_the_experts_alone():
    """Each rank computes its own tokens whole, reads its part of the experts, and reaches more of them."""
    shape, gpu = model_named("deepseek-r1"), gpu_named("h200_sxm")
    split, apart = (
        facts(shape, gpu, QFormat.FP8, KvFormat.FP8, tp=8, pp=1, sparse=False, attention_dp=dp) for dp in (False, True)
    )
    assert apart.token_flops == 8 * split.token_flops == 2 * shape.active_params
    assert apart.weight_bytes == shape.common_params + shape.routed_params / 8
    assert apart.expert_share == pytest.approx(1 - (1 - 8 / 256) ** 8)
    assert apart.kv_bytes == split.kv_bytes == 61 * 576  # one latent vector for all heads
    # 7 ranks get a token in 16 bit and give their results back, in each of 58 layers
    assert apart.reduce_bytes == 7 * (2 + 2) * 58 * 7168


def test_decoding_reads_the_newest_chunk_alone_where_attention_is_of_chunks(model):
    """Llama 4: after a prompt of 8,192 tokens three of four layers begin a chunk; a window of half of it is full."""
    apart = Setup(model_named("llama-4-maverick"), gpu_named("b200_sxm"), QFormat.NVFP4, tp=4, attention_dp=True)
    cost, load = model.cost(apart).cost, OfferedLoad(np.array([8192]), np.array([1024]), arrival=np.zeros(1))
    assert (cost.chunk, cost.window) == (8192, 4096)
    ends = [simulate(SchedulerLimits(), load, each).end for each in (cost, replace(cost, chunk=0))]
    assert ends[1] - ends[0] == pytest.approx(cost.kv_window_token * sum(4096 - kv for kv in range(1, 1024)), rel=1e-6)


def test_the_window_of_some_layers_bounds_their_attention_of_prompts_too():
    cost = IterationCost(0, 0, 0, 0, knee=1.0, prefill_attention=1e-9, prefill_window=1e-9, window=128)
    short, long = (float(cost.seconds(n, 1, q_ctx=n * n / 2, prefills=1)) for n in (200, 10_000))
    assert short == pytest.approx(2e-9 * 200 * 100)
    assert long == pytest.approx(1e-9 * 10_000 * (5_000 + 128))


@pytest.mark.parametrize(("name", "beside"), [("llama-3.1-8b", 10.35), ("qwen3-30b-a3b", 15.21)])
def test_decoding_of_vllm_beside_prompts_takes_what_was_profiled(name, beside):
    """64 requests of 1,024 tokens on an RTX PRO 6000 beside a prompt of 512, whose own attention is taken off, ms.

    Times beside prompts are in no fit (casys-kaist/LLMServingSim, profiler/perf/RTXPRO6000, attention.csv).
    """
    setup = Setup(model_named(name), gpu_named("rtx_pro_6000"), runs_on=framework_named("vLLM 0.19.0"))
    cost = PerformanceModel.load().cost(setup).cost
    assert 1e3 * 64 * 1024 * (cost.kv_token + cost.beside) == pytest.approx(beside, rel=0.12)


@pytest.mark.parametrize(("gpu", "framework"), [("h100_sxm", "vLLM 0.19.0"), ("rtx_pro_6000", "TensorRT-LLM 1.2")])
def test_other_kernels_decode_beside_prompts_as_fast_as_alone(gpu, framework):
    setup = Setup(model_named("llama-3.1-8b"), gpu_named(gpu), runs_on=framework_named(framework))
    assert PerformanceModel.load().cost(setup).cost.beside == 0


def test_an_rtx_5090_is_faster_than_an_rtx_4090():
    """1.27 times the products and 1.78 times the bandwidth; only the older one was measured."""
    old, new = (
        PerformanceModel.load().cost(Setup(model_named("llama-3.1-8b"), gpu_named(gpu))).cost
        for gpu in ("rtx_4090", "rtx_5090")
    )
    assert new.seconds(2048, 1, q_ctx=2048 * 1024, prefills=1) < old.seconds(2048, 1, q_ctx=2048 * 1024, prefills=1)
    assert new.seconds(16, 16, kv=16 * 1024) < 0.7 * old.seconds(16, 16, kv=16 * 1024)


@pytest.mark.parametrize("qformat", [QFormat.NONE, QFormat.INT8_SQ, QFormat.INT4_AWQ])
def test_no_gpu_is_slower_than_one_that_its_data_sheet_surpasses(qformat):
    """Of two with the same chip; A100 PCIe of 80 GB was measured, and the one of 40 GB was not."""
    known, model, perf = gpus().values(), model_named("llama-3.1-8b"), PerformanceModel.load()

    def surpasses(better, worse):
        numbers = ("bandwidth", "tdp_w", "nvlink", "pcie")
        faster = all(better.peak.get(kind, 0) >= peak for kind, peak in worse.peak.items())
        return faster and all(getattr(better, name) >= getattr(worse, name) for name in numbers)

    pairs = [(a, b) for a in known for b in known if a is not b and a.arch == b.arch and surpasses(a, b)]
    assert ("a100_pcie_80gb", "a100_pcie_40gb") in [(better.name, worse.name) for better, worse in pairs]
    for pair in pairs:
        if any(qformat not in runnable(Setup(model, each)) or each.sm < 8.0 for each in pair):
            continue
        better, worse = (perf.cost(Setup(model, each, qformat)).cost for each in pair)
        for load in ({"q_ctx": 2048 * 1024, "prefills": 1}, {"kv": 16 * 1024}):
            tokens = 2048 if "prefills" in load else 16
            faster, slower = (cost.seconds(tokens, 16, **load) for cost in (better, worse))
            assert faster <= slower * 1.005, (pair[0].name, pair[1].name, load)
