"""Cases of the rules about KV cache and attention."""

from dataclasses import replace

from pipelines.domain.formats import KvFormat
from tests.support.rule_cases.words import AWQ, FP8, LLAMA, MISTRAL, Case, kv

CASES = {
    "a-models-window-is-told": Case(
        {"shape": MISTRAL, "build": {"max_seq_len": 8192}},
        r"MistralForCausalLM was trained with .* 4096 tokens.*up to 8192 .*max_attention_window_size=\[4096\]",
        {"triton": {"max_attention_window_size": (4096,)}},
    ),
    "cpu-attends-to-everything": Case(
        {
            "engine": "openvino",
            "shape": replace(MISTRAL, architecture="Qwen2ForCausalLM"),
            "build": {"max_seq_len": 8192},
        },
        r"Qwen2ForCausalLM was trained .* window of 4096 tokens, but sequences of up to 8192",
        {"build": {"max_seq_len": 4096}},
    ),
    "kv-format-takes-reuse-and-chunks": Case(
        kv(chunked_context=True, qformat=AWQ, kv_format=KvFormat.FP8),
        "kv_cache=fp8 with quant=int4_awq rules out KV-cache reuse and chunked context",
        {"qformat": FP8},
    ),
    "no-context-fmha-no-reuse": Case(
        kv(build={"context_fmha": "disable"}), "context_fmha=disable rules out KV-cache reuse", {"kv_reuse": False}
    ),
    "no-paged-context-no-reuse": Case(
        {"chunked_context": True, "build": {"use_paged_context_fmha": "disable"}},
        "use_paged_context_fmha=disable rules out chunked context",
        {"chunked_context": False},
    ),
    "without-context-fmha": Case(
        {"build": {"context_fmha": "disable"}},
        "context_fmha=disable switches FP8",
        {"build": {"context_fmha": "enable"}},
    ),
    "fp8-cache-brings-fp8-attention": Case(
        {"qformat": FP8, "kv_format": KvFormat.FP8, "build": {"use_fp8_context_fmha": "disable"}},
        "use_fp8_context_fmha=disable has no effect with quant=fp8 and kv_cache=fp8",
        {"kv_format": KvFormat.AUTO},
    ),
    "features-need-a-paged-kv-cache": Case(
        {"build": {"kv_cache_type": "continuous"}},
        "kv_cache_type=continuous has no blocks",
        {"build": {"kv_cache_type": "paged"}},
    ),
    "paged-kv-cache-is-deprecated": Case(
        {"build": {"paged_kv_cache": "disable"}},
        "paged_kv_cache=disable is the deprecated",
        {"build": {"paged_kv_cache": "enable"}},
    ),
    "in-flight-batching-packs-its-input": Case(
        {"build": {"remove_input_padding": "disable"}},
        "remove_input_padding=disable: in-flight batching needs packed",
        {"build": {"remove_input_padding": "enable"}},
    ),
    "streamingllm-cannot-be-built": Case(
        {"build": {"streamingllm": "enable"}}, "streamingllm=enable stops", {"engine": "openvino"}
    ),
    "sinks-need-streamingllm": Case(
        {"triton": {"sink_token_length": 4, "max_attention_window_size": (64,)}},
        "sink_token_length=4 needs an engine",
        {"engine": "openvino"},
    ),
    "sinks-need-a-window": Case(
        {"engine": "openvino", "triton": {"sink_token_length": 32}},
        "sink_token_length=32 is set without a window",
        {"triton": {"max_attention_window_size": (64,)}},
    ),
    "sinks-fit-their-window": Case(
        {"engine": "openvino", "triton": {"sink_token_length": 64, "max_attention_window_size": (128, 64)}},
        "sink_token_length=64 leaves no room",
        {"triton": {"sink_token_length": 63}},
    ),
    "a-passed-window-ends-reuse": Case(
        kv(triton={"max_attention_window_size": (4096, 8192)}),
        r"size=\[4096, 8192\] with KV-cache reuse",
        {"kv_reuse": False},
    ),
    "heads-have-a-kernel": Case(  # OpenLLaMA 3B
        {"shape": replace(LLAMA, head_dim=100), "label": "open_llama_3b"},
        "open_llama_3b has heads of 100, for which TensorRT-LLM has no attention kernel",
        {"shape": LLAMA},
    ),
    "windows-have-no-beams": Case(
        {"shape": LLAMA, "build": {"max_beam_width": 4}, "triton": {"max_attention_window_size": (4096,)}},
        r"max_attention_window_size=\[4096\] cannot be combined with max_beam_width=4",
        {"build": {"max_seq_len": 4096}},
    ),
    "windows-repeat-with-each-stage": Case(
        {"shape": LLAMA, "build": {"pp_size": 2}, "triton": {"max_attention_window_size": (4096, 4096, 131072)}},
        r"\[4096, 4096, 131072\] cannot be combined with build\.pp_size=2: .* each stage of 16 layers",
        {"triton": {"max_attention_window_size": (4096, 131072)}},
    ),
    "host-blocks-come-back-first": Case(
        {"triton": {"kv_cache_onboard_blocks": False}},
        "kv_cache_onboard_blocks=false stops the server",
        {"kv_format": KvFormat.INT8},
    ),
    "context-logits-end-reuse": Case(
        kv(build={"gather_context_logits": True}),
        "gather_context_logits=true: the server switches KV-cache reuse off",
        {"kv_reuse": False},
    ),
    "kv-cache-leaves-some-memory": Case(
        {"triton": {"kv_cache_free_gpu_mem_fraction": 1.0}},
        r"fraction=1\.0 stops the server",
        {"triton": {"kv_cache_free_gpu_mem_fraction": 0.95}},
    ),
    "host-blocks-are-for-reuse": Case(
        {"triton": {"kv_cache_host_memory_bytes": 1000}}, "kv_cache_host_memory_bytes=1000", {"kv_reuse": True}
    ),
    "prompts-fit-one-iteration": Case(
        {"build": {"max_num_tokens": 512, "max_batch_size": 8}},
        "max_num_tokens=512 is less than max_input_len=1024",
        {"chunked_context": True},
    ),
}
