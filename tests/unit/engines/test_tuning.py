"""What is set for speed: NVIDIA's advice, wherever it fits, and never against a user or a rule."""

import random
from functools import cache
from itertools import product

import pytest

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.engines.registry import ENGINES, LLM_API, OPENVINO, TENSORRT_LLM
from pipelines.engines.tensorrt_llm.advice import ROWS
from pipelines.engines.tensorrt_llm.config import TUNED, BuildSettings
from pipelines.engines.tuning import advice, tuned
from pipelines.plan.deployment import Deployment
from pipelines.rules.rulebook import check
from pipelines.settings.base import ChoosingGroup
from pipelines.settings.compose import load as compose
from pipelines.settings.root import Settings
from tests.support.build_options import of_options
from tests.unit.sizing.test_limits_for_load import NO_GPU

LLAMA_70B = ("model=llama_3_1_70b", "hardware=h100_sxm")
FUSIONS = {"reduce_fusion", "user_buffer", "gemm_swiglu_plugin"}
FRACTION = "kv_cache_free_gpu_mem_fraction"
HEADS = "speculative.heads_path=/heads"


@cache
def load(*words):
    return compose(words)


def shape_of(settings):
    return settings.model.shape.to_shape() if settings.model.shape else None


def tune(settings, engine=TENSORRT_LLM):
    return tuned(settings, engine, shape_of(settings), settings.hardware)


def advised(*words, engine=TENSORRT_LLM):
    """Setting -> value."""
    settings = load(*words)
    return {each.name: each.value for each in advice(settings, engine, shape_of(settings), settings.hardware)}


def test_a_16_bit_engine_has_the_gemm_plugin_and_several_profiles():
    found = advised(*LLAMA_70B, "quant=none")
    assert found == {"multiple_profiles": "enable", "gemm_plugin": "auto", FRACTION: 0.95}


def test_an_fp8_engine_has_an_fp8_kv_cache_and_no_gemm_plugin():
    found = advised(*LLAMA_70B, "quant=fp8")
    assert found == {"multiple_profiles": "enable", "dtype": KvFormat.FP8, FRACTION: 0.95}


@pytest.mark.parametrize("quant", ["int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo"])
def test_integer_weights_leave_products_in_16_bit_and_a_16_bit_kv_cache(quant):
    assert advised(*LLAMA_70B, f"quant={quant}") == {
        "multiple_profiles": "enable", "gemm_plugin": "auto", FRACTION: 0.95,
    }  # fmt: skip


def test_an_fp4_engine_has_an_fp8_kv_cache_too():
    assert advised(*LLAMA_70B, "quant=nvfp4", "hardware=b200_sxm")["dtype"] is KvFormat.FP8


def test_fp8_over_several_hoppers_is_fused():
    found = advised(*LLAMA_70B, "quant=fp8", "parallel=tp4")
    assert {name: found[name] for name in FUSIONS} == {
        "reduce_fusion": "enable", "user_buffer": "enable", "gemm_swiglu_plugin": "fp8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "fused"),
    [
        (("quant=none", "parallel=tp4"), {"reduce_fusion"}),
        (("quant=fp8", "parallel=tp8_pp2"), {"reduce_fusion"}),
        (("quant=fp8", "parallel=tp4", "hardware=l40s"), {"reduce_fusion"}),
        (("quant=fp8", "parallel=tp4", "hardware=b200_sxm"), {"reduce_fusion"}),
        (("quant=fp8", "parallel=tp4", "build.reduce_fusion=disable"), {"gemm_swiglu_plugin"}),
        (("quant=fp8", "parallel=tp4", "build.trtllm.lora_plugin=auto"), {"reduce_fusion"}),
        (
            ("quant=fp8", "parallel=tp4", "build.trtllm.low_latency_gemm_swiglu_plugin=fp8"),
            {"reduce_fusion", "user_buffer"},
        ),
        (("quant=fp8", "parallel=tp4", "sparsity=magnitude_2_4"), {"reduce_fusion", "user_buffer"}),
        (("quant=none", "parallel=tp4", "speculative=eagle", HEADS), set()),
        (("quant=none", "parallel=tp4", "speculative=medusa", HEADS), {"reduce_fusion"}),
        (("quant=fp8", "parallel=tp4", "model=gemma_7b"), set()),
        (("quant=fp8", "parallel=single"), set()),
    ],
)
def test_a_fusion_is_left_out_where_it_does_not_fit(words, fused):
    assert advised(*LLAMA_70B, *words).keys() & FUSIONS == fused


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (("build.opt_num_tokens=64",), "multiple_profiles"),
        (("speculative=redrafter", HEADS), "multiple_profiles"),
        (("build.max_num_tokens=64",), "multiple_profiles"),
        (("weights=streaming",), "gemm_plugin"),
        (("sparsity=magnitude_2_4",), "gemm_plugin"),
        (("build.weight_streaming=true",), "gemm_plugin"),
        (("weights=streaming",), FRACTION),
        (("speculative=draft_target", "model@speculative.draft=llama_3_2_1b"), FRACTION),
        (("lora=adapters", "lora.adapters={1:/adapters/sql}"), FRACTION),
        (("quant=fp8", "build.kv_cache_type=disabled"), "dtype"),
        (("quant=fp8", "hardware=a10"), "dtype"),
        (("quant=nvfp4",), "dtype"),
        (("quant=nvfp4", "hardware=b200_sxm", "model=gemma_2b"), "dtype"),
    ],
)
def test_a_setting_is_left_out_where_something_else_needs_it(words, left_out):
    assert left_out not in advised(*LLAMA_70B, "quant=none", *words)


GIVEN = (
    ("build.multiple_profiles=disable", "build", "multiple_profiles", "disable"),
    ("build.gemm_plugin=disable", "build", "gemm_plugin", "disable"),
    ("build.reduce_fusion=disable", "build", "reduce_fusion", "disable"),
    ("build.user_buffer=disable", "build", "user_buffer", "disable"),
    ("build.gemm_swiglu_plugin=disable", "build", "gemm_swiglu_plugin", "disable"),
    ("kv_cache=auto", "kv_cache", "dtype", KvFormat.AUTO),
    ("kv_cache.dtype=int8", "kv_cache", "dtype", KvFormat.INT8),
    (f"triton.{FRACTION}=0.9", "triton", FRACTION, 0.9),
)


@pytest.mark.parametrize(("word", "group", "name", "value"), GIVEN, ids=[word for word, *_ in GIVEN])
@pytest.mark.parametrize("quant", ["none", "fp8"])
def test_what_the_user_gives_stays_even_if_it_is_the_default(quant, word, group, name, value):
    words = (*LLAMA_70B, "parallel=tp4", f"quant={quant}", word)
    assert getattr(getattr(tune(load(*words)), group), name) == value
    assert name not in advised(*words)


def test_null_is_not_given():
    words = (*LLAMA_70B, "quant=none", "build.gemm_plugin=disable", "build.gemm_plugin=null")
    assert tune(load(*words)).build.gemm_plugin == "auto"


def test_every_setting_of_the_advice_is_null_in_conf_and_can_be_chosen():
    settings = load()
    for row, _ in ROWS:
        group = getattr(settings, row.group)
        assert row.name in group.CHOSEN
        assert not group.given(row.name)
    assert {row.name for row, _ in ROWS if row.group == "build"} == set(TUNED)


def test_plain_sets_nothing():
    assert advised(*LLAMA_70B, "quant=fp8", "parallel=tp4", "tuning=plain") == {}
    settings = load(*LLAMA_70B, "quant=fp8", "parallel=tp4", "tuning=plain")
    assert tune(settings) == settings
    assert tune(settings).build.gemm_swiglu_plugin == BuildSettings().gemm_swiglu_plugin


@pytest.mark.parametrize("engine", [OPENVINO, LLM_API], ids=lambda engine: engine.name)
def test_other_engines_have_nothing_to_set(engine):
    settings = load(*LLAMA_70B, "quant=fp8", "parallel=tp4")
    assert tune(settings, engine) == settings
    assert [each.name for each in ENGINES.values() if each.recommends] == [TENSORRT_LLM.name, LLM_API.name]


def test_what_is_chosen_does_not_count_as_given_and_is_chosen_anew():
    fp8 = tune(load(*LLAMA_70B, "quant=fp8", "parallel=tp4"))
    assert tune(fp8) == fp8
    assert not fp8.build.given("user_buffer")
    half = tune(fp8.model_copy(update={"quant": fp8.quant.model_copy(update={"qformat": QFormat.NONE})}))
    assert half == tune(load(*LLAMA_70B, "quant=none", "parallel=tp4"))
    assert tune(fp8, OPENVINO) == load(*LLAMA_70B, "quant=fp8", "parallel=tp4")


@pytest.mark.parametrize("quant", list(QFormat))
def test_the_baseline_of_every_format_is_tuned_like_a_16_bit_engine(quant):
    alone = tune(load(*LLAMA_70B, "quant=none", "parallel=tp4"))
    baseline = tune(tune(load(*LLAMA_70B, f"quant={quant}", "parallel=tp4")).baseline())
    assert (baseline.build, baseline.kv_cache) == (alone.build, alone.kv_cache)


def test_the_baseline_of_sparse_weights_gets_the_gemm_plugin():
    """conf/sparsity gives gemm_plugin=disable for 2:4 kernels, which dense weights do not have."""
    baseline = load(*LLAMA_70B, "quant=fp8", "sparsity=magnitude_2_4").baseline()
    assert tune(baseline).build.gemm_plugin == "auto"
    assert load(*LLAMA_70B, "quant=fp8", "build.gemm_plugin=disable").baseline().build.gemm_plugin == "disable"


def test_the_variant_names_the_kv_cache_that_was_chosen():
    assert tune(load(*LLAMA_70B, "quant=fp8")).variant.label == "fp8-kv_fp8"
    assert tune(load(*LLAMA_70B, "quant=fp8", "kv_cache=auto")).variant.label == "fp8"
    assert tune(load(*LLAMA_70B, "quant=none")).variant.label == "none"


def test_every_advice_names_its_effect_and_a_public_source():
    for row, _ in ROWS:
        assert row.reason
        assert row.source.startswith(("performance-tuning-guide/", "examples/"))
        assert len(row.line) < 300


MODELS = ("gemma_2b", "llama_3_1_70b")
GPUS = ("auto", "a10", "l4", "h100_sxm", "b200_sxm")
PARALLEL = ("single", "tp4", "tp8_pp2")
FEATURES: dict[str, tuple[str, ...]] = {
    "none": (),
    "chunked": ("runtime=chunked",),
    "no reuse": ("reuse=none",),
    "system prompt": ("reuse=system_prompt",),
    "sliding window": ("window=sliding",),
    "lora": ("lora=adapters", "lora.adapters=null"),
    "streaming": ("weights=streaming",),
    "guided": ("guided=xgrammar",),
    "images": ("multimodal=llava", "multimodal.path=/models/llava"),
    "magnitude": ("sparsity=magnitude_2_4",),
    "draft": ("speculative=draft_target", "model@speculative.draft=llama_3_2_1b"),
    **{mode: (f"speculative={mode}", HEADS) for mode in ("medusa", "redrafter", "eagle")},
    "lookahead": ("speculative=lookahead",),
    "norm fusion": ("build.trtllm.norm_quant_fusion=enable",),
    "low latency": ("build.trtllm.low_latency_gemm_swiglu_plugin=fp8", "build.trtllm.low_latency_gemm_plugin=fp8"),
    "unfused": ("build.trtllm.use_fused_mlp=disable",),
    "tuning point": ("build.opt_num_tokens=256",),
    "int8 cache": ("kv_cache=int8",),
    "no context attention": ("build.trtllm.context_fmha=disable",),
}


def found_by_rules(settings: Settings) -> tuple[set[str], set[str]]:
    """What refuses, and all that is said."""
    findings = check(Deployment(settings, "build", TENSORRT_LLM, NO_GPU, shape=shape_of(settings)).facts)
    refusing = {each.rule.name for each in findings if not each.rule.warns}
    return refusing, {each.rule.name for each in findings}


@pytest.mark.parametrize("feature", FEATURES)
def test_tuning_breaks_no_rule(feature):
    """No accepted configuration is refused, and none gets another warning, nor does its baseline.

    Of the combinations a tenth, others for each feature.
    """
    base = load(*FEATURES[feature], "engine=tensorrt_llm")
    models = [load(f"model={name}").model for name in MODELS]
    gpus = [load(f"hardware={name}").hardware for name in GPUS]
    splits = [load(f"parallel={name}") for name in PARALLEL]
    set_some = 0
    combinations = list(product(models, gpus, splits, QFormat))
    for model, gpu, split, qformat in random.Random(feature).sample(combinations, len(combinations) // 10):
        ranks = {"tp_size": split.build.tp_size, "pp_size": split.build.pp_size}
        changed = {
            "model": model,
            "hardware": gpu,
            "quant": base.quant.model_copy(update={"qformat": qformat}),
            "build": base.build.model_copy(update=ranks),
            "triton": base.triton.model_copy(update={"num_nodes": split.triton.num_nodes}),
        }
        given = base.model_copy(update=changed)
        for wanted in (given, given.baseline()):
            faster = tune(wanted)
            set_some += faster != wanted
            before, after = found_by_rules(wanted), found_by_rules(faster)
            for said, plain in zip(after, before, strict=True):
                assert said <= plain, (feature, model.name, gpu.name, ranks, qformat)
    assert set_some


def test_a_group_that_chooses_keeps_its_other_values():
    build = of_options(max_batch_size=7, gemm_plugin="auto", log_level="debug")
    assert isinstance(build, ChoosingGroup)
    copy = build.choosing({"multiple_profiles": "enable"})
    assert (copy.max_batch_size, copy["log_level"], copy.multiple_profiles) == (7, "debug", "enable")
    assert copy.given("gemm_plugin")
    assert not copy.given("multiple_profiles")
    assert copy.as_given() == build
    assert copy.without(["gemm_plugin"]).gemm_plugin is None
