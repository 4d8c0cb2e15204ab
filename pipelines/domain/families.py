"""Model families: one row holds everything known about a family, and all other code reads the row.

Sources: the models' Transformers classes; TensorRT-LLM 1.2 `quantize_by_modelopt.py`, `builder.py`, support matrix;
ModelOpt 0.37/0.47 exports. Rules on what a family supports give their sources themselves (`pipelines.rules`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pipelines.domain.formats import FormatSpec


class Architecture(StrEnum):
    """Hugging Face class names, which identify a family in config.json; TensorRT-LLM uses the same."""

    GEMMA = "GemmaForCausalLM"
    GEMMA2 = "Gemma2ForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"
    GPT_OSS = "GptOssForCausalLM"
    GRANITE = "GraniteForCausalLM"
    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    MIXTRAL = "MixtralForCausalLM"
    PHI3 = "Phi3ForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"


Feature = Literal[
    "llm_api", "nvfp4", "reduce_fusion", "user_buffer", "norm_quant_fusion", "swiglu", "decoding_heads", "lookahead",
    "llava", "edge", "long_rope", "drafts_inside",
]  # fmt: skip
"""Parts of TensorRT-LLM that exist for some families only: its PyTorch backend, the format NVFP4, three fusions, the
FP8 kernel with SwiGLU, the conversion of Medusa, ReDrafter and EAGLE heads, lookahead decoding, LLaVA's vision
encoder, long_rope and heads that are rotated in part, draft models inside the target model's engine (PyTorch backend).
"edge" is TensorRT Edge-LLM."""


_TWO_NORMS = ("input_layernorm", "post_layernorm")
_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything known about one family of decoder-only models with gated MLPs and RMS norms.

    Attributes:
        name: short, in lower case.
        modelopt_type: ModelOpt's name of the decoder, where it exports TensorRT-LLM checkpoints without tensorrt_llm
            being installed; None where it does not.
        not_exported: why ModelOpt writes no TensorRT-LLM checkpoint, for messages.
        trtllm_build: whether trtllm-build of TensorRT-LLM 1.2 does, if there is a checkpoint.
        head_is_embedding: whether checkpoints have no output head of their own, which config.json need not state.
        scales_embedding: embeddings are multiplied by sqrt(hidden size).
        norm_offset: norms multiply by (this + the weight of the Hugging Face model).
        layer_norms: norms of a layer, TensorRT-LLM's names.
        more_norms: norms of a layer beside the first one and the one after attention, Hugging Face's names.
        fused_linears: whether Hugging Face's q, k and v are one linear, and gate and up another.
        by_tensor: whether checkpoints of a family that ModelOpt does not export are written from its tensors, in the
            formats that follow from these alone.
        states_window: whether checkpoints state the sliding window, which the CPU engine and evaluation then keep to.
        experts: the modules of a mixture's experts in a layer, and the names of their gate, up and down projections;
            None for a dense model.
        gpt_oss: whether layers have what only gpt-oss has: an attention sink per head, experts and router with biases,
            one tensor for all experts, and a clamped activation between gate and up.
        head_norms: norms of each query and key head, TensorRT-LLM's names within the attention: Hugging Face's.
        qkv_bias: whether q, k and v have a bias, and the output projection none, which config.json does not state.
        attention_bias: whether config.json's `attention_bias` can give all four linears of attention a bias.
        qwen_type: whether TensorRT-LLM's QWenConfig reads the checkpoint, which needs `qwen_type` and `seq_length`.
        sliding_window: tokens that windowed layers attend to; 0 is no window.
        global_every: every n-th layer attends to all tokens despite the window; 0 is none.
        float16_overflows: whether activations exceed float16's range.
        smoothquant_alpha: share of the outliers that SmoothQuant moves to the weights; None is ModelOpt's own.
        fp8_awq_alpha_step: step of AWQ's search before FP8 activations; None is ModelOpt's own.
        w4a8_in_doubt: whether an official table says that W4A8 does not work and an official script that it does.
        features: parts of TensorRT-LLM that support this family.
        defaults: keys of config.json that Transformers' configuration class of this family reads and a file may leave
            out, with what it then takes. A key that is not here means nothing in this family.
        nulls: those of `defaults` for which the class also takes null, in a meaning of its own.
    """

    name: str
    title: str
    architecture: Architecture
    modelopt_type: str | None
    cpu_engine: bool
    trtllm_build: bool = True
    head_is_embedding: bool = False
    scales_embedding: bool = False
    norm_offset: float = 0.0
    layer_norms: tuple[str, ...] = _TWO_NORMS
    not_exported: str = ""
    more_norms: tuple[str, ...] = ()
    fused_linears: bool = False
    by_tensor: bool = False
    states_window: bool = False
    experts: tuple[str, tuple[str, str, str]] | None = None
    gpt_oss: bool = False
    head_norms: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool = False
    attention_bias: bool = True
    qwen_type: bool = False
    sliding_window: int = 0
    global_every: int = 0
    float16_overflows: bool = False
    smoothquant_alpha: float | None = None
    fp8_awq_alpha_step: float | None = None
    w4a8_in_doubt: bool = False
    features: frozenset[Feature] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nulls: tuple[str, ...] = ("sliding_window",)

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with what Transformers' configuration class adds to it; null counts as left out.

        Except where null has a meaning: no window, as many KV heads as query heads.
        """
        return _settled(self.defaults, config)

    @property
    def states_window_late(self) -> bool:
        """Whether the window is added to what ModelOpt writes, as it was not before."""
        return self.states_window and not self.by_tensor

    @property
    def router(self) -> str:
        """Hugging Face's name of the router in a layer of a mixture."""
        assert self.experts is not None
        return f"{self.experts[0]}.{'router' if self.gpt_oss else 'gate'}"

    @property
    def model_type(self) -> str:
        """Transformers' name of the family in config.json."""
        return f"{self.name}_text" if self.architecture == Architecture.GEMMA3 else self.name

    def tuning_default(self, form: FormatSpec) -> float | None:
        """Return the default of SmoothQuant's alpha or AWQ's step for a format; None is ModelOpt's own."""
        if form.tuning == "smoothquant":
            return self.smoothquant_alpha
        return self.fp8_awq_alpha_step if form.tuning == "awq" and form.activation == "fp8" else None


NULLS = (
    "sliding_window", "num_key_value_heads", "original_max_position_embeddings", "rope_theta", "q_lora_rank",
    "n_shared_experts", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
"""Keys of config.json whose null differs from leaving them out."""


def _settled(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    complete = {**defaults, **{key: value for key, value in config.items() if value is not None or key in NULLS}}
    if "num_local_experts" in defaults and config.get("num_local_experts") is None and "num_experts" in complete:
        complete["num_local_experts"] = complete["num_experts"]  # another name of it in Mixtral's class and gpt-oss'
    return complete


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_ALL = _COMMON | {"hidden_act": "silu"}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}
_GELU = "gelu_pytorch_tanh"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Of the logits of attention and of the model: c tanh(logit / c)."""
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's: embeddings, logits of attention and what is added to the residual grow, logits are divided."""
_GEMMA_2_ON = {"query_pre_attn_scalar": 256, **dict.fromkeys(SOFT_CAPS)}
_WINDOWS_OF_QWEN = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_ONLY_WITH_TENSORRT_LLM = (
    "ModelOpt's exporter knows it only where tensorrt_llm is installed beside it, although TensorRT-LLM 1.2 builds it"
)
_FUSED_EXPERTS = (
    "ModelOpt's exporter cannot read its experts as Transformers 5 holds them, although TensorRT-LLM 1.2 builds it"
)

_ROWS = (
    Family(
        name="gemma",
        title="Gemma",
        architecture=Architecture.GEMMA,
        modelopt_type="gemma",
        cpu_engine=True,
        head_is_embedding=True,
        scales_embedding=True,
        norm_offset=1.0,
        float16_overflows=True,
        smoothquant_alpha=0.5,
        fp8_awq_alpha_step=1.0,
        w4a8_in_doubt=True,
        defaults=_ALL | _GEMMA | {"num_key_value_heads": 16, "hidden_act": _GELU, "max_position_embeddings": 8192},
    ),
    Family(
        name="gemma2",
        title="Gemma 2",
        architecture=Architecture.GEMMA2,
        modelopt_type=None,
        cpu_engine=False,
        by_tensor=True,
        head_is_embedding=True,
        scales_embedding=True,
        norm_offset=1.0,
        layer_norms=(*_TWO_NORMS, *_FEEDFORWARD_NORMS),
        more_norms=_FEEDFORWARD_NORMS,
        states_window=True,
        sliding_window=4096,
        global_every=2,
        float16_overflows=True,
        not_exported=_ONLY_WITH_TENSORRT_LLM,
        nulls=SOFT_CAPS,
        defaults=_COMMON
        | _GEMMA
        | _GEMMA_2_ON
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"num_key_value_heads": 4, "hidden_activation": _GELU, "max_position_embeddings": 8192}
        | {"sliding_window": 4096, "layer_types": None},
    ),
    Family(
        name="gemma3",
        title="Gemma 3",
        architecture=Architecture.GEMMA3,
        modelopt_type=None,
        cpu_engine=True,
        by_tensor=True,
        states_window=True,
        head_is_embedding=True,
        scales_embedding=True,
        norm_offset=1.0,
        layer_norms=(*_TWO_NORMS, *_FEEDFORWARD_NORMS),
        more_norms=_FEEDFORWARD_NORMS,
        head_norms={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        attention_bias=False,
        not_exported=_ONLY_WITH_TENSORRT_LLM,
        features=frozenset({"llm_api"}),
        nulls=(),
        defaults=_COMMON
        | _GEMMA
        | _GEMMA_2_ON
        | {"num_key_value_heads": 4, "hidden_activation": _GELU, "max_position_embeddings": 131072, "rope_theta": 1e6}
        | {"sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None, "rope_local_base_freq": 1e4},
    ),
    Family(
        name="gpt_oss",
        title="gpt-oss",
        architecture=Architecture.GPT_OSS,
        modelopt_type=None,
        cpu_engine=True,
        trtllm_build=False,
        by_tensor=True,
        states_window=True,
        sliding_window=128,
        global_every=2,
        experts=("mlp", ("gate_proj", "up_proj", "down_proj")),
        gpt_oss=True,
        not_exported="ModelOpt exports no gpt-oss for trtllm-build, which does not know it",
        features=frozenset({"llm_api", "drafts_inside"}),
        nulls=("rope_parameters",),
        defaults=_ALL
        | {"head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": None}
        | {"attention_bias": True, "rope_theta": 150000.0, "rope_parameters": _YARN_OF_GPT_OSS},
    ),
    Family(
        name="granite",
        title="Granite",
        architecture=Architecture.GRANITE,
        modelopt_type="llama",
        cpu_engine=True,
        defaults=_ALL
        | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
        | dict.fromkeys(MULTIPLIERS, 1.0),
    ),
    Family(
        name="llama",
        title="Llama",
        architecture=Architecture.LLAMA,
        modelopt_type="llama",
        cpu_engine=True,
        features=frozenset(
            {
                *("llm_api", "nvfp4", "reduce_fusion", "user_buffer", "norm_quant_fusion", "swiglu", "decoding_heads"),
                *("lookahead", "llava", "edge", "drafts_inside"),
            }
        ),
        defaults=_ALL | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    Family(
        name="mistral",
        title="Mistral",
        architecture=Architecture.MISTRAL,
        modelopt_type="llama",
        cpu_engine=True,
        states_window=True,
        attention_bias=False,
        features=frozenset({"llm_api", "swiglu", "lookahead", "llava", "edge"}),
        defaults=_ALL | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Family(
        name="mixtral",
        title="Mixtral",
        architecture=Architecture.MIXTRAL,
        modelopt_type=None,
        cpu_engine=True,
        by_tensor=True,
        experts=("block_sparse_moe", ("w1", "w3", "w2")),
        attention_bias=False,
        not_exported=_FUSED_EXPERTS,
        features=frozenset({"llm_api", "nvfp4"}),
        defaults=_ALL
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Family(
        name="phi3",
        title="Phi-3",
        architecture=Architecture.PHI3,
        modelopt_type=None,
        cpu_engine=True,
        by_tensor=True,
        states_window=True,
        fused_linears=True,
        attention_bias=False,
        not_exported=_ONLY_WITH_TENSORRT_LLM,
        features=frozenset({"llm_api", "edge", "long_rope"}),
        defaults=_ALL
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None}
        | {"original_max_position_embeddings": 4096},
    ),
    Family(
        name="qwen2",
        title="Qwen2",
        architecture=Architecture.QWEN2,
        modelopt_type="llama",
        cpu_engine=True,
        qkv_bias=True,
        attention_bias=False,
        qwen_type=True,
        features=frozenset({"llm_api", "swiglu", "lookahead", "edge"}),
        nulls=("sliding_window", "num_key_value_heads"),
        defaults=_ALL | _WINDOWS_OF_QWEN | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    Family(
        name="qwen3",
        title="Qwen3",
        architecture=Architecture.QWEN3,
        modelopt_type="llama",
        cpu_engine=True,
        head_norms={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        attention_bias=False,
        qwen_type=True,
        features=frozenset({"llm_api", "swiglu", "lookahead", "edge", "drafts_inside"}),
        nulls=("sliding_window", "num_key_value_heads"),
        defaults=_ALL
        | _WINDOWS_OF_QWEN
        | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "attention_bias": False},
    ),
    Family(
        name="qwen3_moe",
        title="Qwen3 MoE",
        architecture=Architecture.QWEN3_MOE,
        modelopt_type=None,
        cpu_engine=True,
        by_tensor=True,
        experts=("mlp", ("gate_proj", "up_proj", "down_proj")),
        head_norms={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        attention_bias=False,
        qwen_type=True,
        not_exported=_FUSED_EXPERTS,
        features=frozenset({"llm_api", "drafts_inside"}),
        defaults=_ALL
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": 4096}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False},
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _ROWS}
"""Architecture -> family."""


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with its family's defaults; as it is if the family is unknown."""
    names = config.get("architectures")
    family = FAMILIES.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    return dict(config) if family is None else family.settled(config)


BUILT = tuple(family.architecture for family in _ROWS if family.modelopt_type)
"""Architectures that this project builds in every format."""


@dataclass(frozen=True, slots=True)
class SizedFamily:
    """A family whose memory and speed are modelled and which this project does not build.

    Attributes:
        defaults: keys of config.json that determine sizes and may be left out, as for `Family`.
        global_every: every n-th layer attends to all tokens where config.json does not say which; 0 is none.
        layers: layout of a mixture whose layers are not alike: "deepseek" (dense layers first, shared experts),
            "llama4" (dense layers between, a shared expert, attention of chunks); "" is none of them.
        llm_api: whether it is sized as the LLM API serves it, which nothing else of TensorRT-LLM does (DeepSeek V2
            since 1.3, the others in 1.2).
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    global_every: int = 0
    layers: Literal["", "deepseek", "llama4"] = ""
    llm_api: bool = False

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with what Transformers' configuration class adds to it."""
        return _settled(self.defaults, config)


_HEADS_OF_128 = {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_LLAMA_4 = SizedFamily(
    {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072, "intermediate_size_mlp": 16384}
    | {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    | {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    layers="llama4",
    llm_api=True,
)
SIZED: dict[str, SizedFamily] = {
    "DeepseekV2ForCausalLM": SizedFamily(
        _MLA | {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_shared_experts": 2},
        layers="deepseek",
        llm_api=True,
    ),
    "DeepseekV3ForCausalLM": SizedFamily(
        _MLA | {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_shared_experts": 1},
        layers="deepseek",
        llm_api=True,
    ),
    "Ernie4_5ForCausalLM": SizedFamily(_HEADS_OF_128 | {"tie_word_embeddings": True}),
    "Exaone4ForCausalLM": SizedFamily(
        {"num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096}
        | {"sliding_window_pattern": 4, "layer_types": None},
        global_every=4,
    ),
    "Glm4ForCausalLM": SizedFamily(_HEADS_OF_128),
    "Glm4MoeForCausalLM": SizedFamily(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "first_k_dense_replace": 1}
        | {"n_shared_experts": 1},
        layers="deepseek",
        llm_api=True,
    ),
    "GlmForCausalLM": SizedFamily(_HEADS_OF_128),
    "InternLM3ForCausalLM": SizedFamily(),
    "Llama4ForCausalLM": _LLAMA_4,
    "Llama4ForConditionalGeneration": _LLAMA_4,
    "OlmoForCausalLM": SizedFamily({"max_position_embeddings": 2048}),
    "Olmo2ForCausalLM": SizedFamily({"max_position_embeddings": 2048}),
    "Olmo3ForCausalLM": SizedFamily(
        {"max_position_embeddings": 2048, "sliding_window": 4096, "layer_types": None}, global_every=4
    ),
    "SeedOssForCausalLM": SizedFamily(_HEADS_OF_128 | {"num_key_value_heads": 8, "max_position_embeddings": 524288}),
    "SmolLM3ForCausalLM": SizedFamily(
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "max_position_embeddings": 32768}
        | {"sliding_window": None, "use_sliding_window": False, "layer_types": None},
        global_every=4,
    ),
}
"""Further architectures whose config.json states all that determines bytes and cost. Unless `layers` says otherwise, in
the same names: layers that are alike, attention with KV heads, and a gated MLP, or in each layer the same experts and
no other MLP."""


def titles(feature: Feature) -> list[str]:
    """List the titles of the families that have a feature of TensorRT-LLM."""
    return [family.title for family in _ROWS if feature in family.features]
