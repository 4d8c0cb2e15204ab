"""For every rule: a deployment that breaks it, its message, and the nearest one that does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipelines.build_settings import BuildSettings
from pipelines.domain.adapter import Adapter
from pipelines.domain.formats import KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.rulebook.record import Deployment, Images
from triton_repo.settings import TritonSettings

LLAMA = ModelShape("LlamaForCausalLM", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False)
SMALL_LLAMA = replace(LLAMA, num_hidden_layers=16, hidden_size=2048, intermediate_size=8192)
GEMMA = ModelShape("GemmaForCausalLM", 18, 2048, 8, 1, 256, 16384, 256000, 8192, True)
GEMMA2 = replace(GEMMA, architecture="Gemma2ForCausalLM")
FP8, NVFP4, AWQ, SQ, W4A8 = QFormat.FP8, QFormat.NVFP4, QFormat.INT4_AWQ, QFormat.INT8_SQ, QFormat.W4A8_AWQ
LLAVA = Images("llava", 576, 1)
ADAPTER = Adapter("/a", "LORA", 8, ("q_proj",), {"q_proj": (4096, 4096)})
SERVED = {"lora_plugin": "auto", "lora_target_modules": ("attn_q",)}
EAGLE = {"speculative_decoding_mode": "eagle", "max_draft_len": 63, "max_batch_size": 64}
LOOKAHEAD = {"lookahead_window_size": 7, "lookahead_ngram_size": 7, "lookahead_verification_set_size": 7}


def deployment(
    *, build: dict[str, Any] | None = None, triton: dict[str, Any] | None = None, **given: Any
) -> Deployment:
    """A deployment from the defaults of trtllm-build and of the repository, with some values changed."""
    return Deployment(build=BuildSettings(**(build or {})), triton=TritonSettings(**(triton or {})), **given)


@dataclass(frozen=True)
class Case:
    """`broken` breaks the rule with `match` in its message; with `fixed` laid over it, it does not."""

    broken: dict[str, Any]
    match: str
    fixed: dict[str, Any]

    def nearest(self) -> Deployment:
        """The nearest deployment that keeps the rule: nested groups are merged."""
        merged = dict(self.broken)
        for key, value in self.fixed.items():
            merged[key] = {**merged.get(key, {}), **value} if key in ("build", "triton") else value
        return deployment(**merged)


def kv(reuse: bool = True, **given: Any) -> dict[str, Any]:
    return {"kv_reuse": reuse, **given}


CASES = {
    # formats and GPUs
    "gpu-too-old": Case({"sm": 7.5}, r"capability 7\.5 is too old", {"sm": 8.0}),
    "fp8-needs-sm89": Case(
        {"sm": 8.6, "qformat": FP8}, r"fp8 needs FP8 .*has 8\.6.*quant=none, int8_sq, int4_awq", {"sm": 8.9}
    ),
    "nvfp4-needs-sm100": Case({"sm": 9.0, "qformat": NVFP4}, r"nvfp4 needs FP4 .*this GPU has 9\.0", {"sm": 10.0}),
    "no-integer-weights-on-sm100": Case(
        {"sm": 10.3, "qformat": AWQ}, r"int4_awq is refused .* 10\.3 .*quant=none, fp8, nvfp4", {"sm": 12.0}
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
    "gemm-swiglu-is-for-hopper": Case(
        {"sm": 8.9, "build": {"gemm_swiglu_plugin": "fp8"}}, r"Hopper .*this GPU has 8\.9", {"sm": 9.0}
    ),
    "nvfp4-is-not-for-gemma": Case(
        {"qformat": NVFP4, "shape": GEMMA}, "nvfp4 is not supported for GemmaForCausalLM", {"shape": LLAMA}
    ),
    "w4a8-of-gemma-was-listed-no": Case(
        {"qformat": W4A8, "shape": GEMMA}, "w4a8_awq of GemmaForCausalLM was listed", {"shape": LLAMA}
    ),
    "gemma2-cannot-be-exported": Case({"shape": GEMMA2}, "Gemma2ForCausalLM cannot be exported", {"shape": GEMMA}),
    "gemma-prefers-bfloat16": Case(
        {"shape": GEMMA, "build": {"gemm_plugin": "float16"}},
        "gemm_plugin=float16 with GemmaForCausalLM",
        {"build": {"gemm_plugin": "bfloat16"}},
    ),
    # sizes and ranks
    "gemma-has-no-pipeline": Case(
        {"shape": GEMMA, "build": {"pp_size": 2}}, "pp_size=2 does not work with GemmaForCausalLM", {"shape": LLAMA}
    ),
    "ranks-divide-heads-and-mlp": Case(
        {"shape": LLAMA, "build": {"tp_size": 3}},
        "tp_size=3 does not divide num_attention_heads=32",
        {"build": {"tp_size": 4}},
    ),
    "ranks-share-kv-heads-evenly": Case(
        {"shape": LLAMA, "build": {"tp_size": 3}}, "tp_size=3 and num_key_value_heads=8", {"build": {"tp_size": 16}}
    ),
    "smoothquant-cannot-copy-kv-heads": Case(
        {"shape": GEMMA, "qformat": SQ, "build": {"tp_size": 2}},
        "tp_size=2 needs copies of the 1 KV head",
        {"qformat": AWQ},
    ),
    "stages-divide-layers": Case(
        {"shape": LLAMA, "build": {"pp_size": 3}},
        "pp_size=3 does not divide num_hidden_layers=32",
        {"build": {"pp_size": 4}},
    ),
    # 14336 / 32 = 448 = 7 * 64, so groups of 64 work and groups of 128 do not
    "groups-divide-inputs": Case(
        {"shape": LLAMA, "qformat": AWQ, "build": {"tp_size": 32}},
        r"groups of 128 inputs.* 448 inputs of mlp\.proj per rank .*group_size=64/32/16",
        {"group_size": 64},
    ),
    "int4-packs-pairs-of-outputs": Case(
        {"shape": replace(LLAMA, intermediate_size=14337), "qformat": AWQ}, r"odd: mlp\.fc \(14337\)", {"qformat": FP8}
    ),
    "sparsity-needs-whole-groups-of-inputs": Case(
        {"shape": replace(LLAMA, intermediate_size=14338), "sparsity": "sparsegpt"},
        r"multiples of 4; mlp\.proj has 14338",
        {"shape": replace(LLAMA, intermediate_size=14340)},
    ),
    "magnitude-sparsity-needs-outputs-in-eights": Case(
        {"shape": replace(LLAMA, intermediate_size=14340), "sparsity": "magnitude"},
        "multiples of 8; intermediate_size is 14340",
        {"sparsity": "sparsegpt"},
    ),
    # KV cache and attention
    "kv-format-takes-reuse-and-chunks": Case(
        kv(chunked_context=True, qformat=AWQ, kv_format=KvFormat.FP8),
        "kv_cache=fp8 with quant=int4_awq takes away KV-cache reuse and chunked context",
        {"qformat": FP8},
    ),
    "no-context-fmha-no-reuse": Case(
        kv(build={"context_fmha": "disable"}), "context_fmha=disable takes away KV-cache reuse", {"kv_reuse": False}
    ),
    "no-paged-context-no-reuse": Case(
        {"chunked_context": True, "build": {"use_paged_context_fmha": "disable"}},
        "use_paged_context_fmha=disable takes away chunked context",
        {"chunked_context": False},
    ),
    "without-context-fmha": Case(
        {"build": {"context_fmha": "disable"}},
        "context_fmha=disable switches FP8",
        {"build": {"context_fmha": "enable"}},
    ),
    "features-need-a-paged-kv-cache": Case(
        {"build": {"kv_cache_type": "continuous"}},
        "kv_cache_type=continuous has no blocks",
        {"triton": {"batching_strategy": "V1"}},
    ),
    "paged-kv-cache-is-deprecated": Case(
        {"build": {"paged_kv_cache": "disable"}},
        "paged_kv_cache=disable is the deprecated",
        {"build": {"paged_kv_cache": "enable"}},
    ),
    "in-flight-batching-packs-its-input": Case(
        {"build": {"remove_input_padding": "disable"}},
        "remove_input_padding=disable does not go with .*inflight_fused_batching",
        {"triton": {"batching_strategy": "V1"}},
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
        "sink_token_length=32 was given without a window",
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
    "host-blocks-are-for-reuse": Case(
        {"triton": {"kv_cache_host_memory_bytes": 1000}}, "kv_cache_host_memory_bytes=1000", {"kv_reuse": True}
    ),
    "prompts-fit-one-iteration": Case(
        {"build": {"max_num_tokens": 512, "max_batch_size": 8}},
        "max_num_tokens=512 is less than max_input_len=1024",
        {"chunked_context": True},
    ),
    # limits, plugins and fusions
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
    "cpu-blocks-have-32-tokens": Case(
        {"engine": "openvino", "build": {"tokens_per_block": 64}},
        "tokens_per_block=64 cannot be had",
        {"engine": "tensorrt_llm"},
    ),
    "profiles-or-a-tuning-point": Case(
        {"build": {"multiple_profiles": "enable", "opt_num_tokens": 77}},
        "opt_num_tokens=77 does not go with multiple_profiles",
        {"build": {"opt_num_tokens": None}},
    ),
    "context-logits-without-drafts": Case(
        {"build": {"gather_context_logits": True, "max_draft_len": 5}},
        "gather_context_logits=true does not go with max_draft_len=5",
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
    "rowwise-plugin-needs-rowwise-scales": Case(
        {"qformat": FP8, "build": {"fp8_rowwise_gemm_plugin": "auto"}},
        "fp8_rowwise_gemm_plugin=auto needs FP8 scales per token",
        {"build": {"fp8_rowwise_gemm_plugin": "disable"}},
    ),
    "nvfp4-plugin-needs-nvfp4": Case(
        {"qformat": FP8, "build": {"gemm_plugin": "nvfp4"}}, "gemm_plugin=nvfp4 .*quant=fp8", {"qformat": NVFP4}
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
        {"build": {"pp_reduce_scatter": "enable"}},
        "pp_reduce_scatter=enable stops",
        {"build": {"pp_reduce_scatter": "disable"}},
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
    "sparsity-may-not-be-faster": Case(
        {"sparsity": "magnitude", "build": {"weight_sparsity": True}},
        "sparsity=magnitude: users measured 0 to 5 %",
        {"sparsity": "none"},
    ),
    # speculative decoding
    "drafts-fit-one-iteration": Case(
        {"build": {"speculative_decoding_mode": "medusa", "max_draft_len": 63, "max_batch_size": 129}},
        r"129 \* 63 \+ 129 = 8256.*max_batch_size=128",
        {"build": {"max_batch_size": 128}},
    ),
    "a-mode-needs-a-draft-length": Case(
        {"build": {"speculative_decoding_mode": "draft_tokens_external"}},
        "mode=draft_tokens_external with max_draft_len=0",
        {"build": {"max_draft_len": 4}},
    ),
    "a-draft-length-needs-a-mode": Case(
        {"build": {"max_draft_len": 4}},
        "max_draft_len=4 was given without",
        {"build": {"speculative_decoding_mode": "medusa"}},
    ),
    "server-and-engine-speculate-alike": Case(
        {"triton": {"decoding_mode": "medusa"}},
        "decoding_mode=medusa does not go with .*mode=None.*decoding_mode=null",
        {"build": {"speculative_decoding_mode": "medusa", "max_draft_len": 63}},
    ),
    "speculation-has-no-beams": Case(
        {"speculation": "draft_target", "build": {"max_beam_width": 4}},
        "max_beam_width=4 .*draft_target",
        {"speculation": "none"},
    ),
    "speculation-has-no-pipeline": Case(
        {"speculation": "lookahead", "build": {"pp_size": 2}}, "pp_size=2 .*lookahead", {"build": {"pp_size": 1}}
    ),
    "drafting-reads-the-kv-cache-again": Case(
        {"speculation": "draft_target"}, "enable_block_reuse is False", {"kv_reuse": True}
    ),
    "draft-and-target-share-a-vocabulary": Case(
        {"same_vocabulary": False, "label": "gemma_2b"}, "has not the vocabulary of gemma_2b", {"same_vocabulary": True}
    ),
    "draft-and-target-have-as-many-tokens": Case(
        {"shape": LLAMA, "draft": GEMMA}, "draft has 256000 tokens, the model has 128256", {"draft": SMALL_LLAMA}
    ),
    "a-draft-reaches-as-far": Case(
        {"shape": LLAMA, "draft": replace(SMALL_LLAMA, max_position_embeddings=8192)},
        "made for 8192 tokens; the model is built for 131072",
        {"build": {"max_seq_len": 8192}},
    ),
    "a-draft-is-smaller": Case(
        {"shape": LLAMA, "draft": LLAMA}, "has 8,030,261,248 parameters", {"draft": SMALL_LLAMA}
    ),
    "two-models-share-the-memory": Case(
        {"speculation": "draft_target"}, r"fraction=0\.9 leaves", {"triton": {"kv_cache_free_gpu_mem_fraction": 0.45}}
    ),
    "heads-are-for-llama": Case(
        {"shape": GEMMA, "speculation": "medusa"},
        "speculative=medusa is made for Llama.*GemmaForCausalLM",
        {"shape": LLAMA},
    ),
    "heads-are-converted-in-16-bit": Case(
        {"speculation": "eagle", "qformat": FP8},
        "speculative=eagle is converted .*quant=fp8",
        {"qformat": QFormat.NONE},
    ),
    "heads-are-converted-with-a-16-bit-cache": Case(
        {"speculation": "medusa", "kv_format": KvFormat.FP8},
        "speculative=medusa .*kv_cache=fp8",
        {"kv_format": KvFormat.AUTO},
    ),
    "heads-answer-greedily": Case(
        {"speculation": "eagle"}, "speculative=eagle accepts tokens greedily", {"speculation": "redrafter"}
    ),
    "pickled-heads-can-run-code": Case(
        {"pickled_heads": ("heads.pt",)}, r"pickled weights \(heads\.pt\)", {"pickled_heads": ()}
    ),
    "eagle-bounds": Case(
        {"build": {**EAGLE, "max_batch_size": 513}},
        "at most 512 .*max_batch_size=513",
        {"build": {"max_batch_size": 512}},
    ),
    "eagle-needs-paged-context": Case(
        {"build": {**EAGLE, "use_paged_context_fmha": "disable"}},
        "EAGLE needs paged .*use_paged_context_fmha=disable",
        {"build": {"use_paged_context_fmha": "enable"}},
    ),
    "eagle-takes-whole-prompts": Case(
        {"build": EAGLE, "chunked_context": True},
        "enable_chunked_context=True is not supported with EAGLE",
        {"chunked_context": False},
    ),
    "eagle-has-no-cuda-graphs": Case(
        {"build": EAGLE, "triton": {"cuda_graph_mode": True}},
        "cuda_graph_mode=True is not",
        {"triton": {"cuda_graph_mode": False}},
    ),
    "lookahead-sizes-give-the-draft-length": Case(
        {"build": {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 84}, "triton": LOOKAHEAD},
        r"max_draft_len=84 .*\(7, 7, 7\).*83",
        {"build": {"max_draft_len": 83}},
    ),
    "the-cpu-engine-drafts-with-a-model": Case(
        {"engine": "openvino", "speculation": "medusa"},
        "speculative=medusa cannot be had with engine=openvino",
        {"speculation": "draft_target"},
    ),
    # LoRA
    "lora-plugin-and-modules-together": Case(
        {"build": {"lora_plugin": "auto"}}, "lora_plugin=auto and build.lora_target_modules=None", {"build": SERVED}
    ),
    "dora-needs-the-lora-plugin": Case(
        {"build": {"dora_plugin": "enable"}}, "lora_plugin is disable", {"build": SERVED}
    ),
    "adapters-need-the-lora-plugin": Case(
        {"adapters": {7: ADAPTER}}, "lora.adapters has 7, .*lora_plugin=disable", {"build": SERVED}
    ),
    "only-lora-is-served": Case(
        {"adapters": {7: replace(ADAPTER, kind="IA3")}},
        r"adapters\.7='/a' is of the kind IA3",
        {"adapters": {7: ADAPTER}},
    ),
    "dora-needs-its-plugin": Case(
        {"adapters": {7: replace(ADAPTER, is_dora=True)}},
        r"adapters\.7='/a' is a DoRA adapter",
        {"build": {"dora_plugin": "enable"}},
    ),
    "adapter-rank-fits": Case(
        {"adapters": {7: replace(ADAPTER, rank=65)}},
        "has rank 65, more than lora.max_rank=64",
        {"build": {"max_lora_rank": 65}},
    ),
    "adapter-modules-are-known": Case(
        {"adapters": {7: replace(ADAPTER, modules=("lm_head",))}}, "changes lm_head.*q_proj", {"adapters": {7: ADAPTER}}
    ),
    "adapter-modules-are-built-in": Case(
        {"adapters": {7: replace(ADAPTER, modules=("q_proj", "v_proj"))}, "build": SERVED},
        "changes attn_v, and the engine is built for attn_q",
        {"build": {"lora_target_modules": ("attn_q", "attn_v")}},
    ),
    "adapter-fits-the-model": Case(
        {"shape": LLAMA, "adapters": {7: replace(ADAPTER, widths={"q_proj": (2048, 2048)})}},
        "its q_proj has 2048 inputs and 2048 outputs, the model's has 4096 and 4096",
        {"adapters": {7: ADAPTER}},
    ),
    "adapter-fits-the-cache": Case(
        {"build": {**SERVED, "max_lora_rank": 128}},
        "max_rank=128 .*lora_cache_max_adapter_size=64",
        {"triton": {"lora_cache_max_adapter_size": 128}},
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
    "cpu-adapters-see-scaled-activations": Case(
        {"engine": "openvino", "qformat": AWQ, "adapters": {7: ADAPTER}},
        "quant=int4_awq cannot be had",
        {"qformat": QFormat.INT8_WO},
    ),
    # serving
    "batches-fit-the-engine": Case(
        {"triton": {"triton_max_batch_size": 9}, "build": {"max_batch_size": 8}},
        "batch_size=9 is more than .*=8",
        {"build": {"max_batch_size": 9}},
    ),
    "beams-fit-the-engine": Case(
        {"triton": {"max_beam_width": 4}},
        "max_beam_width=4 is more than .*max_beam_width=1",
        {"build": {"max_beam_width": 4}},
    ),
    "static-batching-has-no-chunks": Case(
        {"triton": {"batching_strategy": "V1"}, "chunked_context": True},
        "batching_strategy=V1 is static",
        {"chunked_context": False},
    ),
    "ranks-divide-into-nodes": Case(
        {"build": {"tp_size": 4}, "triton": {"num_nodes": 3}},
        "num_nodes=3 does not divide the 4 ranks",
        {"triton": {"num_nodes": 2}},
    ),
    "ranks-fit-a-server": Case(
        {"gpus_per_server": 8, "build": {"tp_size": 8, "pp_size": 2}},
        "need 16 GPUs in one server; 8 is",
        {"triton": {"num_nodes": 2}},
    ),
    # images: 8 requests of 576 positions are 4608
    "visual-positions-fit-the-table": Case(
        {"images": LLAVA, "build": {"max_batch_size": 8, "max_prompt_embedding_table_size": 4607}},
        r"size=4607 is less than .*8 \* 576 \* 1 = 4608",
        {"build": {"max_prompt_embedding_table_size": 4608}},
    ),
    "images-are-for-llama-here": Case(
        {"images": LLAVA, "shape": GEMMA}, "multimodal=llava has a Llama .*GemmaForCausalLM", {"shape": LLAMA}
    ),
    "images-are-reused-by-id-only": Case(kv(images=LLAVA), "enable_block_reuse=True with images", {"kv_reuse": False}),
    "images-need-nvidias-models": Case(
        {"images": LLAVA}, "multimodal=llava: the code of .*deprecated", {"images": None}
    ),
    "the-cpu-engine-sees-no-images": Case(
        {"engine": "openvino", "images": LLAVA}, "multimodal=llava cannot be had with engine=openvino", {"images": None}
    ),
    "the-cpu-engine-keeps-its-weights": Case(
        {"engine": "openvino", "build": {"weight_streaming": True}},
        "weight_streaming=True cannot be had",
        {"build": {"weight_streaming": False}},
    ),
    # the CPU engine's window: sinks fill a block, one block is the last, one lies between them: 96 tokens
    "cpu-windows-are-whole-blocks": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (100,)}},
        r"size=100 with sink_token_length=None .*at least 96.*\[96\]",
        {"triton": {"max_attention_window_size": (96,)}},
    ),
    "cpu-layers-share-a-window": Case(
        {"engine": "openvino", "triton": {"max_attention_window_size": (128, 256)}},
        r"size=\[128, 256\] cannot be had",
        {"triton": {"max_attention_window_size": (256, 256)}},
    ),
    "cpu-windows-exclude-reuse": Case(
        kv(engine="openvino", triton={"max_attention_window_size": (128,)}),
        r"size=\[128\] with KV-cache reuse cannot",
        {"kv_reuse": False},
    ),
    "cpu-windows-exclude-drafts": Case(
        {"engine": "openvino", "speculation": "draft_target", "triton": {"max_attention_window_size": (128,)}},
        r"size=\[128\] with speculative=draft_target",
        {"speculation": "none"},
    ),
}
