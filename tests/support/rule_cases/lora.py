"""Cases of the rules about LoRA adapters."""

from dataclasses import replace

from pipelines.domain.adapter import MODULES
from tests.support.rule_cases.words import ADAPTER, FP8, LLAMA, MIXTRAL, NVFP4, SERVED, Case

ON_MLP = replace(ADAPTER, modules=("down_proj",), widths={"down_proj": (14336, 4096)})
CASES = {
    "lora-has-no-fp4-linears": Case(
        {"qformat": NVFP4, "build": SERVED}, "lora_plugin=auto cannot be combined with quant=nvfp4", {"qformat": FP8}
    ),
    "lora-is-outside-of-fused-swiglu": Case(
        {
            "qformat": FP8,
            "build": {**SERVED, "lora_target_modules": ("attn_q", "mlp_gate"), "gemm_swiglu_plugin": "fp8"},
        },
        r"target_modules has mlp_gate, which build\.gemm_swiglu_plugin=fp8",
        {"build": {"lora_target_modules": ("attn_q",)}},
    ),
    "lora-plugin-and-modules-together": Case(
        {"build": {"lora_plugin": "auto"}},
        "lora_plugin=auto and build.trtllm.lora_target_modules=None",
        {"build": SERVED},
    ),
    "dora-needs-the-lora-plugin": Case(
        {"build": {"dora_plugin": "enable"}}, "lora_plugin is disable", {"build": SERVED}
    ),
    "adapters-need-the-lora-plugin": Case(
        {"adapters": {7: ADAPTER}}, "lora.adapters has 7, .*lora_plugin=disable", {"build": SERVED}
    ),
    "adapters-are-not-for-experts": Case(
        {"shape": MIXTRAL, "adapters": {7: ON_MLP}, "build": {**SERVED, "lora_target_modules": ("mlp_4h_to_h",)}},
        "adapts down_proj, but MixtralForCausalLM is a mixture of experts",
        {"shape": LLAMA},
    ),
    "adapter-rank-fits": Case(
        {"adapters": {7: replace(ADAPTER, rank=65)}},
        "has rank 65, more than lora.max_rank=64",
        {"build": {"max_lora_rank": 65}},
    ),
    "adapter-modules-are-built-in": Case(
        {"adapters": {7: replace(ADAPTER, modules=("q_proj", "v_proj"))}, "build": SERVED},
        "adapts attn_v, but lora.target_modules has attn_q",
        {"build": {"lora_target_modules": ("attn_q", "attn_v")}},
    ),
    "adapter-fits-the-model": Case(
        {"shape": LLAMA, "adapters": {7: replace(ADAPTER, widths={"q_proj": (2048, 2048)})}},
        "its q_proj has 2048 inputs and 2048 outputs, the model's has 4096 and 4096",
        {"adapters": {7: ADAPTER}},
    ),
    "adapter-layers-exist": Case(
        {"shape": LLAMA, "adapters": {7: replace(ADAPTER, layers=99)}},
        "at least 99; the model has 32",
        {"adapters": {7: ADAPTER}},
    ),
    "adapter-fits-the-cache": Case(
        {"build": {**SERVED, "max_lora_rank": 128}},
        "max_rank=128 .*lora_cache_max_adapter_size=64",
        {"triton": {"lora_cache_max_adapter_size": 128}},
    ),
    # 80 layers of 109,568 inputs and outputs of a rank, times rank 64 and 2 bytes: 1,121,976,320, and whole pages
    "adapter-fits-the-host-cache": Case(
        {
            "shape": replace(
                LLAMA, num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, intermediate_size=28672
            ),
            "build": {"lora_plugin": "auto", "lora_target_modules": tuple(MODULES.values()), "tp_size": 2},
        },
        "lora_cache_host_memory_bytes=1073741824 stops the server.* takes 1123024896 bytes",
        {"triton": {"lora_cache_host_memory_bytes": 1123024896}},
    ),
    "adapters-have-the-engines-type": Case(
        {"adapters": {7: ADAPTER}, "build": SERVED, "dtype": "bfloat16"}, r"quant\.dtype=bfloat16", {"dtype": "float16"}
    ),
    "adapters-want-float16": Case(
        {"adapters": {7: ADAPTER}, "build": SERVED},
        r"quant\.dtype=auto: only an engine of float16",
        {"dtype": "float16"},
    ),
    "adapters-with-speculation-are-untested": Case(
        {"build": SERVED, "speculation": "lookahead"},
        "speculative=lookahead is listed as untested",
        {"speculation": "none"},
    ),
}
