"""Cases of the rules about limits, plugins and fusions."""

from dataclasses import replace

from pipelines.domain.formats import QFormat
from tests.support.rule_cases.words import AWQ, FP8, GEMMA, LLAMA, MIXTRAL, NVFP4, W4A8, Case

CASES = {
    "longer-than-the-model": Case(
        {"shape": GEMMA, "build": {"max_seq_len": 8193}},
        "max_seq_len=8193 is more than .*8192 tokens",
        {"build": {"max_seq_len": 8192}},
    ),
    "prompt-longer-than-the-sequence": Case(
        {"build": {"max_input_len": 2000, "max_seq_len": 1500}},
        "max_input_len=2000 is more than max_seq_len=1500",
        {"build": {"max_seq_len": 2000}},
    ),
    "kv-blocks-are-powers-of-two": Case(
        {"build": {"tokens_per_block": 48}}, "tokens_per_block=48 is not a power", {"build": {"tokens_per_block": 64}}
    ),
    "profiles-or-a-tuning-point": Case(
        {"build": {"multiple_profiles": "enable", "opt_num_tokens": 77}},
        "opt_num_tokens=77 cannot be combined with multiple_profiles",
        {"build": {"opt_num_tokens": None}},
    ),
    "tuning-point-within-the-tokens": Case(
        {"build": {"opt_num_tokens": 9000, "max_num_tokens": 8192}},
        "opt_num_tokens=9000 would be ignored: it is more than max_num_tokens=8192",
        {"build": {"opt_num_tokens": 8192}},
    ),
    "packed-prompts-need-the-attention-plugin": Case(
        {"build": {"gpt_attention_plugin": "disable"}},
        "gpt_attention_plugin=disable stops the build",
        {"build": {"gpt_attention_plugin": "auto"}},
    ),
    "redrafter-has-one-profile": Case(
        {"speculation": "redrafter", "build": {"multiple_profiles": "enable"}},
        "multiple_profiles=enable cannot be combined with speculative=redrafter",
        {"speculation": "medusa"},
    ),
    "context-logits-without-drafts": Case(
        {"build": {"gather_context_logits": True, "max_draft_len": 5}},
        "gather_context_logits=true cannot be combined with max_draft_len=5",
        {"build": {"max_draft_len": 0}},
    ),
    "generation-logits-need-no-flag": Case(
        {"build": {"gather_generation_logits": True}},
        "gather_generation_logits=true is deprecated",
        {"build": {"gather_generation_logits": False}},
    ),
    "fp8-plugins-need-fp8": Case(
        {"qformat": AWQ, "build": {"low_latency_gemm_plugin": "fp8"}},
        "low_latency_gemm_plugin=fp8 .*quant=int4_awq",
        {"qformat": FP8},
    ),
    "swiglu-plugins-need-swiglu": Case(
        {"shape": GEMMA, "qformat": FP8, "build": {"gemm_swiglu_plugin": "fp8"}},
        "gemm_swiglu_plugin=fp8 computes a SwiGLU .*GemmaForCausalLM",
        {"shape": LLAMA},
    ),
    "swiglu-plugins-need-a-fused-mlp": Case(
        {"qformat": FP8, "build": {"gemm_swiglu_plugin": "fp8", "use_fused_mlp": "disable"}},
        "gemm_swiglu_plugin=fp8 stops the build with build.trtllm.use_fused_mlp=disable",
        {"build": {"use_fused_mlp": "enable"}},
    ),
    "one-swiglu-plugin": Case(
        {"qformat": FP8, "build": {"gemm_swiglu_plugin": "fp8", "low_latency_gemm_swiglu_plugin": "fp8"}},
        "gemm_swiglu_plugin=fp8 would be ignored beside low_latency",
        {"build": {"low_latency_gemm_swiglu_plugin": "disable"}},
    ),
    "nvfp4-has-its-own-gemm-plugin": Case(
        {"qformat": NVFP4, "build": {"gemm_plugin": "float16"}},
        "gemm_plugin=float16 would be ignored: with quant=nvfp4",
        {"build": {"gemm_plugin": "disable"}},
    ),
    "group-size-has-a-kernel": Case(
        {"qformat": W4A8, "group_size": 64}, r"w4a8_awq with quant\.group_size=64 .*groups of 128\.", {"qformat": AWQ}
    ),
    # 64 * 8 = 512; 11008 = 21.5 * 512
    "integer-linears-are-not-padded": Case(
        {
            "shape": replace(LLAMA, num_key_value_heads=32, intermediate_size=11008),
            "qformat": QFormat.INT8_WO,
            "build": {"tp_size": 8},
        },
        r"int8_wo with tp_size=8 .*multiples of 512.*mlp\.fc \(11008 x 4096\).*tp_size=1/2/4 works",
        {"build": {"tp_size": 4}},
    ),
    "rowwise-plugin-needs-rowwise-scales": Case(
        {"qformat": FP8, "build": {"fp8_rowwise_gemm_plugin": "auto"}},
        "fp8_rowwise_gemm_plugin=auto needs FP8 scales per token",
        {"build": {"fp8_rowwise_gemm_plugin": "disable"}},
    ),
    "nvfp4-plugin-needs-nvfp4": Case(
        {"qformat": FP8, "build": {"gemm_plugin": "nvfp4"}}, "gemm_plugin=nvfp4 .*quant=fp8", {"qformat": NVFP4}
    ),
    "fused-fp4-needs-context-attention": Case(
        {"qformat": NVFP4, "build": {"fuse_fp4_quant": "enable", "context_fmha": "disable"}},
        "fuse_fp4_quant=enable needs fused context attention; given is context_fmha=disable",
        {"build": {"fuse_fp4_quant": "enable", "context_fmha": "enable"}},
    ),
    "fp8-is-slower-with-gemm-plugin": Case(
        {"qformat": FP8, "build": {"gemm_plugin": "auto"}}, "gemm_plugin=auto is discouraged", {"qformat": AWQ}
    ),
    "reduce-fusion-would-be-ignored": Case(
        {"shape": GEMMA, "build": {"reduce_fusion": "enable", "tp_size": 2}},
        "reduce_fusion=enable would be ignored.*given GemmaForCausalLM",
        {"shape": LLAMA},
    ),
    "reduce-fusion-is-left-off": Case(
        {"shape": LLAMA, "build": {"tp_size": 2}}, "reduce_fusion=disable with tp_size=2", {"build": {"tp_size": 1}}
    ),
    "user-buffers-need-reduce-fusion": Case(
        {"build": {"user_buffer": "enable"}},
        "ignored with reduce_fusion=disable",
        {"build": {"reduce_fusion": "enable"}},
    ),
    "user-buffers-are-for-fp8-llama": Case(
        {"shape": LLAMA, "qformat": AWQ, "build": {"user_buffer": "enable"}},
        "user_buffer=enable .*quant=int4_awq",
        {"qformat": FP8},
    ),
    "norm-quant-fusion-would-be-ignored": Case(
        {"shape": LLAMA, "qformat": FP8, "build": {"norm_quant_fusion": "enable"}},
        "norm_quant_fusion=enable would be ignored.*quant=fp8",
        {"qformat": NVFP4},
    ),
    "norm-quant-fusion-or-reduce-fusion": Case(
        {"build": {"norm_quant_fusion": "enable", "reduce_fusion": "enable"}},
        "norm_quant_fusion=enable would be ignored with reduce_fusion=enable",
        {"build": {"reduce_fusion": "disable"}},
    ),
    "pp-reduce-scatter-is-for-mixtral": Case(
        {"shape": MIXTRAL, "build": {"pp_reduce_scatter": "enable"}},
        "pp_reduce_scatter=enable is for Mixtral .* trtllm-build ignores it with pp_size=1",
        {"build": {"pp_size": 2}},
    ),
    "plugins-keep-their-weights": Case(
        {"qformat": AWQ, "build": {"weight_streaming": True, "gemm_plugin": "disable"}},
        "weight_streaming=true does not stream INT8 or INT4 weights",
        {"qformat": FP8},
    ),
    "streaming-is-for-weights-without-plugin": Case(
        {"build": {"weight_streaming": True, "gemm_plugin": "auto"}},
        "weight_streaming=true needs gemm_plugin=disable, given 'auto'",
        {"build": {"gemm_plugin": "disable"}},
    ),
    "weights-on-the-host-need-streaming": Case(
        {"triton": {"gpu_weights_percent": 0.5}},
        r"gpu_weights_percent=0\.5 needs",
        {"build": {"weight_streaming": True, "gemm_plugin": "disable"}},
    ),
    "sparse-kernels-without-plugin": Case(
        {"sparsity": "magnitude", "build": {"weight_sparsity": True}},
        "weight_sparsity=true needs gemm_plugin=disable, given 'None'",
        {"build": {"gemm_plugin": "disable"}},
    ),
    "sparse-kernels-need-sparse-weights": Case(
        {"build": {"weight_sparsity": True}}, "weight_sparsity=true with sparsity=none", {"sparsity": "sparsegpt"}
    ),
    "zeros-need-sparse-kernels": Case(
        {"sparsity": "sparsegpt"}, "weight_sparsity=false with sparsity=sparsegpt", {"build": {"weight_sparsity": True}}
    ),
    "no-sparse-kernels": Case(
        {"sparsity": "magnitude", "qformat": QFormat.INT8_SQ, "build": {"weight_sparsity": True}},
        "sparsity=magnitude with quant=int8_sq saves no time and no memory",
        {"qformat": QFormat.FP8},
    ),
    "sparsity-may-not-be-faster": Case(
        {"sparsity": "magnitude", "build": {"weight_sparsity": True}},
        "sparsity=magnitude: users measured a speed-up of 0 to 5 %",
        {"sparsity": "none"},
    ),
}
