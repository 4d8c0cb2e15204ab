"""Formats against GPU generations and model families."""

from functools import partial

from pipelines.domain.families import Architecture, titles
from pipelines.domain.formats import (
    FORMATS,
    KvFormat,
    QFormat,
    calibrates,
    lacks_fp4,
    lacks_fp8,
    lacks_fp8_kv,
    lacks_int8_kv,
    lacks_integers,
)
from pipelines.domain.rotary import LONGROPE
from pipelines.engines.tensorrt_llm.config import key_of
from pipelines.rules.record import BUILT, CPU, GPU, Cases, DeploymentFacts, Rule, either, known
from pipelines.rules.split import BUILDER, FP8_PLUGINS, GEMMA, MODELOPT, PLUGIN, PRECISION, SUPPORT

REFUSED_ON_SM100 = (*FP8_PLUGINS, "fp8_rowwise_gemm_plugin")
"""Plugins that PluginConfig.validate rejects on compute capability 10.0, and on no other."""


def _plugins_on_sm100(d: DeploymentFacts) -> Cases:
    plugins = [(key_of(name), d.build[name]) for name in REFUSED_ON_SM100]
    return [{"key": key, "value": value} for key, value in plugins if known(d.sm) == 10.0 and value != "disable"]


def _fp8_plugins_elsewhere(d: DeploymentFacts) -> Cases:
    """Return the plugins whose kernels are Hopper's; 10.0 has a rule of its own."""
    elsewhere = known(d.sm) not in (9.0, 10.0)
    return [{"key": key_of(name)} for name in FP8_PLUGINS if elsewhere and d.build[name] == "fp8"]


def _not_by_tensor(d: DeploymentFacts) -> Cases:
    """Return why a family cannot have this format, if its checkpoints follow from its tensors alone."""
    family, formats = known(d.shape).family, d.candidates or (d.qformat,)
    if not family.by_tensor or not calibrates(formats, d.kv_format):
        return ()
    if not (family.trtllm_build if d.needs_gpu else family.cpu_engine):  # refused in every format
        return ()
    if not d.needs_gpu and formats == (QFormat.INT4_RTN,) and d.kv_format is KvFormat.AUTO:
        return ()
    fp8 = bool(family.experts) and family.trtllm_build
    if fp8 and formats == (QFormat.FP8,) and d.kv_format is not KvFormat.INT8:
        return ()
    more = ("" if d.needs_gpu else ", int4_rtn") + (", fp8" if fp8 else "")
    other = ", or engine=tensorrt_llm_llmapi" if "llm_api" in family.features and not family.gpt_oss else ""
    return [{"why": family.not_exported, "by_tensor": f"none, int8_wo, int4_wo{more}", "other": other}]


rule = partial(Rule, topic="Formats and GPUs")
family_rule = partial(Rule, topic="Formats and model families")
family_warning = partial(family_rule, warns=True)
RULES = (
    rule(
        name="fp8-needs-sm89",
        when=lambda d: lacks_fp8(d.qformat, known(d.sm)),
        failed="quant={d.qformat} needs FP8 arithmetic (compute capability 8.9 or newer); this GPU has {d.sm}.",
        allowed="On compute capability {d.sm}: {quants}.",
        source=f"{SUPPORT}; issue #1428",
    ),
    rule(
        name="nvfp4-needs-sm100",
        when=lambda d: lacks_fp4(d.qformat, known(d.sm)),
        failed="quant={d.qformat} needs FP4 arithmetic (compute capability 10.0 or newer); this GPU has {d.sm}.",
        allowed="On compute capability {d.sm}: {quants}.",
        source=SUPPORT,
    ),
    rule(
        name="no-integer-weights-on-sm100",
        engines=BUILT,
        when=lambda d: lacks_integers(d.qformat, known(d.sm)),
        failed="quant={d.qformat} is refused by TensorRT-LLM's builder on compute capability {d.sm} (no INT8 and INT4"
        " kernels).",
        allowed="On compute capability {d.sm}: {quants}.",
        source=BUILDER,
    ),
    rule(
        name="integer-weights-on-sm120",
        engines=GPU,
        warns=True,
        when=lambda d: known(d.sm) >= 12.0 and (FORMATS[d.qformat].weight_only or d.qformat is QFormat.W4A8_AWQ),
        failed="quant={d.qformat} on compute capability {d.sm}: TensorRT-LLM 1.3.0rc3 arranges such weights as its"
        " kernels there do not read them, so answers are wrong; whether 1.2 does is not known.",
        todo="Check its accuracy with `make evaluate`, or choose quant=nvfp4 or fp8.",
        source="tensorrt_llm/quantization/functional.py: preprocess_weights_for_mixed_gemm (1.3.0rc3); pull request"
        " #11561",
    ),
    rule(
        name="fp8-kv-needs-sm89",
        when=lambda d: (d.writes_engine or d.on_device) and lacks_fp8_kv(d.kv_format, known(d.sm)),
        failed="kv_cache={d.kv_format} needs FP8 conversion (compute capability 8.9 or newer); this GPU has {d.sm}.",
        allowed="On compute capability {d.sm}: {kv_caches}.",
        source=SUPPORT,
    ),
    rule(
        name="no-int8-kv-on-sm100",
        engines=BUILT,
        when=lambda d: lacks_int8_kv(d.kv_format, known(d.sm)),
        failed="kv_cache={d.kv_format} is refused by TensorRT-LLM's builder on compute capability {d.sm}.",
        allowed="On compute capability {d.sm}: {kv_caches}.",
        source=BUILDER,
    ),
    rule(
        name="gpu-too-old",
        when=lambda d: known(d.sm) < 8.0,
        failed="Compute capability {d.sm} is too old for TensorRT-LLM 1.2.",
        allowed="It supports 8.0 (A100) and newer.",
        todo="Choose another GPU, or engine=openvino.",
        source=SUPPORT,
    ),
    rule(
        name="plugins-refused-on-sm100",
        engines=GPU,
        when=_plugins_on_sm100,
        failed="{key}={value} is rejected by TensorRT-LLM on compute capability {d.sm}.",
        todo="Set {key}=disable.",
        source=PLUGIN,
    ),
    rule(
        name="fp8-plugins-are-for-hopper",
        engines=GPU,
        when=_fp8_plugins_elsewhere,
        failed="{key}=fp8 supports only Hopper (compute capability 9.0); this GPU has {d.sm}.",
        todo="Set {key}=disable.",
        source=f"{PLUGIN}; cpp/tensorrt_llm/kernels/cutlass_kernels: fused_gated_gemm, low_latency_gemm (1.3.0rc3)",
    ),
    family_rule(
        name="nvfp4-is-not-for-gemma",
        engines=BUILT,
        when=lambda d: d.qformat is QFormat.NVFP4 and "nvfp4" not in known(d.shape).family.features,
        failed="quant=nvfp4 is not supported for {d.shape.architecture} by TensorRT-LLM.",
        allowed=f"NVFP4 supports {either(titles('nvfp4'), 'and')}. Supported here: {{quants}}.",
        source=PRECISION,
    ),
    family_warning(
        name="w4a8-of-gemma-was-listed-no",
        when=lambda d: d.qformat is QFormat.W4A8_AWQ and known(d.shape).family.w4a8_in_doubt,
        failed="TensorRT-Cloud 0.12 lists quant=w4a8_awq of {d.shape.architecture} as not supported, although"
        " TensorRT-LLM's quantize.py has a case for it.",
        todo="Check its accuracy with `make evaluate`.",
        source=f"{PRECISION}; TensorRT-Cloud 0.12 model table",
    ),
    family_rule(
        name="soft-capped-attention-is-for-gpus",
        engines=CPU,
        when=lambda d: not known(d.shape).family.cpu_engine,
        failed="{d.shape.architecture} is not supported by engine=openvino: the logits of its attention have a soft"
        " cap, which OpenVINO's paged attention does not compute.",
        todo="Use engine=tensorrt_llm, or a Gemma 3.",
        source="openvinotoolkit/openvino src/core: PagedAttentionExtension has no input for a soft cap (2026.4)",
    ),
    family_rule(
        name="families-without-modelopts-export",
        engines=BUILT,
        when=_not_by_tensor,
        failed="quant={d.qformat} with kv_cache={d.kv_format} of {d.shape.architecture} cannot be exported to a"
        " TensorRT-LLM checkpoint: {why}.",
        allowed="With kv_cache=auto: quant={by_tensor}.",
        todo="Use one of them{other}.",
        source=f"{MODELOPT}: build_moe_config reads a list of experts, other decoders need tensorrt_llm",
    ),
    family_rule(
        name="trtllm-build-has-no-gpt-oss",
        engines=GPU,
        when=lambda d: not known(d.shape).family.trtllm_build,
        failed="{d.shape.architecture} is not supported by engine=tensorrt_llm: trtllm-build of TensorRT-LLM 1.2 does"
        " not know {d.shape.family.title}.",
        todo="Use engine=openvino, or engine=tensorrt_llm_llmapi with quant=none.",
        source="tensorrt_llm/models/__init__.py (1.2): MODEL_MAP",
    ),
    family_rule(
        name="gpt-oss-has-one-rank",
        engines=CPU,
        when=lambda d: not known(d.shape).family.trtllm_build and d.world_size > 1,
        failed="build.tp_size={d.build.tp_size} build.pp_size={d.build.pp_size} would split the checkpoint of"
        " {d.shape.architecture}, which has one rank: no engine reads it from several GPUs.",
        todo="Set build.tp_size=1 build.pp_size=1, or use engine=tensorrt_llm_llmapi with build.pp_size=1.",
        source="pipelines/checkpoint/verify.py: sinks and biases of experts are whole",
    ),
    family_rule(
        name="mixtures-are-not-sparsified",
        engines=BUILT,
        when=lambda d: d.sparsity != "none" and bool(known(d.shape).family.experts),
        failed="sparsity={d.sparsity} does not prune {d.shape.architecture}, which is a mixture of experts.",
        todo="Use sparsity=none.",
        source="pipelines/compress/sparsifying.py: it reads one MLP for each layer",
    ),
    family_rule(
        name="windows-of-gemma-3-alternate",
        engines=BUILT,
        when=lambda d: bool(known(d.shape).windowed) and known(d.shape).family.states_window,
        failed="{d.label} has attention windows in other layers than all but every n-th, which a TensorRT-LLM"
        " checkpoint cannot state.",
        todo="Choose another model, or use engine=tensorrt_llm_llmapi.",
        source="tensorrt_llm/models/gemma/model.py: _sliding_window_pattern",
    ),
    family_rule(
        name="positions-of-gemma-3-and-phi-3-are-plain",
        engines=GPU,
        when=lambda d: (
            d.rotary is not None
            and d.rotary.kind not in ("default", LONGROPE)
            and known(d.shape).architecture in (Architecture.GEMMA3, Architecture.PHI3)
        ),
        failed="{d.label} scales its rotary positions by rope_type '{d.rotary.kind}', which TensorRT-LLM's"
        " {d.shape.family.title} would compute in another way than the model.",
        todo="Use engine=tensorrt_llm_llmapi.",
        source="tensorrt_llm/layers/attention.py: Gemma 3's two bases alike; models/phi3/model.py: only longrope",
    ),
    family_warning(
        name="gemma-prefers-bfloat16",
        engines=GPU,
        when=lambda d: (
            known(d.shape).family.float16_overflows
            and [
                {"key": key_of(name)}
                for name in ("gemm_plugin", "gpt_attention_plugin", "lora_plugin")
                if d.build[name] == "float16"
            ]
        ),
        failed="{key}=float16 with {d.shape.architecture}: its activations can overflow in float16.",
        todo="Set {key}=bfloat16 or auto.",
        source=f"{GEMMA}; issues #2233, #2327, #4815",
    ),
)
