"""A model that this project does not build or size: what sets it apart, and what its owner can do."""

from collections.abc import Mapping
from typing import Any

from pipelines.domain.errors import UserError, shown
from pipelines.domain.families import FAMILIES, SIZED
from pipelines.domain.language_model import whole

UNREAD = {
    "index_topk": "its attention reads the tokens that an indexer with a cache of its own chooses",
    "kv_lora_rank": "its KV cache holds latent vectors (MLA), not heads",
    "hidden_size_per_layer_input": "its layers have embeddings of their own and share KV caches",
    "cross_attention_layers": "some of its layers attend to pictures",
    "block_configs": "its layers differ in heads and widths",
    "text_config": "it has several parts, and the language model's sizes are in text_config",
    "llm_config": "it has several parts, and the language model's sizes are in llm_config",
    "linear_num_value_heads": "some of its layers have linear attention and no KV cache",
    "hybrid_override_pattern": "some of its layers are state-space layers without a KV cache",
    "mamba_num_heads": "some of its layers are state-space layers without a KV cache",
    "mamba_d_state": "its layers may be state-space layers without a KV cache",
    "conv_L_cache": "some of its layers are convolutions without a KV cache",
    "n_routed_experts": "which of its layers have experts, and what is beside them, is not read",
    "moe_intermediate_size": "not all of its layers may have the same experts",
    "interleave_moe_layer_step": "some of its layers have experts and some a dense MLP",
}
"""Keys of a config.json whose model has other layers, bytes and costs than `ModelShape` can state, and why."""
_PAIRS = "rotates neighbouring channels of a head together"
_LAST_NORMS = "with norms after attention and MLP and none before"
_WHOLE_NORMS = f"{_LAST_NORMS}, and norms of all query heads and of all key heads together"
_PARALLEL = f"a Llama whose attention and MLP stand side by side behind one LayerNorm, and that {_PAIRS}"
APART = {
    "CohereForCausalLM": _PARALLEL,
    "Cohere2ForCausalLM": f"{_PARALLEL}; its layers without a window have no positions",
    "Ernie4_5ForCausalLM": f"a Llama that {_PAIRS}",
    "Exaone4ForCausalLM": f"a Qwen3 {_LAST_NORMS}; where layers have windows, those without have no positions",
    "GlmForCausalLM": f"a Qwen2 that {_PAIRS}, and only half of them",
    "Glm4ForCausalLM": f"a Qwen2 that {_PAIRS}, and only half of them, with norms after attention and MLP as well",
    "InternLM3ForCausalLM": "a Llama in code of its own folder, which is not run here, and not in Transformers",
    "OlmoForCausalLM": "a Llama whose norms are LayerNorms without weights",
    "Olmo2ForCausalLM": f"a Llama {_WHOLE_NORMS}",
    "Olmo3ForCausalLM": f"a Llama {_WHOLE_NORMS}; three of four layers have a window",
    "SeedOssForCausalLM": "a Qwen2 whose heads have a width of their own",
    "SmolLM3ForCausalLM": "a Llama with layers without positions (no_rope_layers)",
}
"""The nearest architecture that is built, and how another one differs from it in Transformers' classes."""
_IN_PYTORCH = (
    "Cohere2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Exaone4ForCausalLM",
    "Glm4MoeForCausalLM", "Llama4ForConditionalGeneration", "NemotronForCausalLM", "NemotronHForCausalLM",
    "Qwen3NextForCausalLM", "SeedOssForCausalLM",
)  # fmt: skip
_BY_AUTODEPLOY = ("InternLM3ForCausalLM", "Olmo3ForCausalLM", "SmolLM3ForCausalLM")
SERVED = dict.fromkeys(_IN_PYTORCH, "") | dict.fromkeys(_BY_AUTODEPLOY, " --backend _autodeploy")
"""Options of trtllm-serve for architectures that TensorRT-LLM's LLM API lists.

Source: TensorRT-LLM docs/source/models/supported-models.md@00b6d5a, tensorrt_llm/_torch/models/_arch_index.py@065ff9e.
"""


def _why(architecture: str, *parts: Mapping[str, Any]) -> str:
    """Return what sets a model apart, after a colon; empty if neither its name nor a key of its parts shows it."""
    if architecture in APART:
        return f": it is {APART[architecture]}"
    return next((f": {why}" for part in parts for key, why in UNREAD.items() if part.get(key) is not None), "")


def not_built(config: Mapping[str, Any], source: str, architecture: str) -> UserError:
    """Return the refusal of a model of another architecture than those that are built."""
    text = config.get("text_config")
    does = "build" if architecture in APART or architecture in SIZED else "know"
    todo = "To measure a server that runs it: make benchmark benchmark.url=..., make evaluate eval.url=..."
    if architecture in SERVED:
        todo = f"TensorRT-LLM's LLM API lists it: trtllm-serve FOLDER{SERVED[architecture]}. {todo}"
    if architecture in SIZED:
        todo = f"Only make size and make simulate read its config.json. {todo}"
    elif whole(config):
        todo = "Give its folder as model.path: then its language model is taken out."
    return UserError(
        f"{source} names the architecture {shown(architecture or None)}, which this project does not"
        f" {does}{_why(architecture, text if isinstance(text, Mapping) else {}, config)}.",
        allowed=f"Known: {', '.join(FAMILIES)}.",
        todo=todo,
    )


def not_sized(config: Mapping[str, Any], source: str, architecture: str) -> UserError:
    """Refuse an architecture by name, so that its weights and its KV cache are not sized wrongly."""
    return UserError(
        f"{source} names the architecture {shown(architecture or None)}, whose memory and speed are not"
        f" modelled{_why(architecture, config)}.",
        allowed=f"Sized are {', '.join((*FAMILIES, *SIZED))}.",
        todo="Where the table of models has it, name it (sizing.model=falcon-40b, ...). Or size the "
        "fleet from a benchmark of it: make size sizing.measured=results.json "
        "sizing.peak_rate=..., or from the rate of one instance, sizing.rate=...",
    )
