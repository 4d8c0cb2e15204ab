"""Cases of the rules about formats on GPUs and of model families."""

from dataclasses import replace

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.rotary import Rotary
from tests.support.rule_cases.words import AWQ, FP8, GEMMA, GEMMA2, GEMMA3, GPT_OSS, LLAMA, MIXTRAL, NVFP4, W4A8, Case

CASES = {
    "gpu-too-old": Case({"sm": 7.5}, r"capability 7\.5 is too old", {"sm": 8.0}),
    "fp8-needs-sm89": Case(
        {"sm": 8.6, "qformat": FP8}, r"fp8 needs FP8 .*has 8\.6.*quant=none, int8_sq, int4_awq", {"sm": 8.9}
    ),
    "nvfp4-needs-sm100": Case({"sm": 9.0, "qformat": NVFP4}, r"nvfp4 needs FP4 .*this GPU has 9\.0", {"sm": 10.0}),
    "no-integer-weights-on-sm100": Case(
        {"sm": 10.3, "qformat": AWQ}, r"int4_awq is refused .* 10\.3 .*quant=none, fp8, nvfp4", {"sm": 12.0}
    ),
    "integer-weights-on-sm120": Case(
        {"sm": 12.0, "qformat": AWQ}, r"int4_awq on compute capability 12\.0: .*answers are wrong", {"qformat": FP8}
    ),
    "fp8-kv-needs-sm89": Case(
        {"sm": 8.0, "kv_format": KvFormat.FP8}, r"kv_cache=fp8 needs .*has 8\.0.*kv_cache=auto, int8", {"sm": 8.9}
    ),
    "no-int8-kv-on-sm100": Case(
        {"sm": 10.0, "kv_format": KvFormat.INT8}, r"kv_cache=int8 is refused .*10\.0.*kv_cache=auto, fp8", {"sm": 9.0}
    ),
    "plugins-refused-on-sm100": Case(
        {"sm": 10.0, "build": {"low_latency_gemm_plugin": "fp8"}},
        "low_latency_gemm_plugin=fp8 is rejected",
        {"sm": 9.0},
    ),
    "fp8-plugins-are-for-hopper": Case(
        {"sm": 10.3, "build": {"low_latency_gemm_plugin": "fp8"}},
        r"low_latency_gemm_plugin=fp8 supports only Hopper .*this GPU has 10\.3",
        {"sm": 9.0},
    ),
    "nvfp4-is-not-for-gemma": Case(
        {"qformat": NVFP4, "shape": GEMMA}, "nvfp4 is not supported for GemmaForCausalLM", {"shape": LLAMA}
    ),
    "w4a8-of-gemma-was-listed-no": Case(
        {"qformat": W4A8, "shape": GEMMA}, "lists quant=w4a8_awq of GemmaForCausalLM as not supported", {"shape": LLAMA}
    ),
    "soft-capped-attention-is-for-gpus": Case(
        {"engine": "openvino", "shape": GEMMA2},
        "Gemma2ForCausalLM is not supported by engine=openvino: .* have a soft cap",
        {"engine": "tensorrt_llm"},
    ),
    "families-without-modelopts-export": Case(
        {"shape": MIXTRAL, "qformat": AWQ},
        r"int4_awq .*MixtralForCausalLM cannot .*none, int8_wo",
        {"qformat": QFormat.NONE},
    ),
    "trtllm-build-has-no-gpt-oss": Case(
        {"shape": GPT_OSS, "qformat": QFormat.NONE},
        r"GptOssForCausalLM is not supported by engine=tensorrt_llm: .*does not know gpt-oss",
        {"shape": MIXTRAL},
    ),
    "gpt-oss-has-one-rank": Case(
        {"engine": "openvino", "shape": GPT_OSS, "build": {"tp_size": 2}},
        r"tp_size=2 build\.pp_size=1 would split the checkpoint of GptOssForCausalLM",
        {"build": {"tp_size": 1}},
    ),
    "mixtures-are-not-sparsified": Case(
        {"shape": MIXTRAL, "sparsity": "magnitude", "qformat": QFormat.NONE, "build": {"weight_sparsity": True}},
        "sparsity=magnitude does not prune MixtralForCausalLM, which is a mixture",
        {"sparsity": "none"},
    ),
    "windows-of-gemma-3-alternate": Case(
        {"shape": replace(GEMMA3, windowed=(True, False) * 3 + (True,) * 12)},
        "attention windows in other layers than all but every n-th",
        {"shape": GEMMA3},
    ),
    "positions-of-gemma-3-and-phi-3-are-plain": Case(
        {"shape": GEMMA3, "rotary": Rotary("linear", 1.0)},
        "rope_type 'linear', which TensorRT-LLM's Gemma 3 would compute in another way",
        {"rotary": Rotary("default", 1.0)},
    ),
    "gemma-prefers-bfloat16": Case(
        {"shape": GEMMA, "build": {"gemm_plugin": "float16"}},
        "gemm_plugin=float16 with GemmaForCausalLM",
        {"build": {"gemm_plugin": "bfloat16"}},
    ),
}
