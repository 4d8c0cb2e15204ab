"""Every option of trtllm-build under its own name, with its type, choices and default, and the ranks to split over.

Source: `engines/tensorrt_llm/options.json`; a contract test holds this class against it. What two options mean together
is the rules' business, here stands only what one value means alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from pipelines.settings.base import Group, Positive

Count = Annotated[int, Field(ge=0)]
Switch = Literal["enable", "disable"]
Plugin = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"]
LoraModule = Literal[
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense",
    "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
    "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense",
    "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up",
]  # fmt: skip

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
"""Options that this tool decides, and how; their defaults are the only values they may have here."""

NOT_SPECULATING: dict[str, Any] = {"speculative_decoding_mode": None, "max_draft_len": 0}
"""Of an engine that checks no drafts."""

FACTS_ARE_LOGGED = ("info", "verbose", "debug")
"""Log levels that tell sizes and seconds, which become the facts of an engine."""


class BuildSettings(Group):
    """Options of trtllm-build 1.2, grouped by what they are about.

    Attributes:
        tp_size: tensor parallel ranks; trtllm-build reads them from the checkpoint.
        pp_size: pipeline parallel ranks; likewise.
    """

    model_config = ConfigDict(protected_namespaces=())  # some options begin with "model_"

    # Limits.
    max_batch_size: Positive = 2048
    max_input_len: Positive = 1024
    max_seq_len: Positive | None = None
    max_num_tokens: Positive = 8192
    max_beam_width: Positive = 1
    opt_num_tokens: Positive | None = None
    max_encoder_input_len: Positive = 1024
    max_prompt_embedding_table_size: Count = 0

    # Ranks.
    tp_size: Positive = 1
    pp_size: Positive = 1

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
    workers: Positive = 1
    multiple_profiles: Switch = "disable"
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = "layer_names_only"
    fast_build: bool = False
    log_level: Literal["internal_error", "error", "warning", "info", "verbose", "debug"] = "info"
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
