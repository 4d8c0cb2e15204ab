"""Cases of the rules about the LLM API of TensorRT-LLM 1.3 and later."""

from dataclasses import replace
from typing import Any

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.engines.tensorrt_llm.llm_api import LlmApiOptions
from tests.support.rule_cases.words import (
    ADAPTER,
    AWQ,
    FP8,
    GEMMA,
    GPT_OSS,
    LLAMA,
    LLAVA,
    LOOKAHEAD,
    MISTRAL,
    MIXTRAL,
    NVFP4,
    SERVED,
    SQ,
    Case,
)


def llm(**given: Any) -> dict[str, Any]:
    return {"engine": "llmapi", **given}


def asked(**given: Any) -> dict[str, Any]:
    return {"engine": "llmapi", "llm_api": LlmApiOptions("1.4.0", **given)}


NOTHING: dict[str, Any] = {"llm_api": LlmApiOptions()}
NGRAM = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4}}
EAGLE = {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/draft"}}
LOOKS_AHEAD = {"speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 83}
CASES = {
    "llm-api-leaves-out-windows": Case(
        llm(shape=replace(MISTRAL, architecture="Qwen2ForCausalLM"), build={"max_seq_len": 8192}),
        r"Qwen2ForCausalLM was trained .* window of 4096 tokens, .* 8192 .* does not read the window",
        {"build": {"max_seq_len": 4096}},
    ),
    "llm-api-ranks-divide-heads-and-mlp": Case(
        llm(shape=LLAMA, build={"tp_size": 3}),
        "tp_size=3 does not divide num_attention_heads=32",
        {"build": {"tp_size": 4}},
    ),
    "llm-api-options-of-its-version": Case(
        asked(extra={"stream_intervall": 5}),
        r"llm_api\.extra\.stream_intervall is unknown to TensorRT-LLM 1\.4\.0\. Did you mean 'stream_interval'",
        {"llm_api": LlmApiOptions("1.4.0", extra={"stream_interval": 5})},
    ),
    "llm-api-extra-has-an-effect": Case(
        asked(extra={"enable_iter_req_stats": True}), "only enable_iter_perf_stats=true reads it", NOTHING
    ),
    "llm-api-file-has-an-effect": Case(
        asked(file={"sampler_type": "auto"}), r"llm_api\.file: sampler_type='auto' has no effect", NOTHING
    ),
    "llm-api-options-are-of-every-judge": Case(
        {
            "engine": "llmapi",
            "llm_api": LlmApiOptions("1.3.0rc20", extra={"kv_cache_config": {"disk_cache_path": "/x"}}),
        },
        r"TensorRT-LLM 1\.3\.0rc3 refuses kv_cache_config\.disk_cache_path; what 1\.3\.0rc20 does is not known",
        {"llm_api": LlmApiOptions("1.4", extra={"kv_cache_config": {"disk_cache_path": "/x"}})},
    ),
    "llm-api-tuned-file-is-here": Case(
        asked(tuned="examples/configs/curated/llama-3.3-7b.yaml"),
        r"none of NVIDIA's files .*Did you mean 'examples/configs/curated/llama-3\.3-70b\.yaml'",
        NOTHING,
    ),
    "llm-api-options-have-one-place": Case(
        asked(extra={"max_batch_size": 8}), "max_batch_size is a setting here: build.max_batch_size", NOTHING
    ),
    "llm-api-drafts-one-way": Case(
        asked(extra=NGRAM) | {"speculation": "draft_target"}, "of which there is one", {"speculation": "none"}
    ),
    "llm-api-flashinfer-ends-reuse": Case(
        asked(extra={"attn_backend": "FLASHINFER"}) | {"kv_reuse": True},
        "attn_backend=FLASHINFER: the server switches KV-cache reuse off",
        NOTHING,
    ),
    "llm-api-drafts-answer-greedily": Case(
        {**llm(llm_api=LlmApiOptions("1.3.0rc3", extra=EAGLE)), "shape": LLAMA},
        "decoding_type=Eagle3: TensorRT-LLM before 1.3.0rc24 may answer greedily",
        {"llm_api": LlmApiOptions("1.3.0rc24", extra=EAGLE)},
    ),
    "llm-api-runs-no-remote-code": Case(asked(extra={"trust_remote_code": True}), "is never run", NOTHING),
    "llm-api-leaves-out-remote-code": Case(asked(file={"trust_remote_code": True}), "is left out", NOTHING),
    "llm-api-options-are-for-the-llm-api": Case(
        {"engine": "tensorrt_llm", "llm_api": LlmApiOptions(extra={"stream_interval": 5})},
        r"llm_api\.extra\.stream_interval is given, but only engine=tensorrt_llm_llmapi reads it",
        NOTHING,
    ),
    "mixtures-are-exported-in-fp8-and-nvfp4": Case(
        {"engine": "llmapi", "shape": MIXTRAL, "qformat": AWQ},
        "quant=int4_awq of MixtralForCausalLM cannot be exported",
        {"qformat": FP8},
    ),
    "llm-api-reads-gpt-oss-as-published": Case(
        {"engine": "llmapi", "shape": GPT_OSS, "qformat": FP8},
        "does not support quant=fp8 of GptOssForCausalLM: it reads the model's folder",
        {"qformat": QFormat.NONE},
    ),
    "llm-api-has-gpt-oss-in-one-stage": Case(
        {"engine": "llmapi", "shape": GPT_OSS, "build": {"pp_size": 2}},
        "pp_size=2 of GptOssForCausalLM stops TensorRT-LLM's PyTorch backend",
        {"build": {"pp_size": 1}},
    ),
    "mxfp4-needs-hopper": Case(
        {"engine": "llmapi", "shape": replace(GPT_OSS, mxfp4=True), "sm": 8.9},
        r"has experts in MXFP4, which TensorRT-LLM runs on Hopper .*capability 8\.9",
        {"sm": 9.0},
    ),
    "llm-api-formats": Case(
        llm(qformat=SQ),
        r"does not support quant=int8_sq: .*It supports none, fp8, int4_awq, int4_gptq, int4_rtn, w4a8_awq, nvfp4\.",
        {"qformat": FP8},
    ),
    "llm-api-formats-of-families": Case(
        llm(qformat=NVFP4, shape=MISTRAL), "quant=nvfp4 of MistralForCausalLM is not in", {"qformat": FP8}
    ),
    "llm-api-has-no-sinks": Case(
        llm(triton={"sink_token_length": 4, "max_attention_window_size": (64,)}),
        r"triton\.sink_token_length=4 has no effect with engine=tensorrt_llm_llmapi",
        {"triton": {"sink_token_length": None}},
    ),
    "llm-api-windows-are-the-models": Case(
        llm(shape=MISTRAL, label="mistral", triton={"max_attention_window_size": (8192, 2048)}),
        r"max_attention_window_size=\[8192, 2048\] is narrower than mistral attends.* attend to 4096 tokens",
        {"triton": {"max_attention_window_size": (8192, 4096)}},
    ),
    "llm-api-beams-are-for-every-request": Case(
        llm(build={"max_beam_width": 4}), "max_beam_width=4: .* fails every request", {"build": {"max_beam_width": 1}}
    ),
    "llm-api-has-no-mtp-of-these-families": Case(
        {**asked(extra={"speculative_config": {"decoding_type": "MTP"}}), "shape": LLAMA},
        "speculative_config of MTP stops TensorRT-LLM for LlamaForCausalLM",
        NOTHING,
    ),
    "llm-api-drafts-inside-some-families": Case(
        llm(speculation="draft_target", shape=MISTRAL, llm_api=LlmApiOptions("1.3.0rc20")),
        r"speculative=draft_target stops TensorRT-LLM for MistralForCausalLM: .* only gpt-oss, Llama, Qwen3, Qwen3 MoE",
        {"llm_api": LlmApiOptions("1.3.0rc3")},
    ),
    "llm-api-has-no-int4-on-sm120": Case(
        llm(qformat=AWQ, sm=12.0), r"does not support quant=int4_awq on compute capability 12\.0", {"sm": 10.3}
    ),
    "llm-api-has-no-int8-kv": Case(
        llm(kv_format=KvFormat.INT8), "does not support kv_cache=int8: ModelOpt exports no", {"kv_format": KvFormat.FP8}
    ),
    "llm-api-fp8-kv-below-sm89": Case(
        llm(kv_format=KvFormat.FP8, sm=8.0, kv_reuse=True),
        r"kv_cache=fp8 on compute capability 8\.0 rules out KV-cache reuse: .*enable_block_reuse=false",
        {"kv_reuse": False},
    ),
    "llm-api-has-no-sparsity": Case(
        llm(sparsity="magnitude"), "does not support sparsity=magnitude", {"sparsity": "none"}
    ),
    "llm-api-has-gemma-3-only": Case(
        llm(shape=GEMMA), "cannot serve GemmaForCausalLM: .* only Gemma 3", {"shape": LLAMA}
    ),
    "llm-api-builds-nothing": Case(
        llm(build={"gemm_plugin": "auto", "workers": 8, "tp_size": 8}),
        r"does not support build\.gemm_plugin=auto: .*It reads max_batch_size,",
        {"build": {"gemm_plugin": None}},
    ),
    "llm-api-drafts-with-a-model": Case(
        llm(speculation="lookahead", build=LOOKS_AHEAD, triton={"decoding_mode": "lookahead", **LOOKAHEAD}),
        "speculative=lookahead is not supported by engine=tensorrt_llm_llmapi",
        {
            "speculation": "draft_target",
            "build": {"speculative_decoding_mode": "draft_tokens_external"},
            "triton": {"decoding_mode": None},
        },
    ),
    "llm-api-has-no-decoding-mode": Case(
        llm(triton={"decoding_mode": "medusa"}),
        r"does not support triton\.decoding_mode=medusa",
        {"triton": {"decoding_mode": None}},
    ),
    "llm-api-serves-no-adapters": Case(
        llm(adapters={7: ADAPTER}, build=SERVED), "lora.adapters has 7, .* no LoRA inputs", {"adapters": {}}
    ),
    "llm-api-prefetches-no-adapters": Case(
        llm(triton={"lora_prefetch_dir": "/adapters"}),
        r"does not support triton\.lora_prefetch_dir='/adapters'",
        {"triton": {"lora_prefetch_dir": None}},
    ),
    "llm-api-sees-no-images": Case(
        llm(images=LLAVA, build={"max_prompt_embedding_table_size": 4608}),
        "does not support multimodal=llava: its Triton model has no image",
        {"images": None},
    ),
}
