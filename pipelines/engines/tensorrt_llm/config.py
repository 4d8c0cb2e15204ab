"""Every option of trtllm-build under its own name, with its type, choices and default, and the ranks to split over.

Source: `engines/tensorrt_llm/options.json`; a contract test compares this class with it. Single values are checked
here, combinations of options by the rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from pipelines.settings.base import ChoosingGroup, Positive, Ranks, Tokens
from pipelines.settings.features import LoraModule

Count = Annotated[int, Field(ge=0)]
Switch = Literal["enable", "disable"]
Plugin = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"]

CLASS, ADAPTERS = "the model's class is the checkpoint's architecture", "adapters are served beside the engine"
TIMING = "one is kept for each GPU and version beside the artifacts"
DECIDED = {
    "checkpoint_dir": "it is what the quantize stage wrote",
    "model_config": "the checkpoint has its own, and without a checkpoint the weights would be random",
    "build_config": "a file of its own would replace the limits given here",
    "model_cls_file": CLASS,
    "model_cls_name": CLASS,
    "output_dir": "engines are kept under paths.store",
    "input_timing_cache": TIMING,
    "output_timing_cache": TIMING,
    "strip_plan": "an engine without its weights answers nothing before it is refitted",
    "dry_run": "it makes no engine; `make plan` shows what would run",
    "visualize_network": "a dump would be made only when the engine is not cached; "
    "add it to the command that `make plan` prints",
    "lora_dir": ADAPTERS,
    "lora_ckpt_source": ADAPTERS,
}
"""Options that this tool sets itself, and how; only their defaults are accepted here."""

NOT_SPECULATING: dict[str, Any] = {"speculative_decoding_mode": None, "max_draft_len": 0}
"""Values for an engine without speculative decoding."""

OF_A_FORMAT: dict[str, tuple[Any, ...]] = {
    "gemm_plugin": ("fp8", "nvfp4"),
    "gemm_swiglu_plugin": ("fp8",),
    "low_latency_gemm_plugin": ("fp8",),
    "low_latency_gemm_swiglu_plugin": ("fp8",),
    "fp8_rowwise_gemm_plugin": ("auto", "float16", "float32", "bfloat16", "int32"),
    "fuse_fp4_quant": ("enable",),
    "norm_quant_fusion": ("enable",),
    "user_buffer": ("enable",),
    "weight_sparsity": (True,),
}
"""Option -> its values that an engine can only be built with from weights in one format, or 2:4 sparse.

Source: plugin/plugin.py, layers/mlp.py:356 and models/llama/model.py:176 of TensorRT-LLM, which assert. `reduce_fusion`
alone runs in every format, and `use_fp8_context_fmha` is switched off by the builder.
"""

LIMITS_FOR_LOAD = ("max_batch_size", "max_input_len", "max_num_tokens", "max_seq_len")
"""Limits that are chosen for the load where nobody gives them, see `pipelines.predict.performance.limits`."""

TUNED = ("gemm_plugin", "gemm_swiglu_plugin", "multiple_profiles", "reduce_fusion", "user_buffer")
"""Options that are chosen for speed where nobody gives them, see `pipelines.engines.tensorrt_llm.build_tuning`."""

FACTS_ARE_LOGGED = ("info", "verbose", "debug", "trace")
"""Log levels that report sizes and seconds, which become the facts of an engine."""


class BuildSettings(ChoosingGroup):
    """Options of trtllm-build 1.2, grouped by what they are about.

    Attributes:
        max_batch_size: requests that the engine schedules together, at most; null is chosen for the load on a GPU
            whose speed is known, and trtllm-build's 2,048 elsewhere.
        max_input_len: tokens of a prompt, at most; null is chosen likewise, and trtllm-build's 1,024 elsewhere.
            max_seq_len replaces it where padding is removed and attention is fused.
        max_seq_len: tokens of prompt and answer together, at most; null is chosen likewise, and the model's longest
            sequence elsewhere.
        max_num_tokens: tokens of all requests in one iteration, at most; null is chosen likewise, and trtllm-build's
            8,192 elsewhere.
        max_beam_width: beams of beam search, at most.
        opt_num_tokens: tokens per iteration that kernels are tuned for; null is max_batch_size * max_beam_width.
        max_encoder_input_len: tokens of an encoder's input, at most; encoder-decoder models only.
        max_prompt_embedding_table_size: rows of prompt embeddings; above 0 turns on prompt tuning and multimodal
            input.
        tp_size: tensor parallel ranks; trtllm-build reads them from the checkpoint.
        pp_size: pipeline parallel ranks; likewise.
        kv_cache_type: layout of the KV cache.
        paged_kv_cache: deprecated by trtllm-build in favour of kv_cache_type.
        tokens_per_block: tokens of one block of the paged KV cache; smaller blocks are reused more often.
        gpt_attention_plugin: attention plugin of decoder models, and its type.
        bert_attention_plugin: attention plugin of encoder models, and its type.
        context_fmha: fused attention over the prompt.
        use_paged_context_fmha: attention over the prompt in the paged KV cache, which KV reuse and chunked prompts
            need.
        use_fp8_context_fmha: FP8 attention over the prompt, for FP8, W4A8_AWQ and NVFP4 from compute capability
            8.9.
        fuse_fp4_quant: FP4 quantization fused into attention.
        bert_context_fmha_fp32_acc: 32-bit accumulation in the fused attention of encoder models.
        remove_input_padding: pack the tokens of different requests without padding.
        streamingllm: attention sinks; TensorRT-LLM 1.2 refuses to build with it.
        gemm_plugin: cuBLASLt matrix products and their type; null is chosen by the tuning, and otherwise off, but
            nvfp4 for NVFP4.
        gemm_swiglu_plugin: matrix product and SwiGLU in one FP8 kernel, on Hopper; null is chosen by the tuning.
        fp8_rowwise_gemm_plugin: FP8 matrix products with scales per token and channel; needs a checkpoint made for
            it.
        low_latency_gemm_plugin: FP8 matrix products for low latency.
        low_latency_gemm_swiglu_plugin: FP8 matrix product and SwiGLU for low latency.
        use_fused_mlp: gate and up of the MLP as one matrix product; off unless the weights are 16 bit or FP8.
        norm_quant_fusion: norm and quantization in one kernel, for Llama in NVFP4.
        weight_sparsity: let TensorRT choose 2:4 sparse kernels; needs gemm_plugin=disable.
        weight_streaming: keep part of the weights on the host at run time; needs gemm_plugin=disable.
        nccl_plugin: collectives over NCCL, and their type.
        gemm_allreduce_plugin: matrix product and all-reduce in one kernel, and its type.
        reduce_fusion: residual add and norm fused after the all-reduce; Llama with tp_size above 1; null is chosen by
            the tuning.
        user_buffer: no copies around the all-reduce; FP8 Llama with reduce_fusion; null is chosen by the tuning.
        pp_reduce_scatter: an optimization of pipeline parallelism, Mixtral only.
        logits_dtype: type of the logits; null is the checkpoint's.
        gather_context_logits: return the logits of the prompt; not with max_draft_len above 0.
        gather_generation_logits: return the logits of the answer; deprecated, the run time decides.
        gather_all_token_logits: return both kinds of logits.
        lora_plugin: LoRA, and the type of its plugin.
        dora_plugin: DoRA.
        lora_target_modules: modules that adapters may change; needs lora_plugin.
        max_lora_rank: rank of an adapter, at most.
        lora_dir: decided by this tool: adapters are served beside the engine.
        lora_ckpt_source: decided by this tool: adapters have Hugging Face's format.
        speculative_decoding_mode: how the engine checks draft tokens; null turns speculative decoding off.
        max_draft_len: draft tokens that are checked in a step, at most.
        moe_plugin: kernels for mixtures of experts, and their type.
        mamba_conv1d_plugin: kernels for Mamba's convolutions, and their type.
        paged_state: recurrent state in pages, for Mamba and RecurrentGemma.
        workers: ranks built at the same time, each on a GPU of its own.
        multiple_profiles: several optimization profiles: slower build, faster kernels; not with opt_num_tokens; null
            is chosen by the tuning.
        profiling_verbosity: what the engine reports about its layers to profilers.
        fast_build: build faster, for a somewhat slower engine.
        log_level: of trtllm-build; trace needs a version after 1.2.
        monitor_memory: report memory during the build.
        enable_debug_output: make debug tensors outputs of the engine.
        checkpoint_dir: decided by this tool: what the quantize stage wrote.
        model_config: decided by this tool: the checkpoint has its own.
        build_config: decided by this tool: a file would replace the limits given here.
        model_cls_file: decided by this tool: the class is the checkpoint's architecture.
        model_cls_name: decided by this tool: the class is the checkpoint's architecture.
        output_dir: decided by this tool: engines are kept under paths.store.
        input_timing_cache: decided by this tool: one is kept for each GPU and version.
        output_timing_cache: decided by this tool: one is kept for each GPU and version.
        strip_plan: decided by this tool: an engine without weights answers nothing before it is refitted.
        visualize_network: decided by this tool: add it to the command that `make plan` prints.
        dry_run: decided by this tool: `make plan` shows what would run.
    """

    model_config = ConfigDict(protected_namespaces=())  # some options begin with "model_"
    CHOSEN: ClassVar[tuple[str, ...]] = (*LIMITS_FOR_LOAD, *TUNED)

    # Limits.
    max_batch_size: Annotated[int, Field(ge=1, le=2**16)] = 2048
    max_input_len: Tokens = 1024
    max_seq_len: Tokens | None = None
    max_num_tokens: Tokens = 8192
    max_beam_width: Annotated[int, Field(ge=1, le=1024)] = 1
    opt_num_tokens: Tokens | None = None
    max_encoder_input_len: Tokens = 1024
    max_prompt_embedding_table_size: Count = 0

    # Ranks.
    tp_size: Ranks = 1
    pp_size: Ranks = 1

    # KV cache.
    kv_cache_type: Literal["continuous", "paged", "disabled"] = "paged"
    paged_kv_cache: Switch = "enable"
    tokens_per_block: Positive = 32

    # Attention.
    gpt_attention_plugin: Plugin = "auto"
    bert_attention_plugin: Plugin = "auto"
    context_fmha: Switch = "enable"
    use_paged_context_fmha: Switch = "enable"
    use_fp8_context_fmha: Switch = "enable"
    fuse_fp4_quant: Switch = "disable"
    bert_context_fmha_fp32_acc: Switch = "disable"
    remove_input_padding: Switch = "enable"
    streamingllm: Switch = "disable"

    # Matrix products.
    gemm_plugin: Literal["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"] | None = None
    gemm_swiglu_plugin: Literal["fp8", "disable"] = "disable"
    fp8_rowwise_gemm_plugin: Plugin = "disable"
    low_latency_gemm_plugin: Literal["fp8", "disable"] = "disable"
    low_latency_gemm_swiglu_plugin: Literal["fp8", "disable"] = "disable"
    use_fused_mlp: Switch = "enable"
    norm_quant_fusion: Switch = "disable"
    weight_sparsity: bool = False
    weight_streaming: bool = False

    # Several GPUs.
    nccl_plugin: Plugin = "auto"
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] = "disable"
    reduce_fusion: Switch = "disable"
    user_buffer: Switch = "disable"
    pp_reduce_scatter: Switch = "disable"

    # Logits.
    logits_dtype: Literal["float16", "float32"] | None = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    gather_all_token_logits: bool = False

    # LoRA.
    lora_plugin: Plugin = "disable"
    dora_plugin: Switch = "disable"
    lora_target_modules: Annotated[tuple[LoraModule, ...], Field(min_length=1)] | None = None
    max_lora_rank: Positive = 64
    lora_dir: tuple[Path, ...] | None = None
    lora_ckpt_source: Literal["hf", "nemo"] = "hf"

    # Speculative decoding.
    speculative_decoding_mode: (
        Literal["draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"] | None
    ) = None
    max_draft_len: Count = 0

    # Other kinds of models.
    moe_plugin: Plugin = "auto"
    mamba_conv1d_plugin: Plugin = "auto"
    paged_state: Switch = "enable"

    # The build itself.
    workers: Ranks = 1
    multiple_profiles: Switch = "disable"
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    fast_build: bool = False
    log_level: Literal["internal_error", "error", "warning", "info", "verbose", "debug", "trace"] = "info"
    monitor_memory: bool = False
    enable_debug_output: bool = False

    # Decided by this tool, see DECIDED.
    checkpoint_dir: str | None = None
    model_config_: str | None = Field(
        default=None, alias="model_config", exclude=True
    )  # pydantic has taken the name itself
    build_config: str | None = None
    model_cls_file: str | None = None
    model_cls_name: str | None = None
    output_dir: str = "engine_outputs"
    input_timing_cache: str | None = None
    output_timing_cache: str = "model.cache"
    strip_plan: bool = False
    visualize_network: str | None = None
    dry_run: bool = False

    def in_16_bit(self) -> BuildSettings:
        """Return the same options without those that belong to quantized or sparse weights."""
        names = [name for name, own in OF_A_FORMAT.items() if getattr(self, name) in own]
        if self.weight_sparsity and self.gemm_plugin == "disable":  # 2:4 kernels need it, and dense weights do not
            names.append("gemm_plugin")
        return self.without(names)

    @field_validator(*(name + "_" * (name == "model_config") for name in DECIDED))
    @classmethod
    def _is_decided(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if value != field.default:
            raise ValueError(f"cannot be set to '{value}': {DECIDED[field.alias or str(info.field_name)]}")
        return value

    @field_validator("log_level")
    @classmethod
    def _tells_facts(cls, level: str) -> str:
        if level not in FACTS_ARE_LOGGED:
            raise ValueError(f"'{level}' leaves out sizes and seconds: choose one of {', '.join(FACTS_ARE_LOGGED)}")
        return level
