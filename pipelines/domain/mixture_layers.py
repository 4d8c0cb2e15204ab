"""Mixtures of experts: sizes of those whose layers are not alike (DeepSeek, GLM-4.5, Llama 4), and how one was built.

Sources: configuration and modeling classes of Transformers 5 (`deepseek_v2`, `deepseek_v3`, `glm4_moe`, `llama4`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.domain.errors import ConfigNumbers
from pipelines.domain.families import SizedFamily


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): the KV cache holds one compressed vector of a token for all heads.

    Attributes:
        query_rank: width that queries are compressed to; 0 where they are not.
        kv_rank: width that keys and values are compressed to.
        rope_dim: channels with rotary positions of a query head, and of the key that all heads share.
        plain_dim: channels of a query or key head without positions.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int


def mixture_layers(read: ConfigNumbers, family: SizedFamily) -> dict[str, Any]:
    """Return the fields of `ModelShape` that such a mixture states in names of its own; faults are noted in `read`."""
    sizes = _deepseek(read, family) if family.layers == "deepseek" else _llama_4(read)
    experts, chosen = sizes["num_experts"], sizes["num_experts_per_token"]
    if read.fine and chosen > experts:
        read.fault(f"has num_experts_per_tok={chosen}, but only {experts} experts.")
    if sizes["dense_layers"] > (layers := read.size("num_hidden_layers")) and read.fine:
        read.fault(f"has {sizes['dense_layers']} layers without experts, but num_hidden_layers={layers}.")
    return sizes


def _deepseek(read: ConfigNumbers, family: SizedFamily) -> dict[str, Any]:
    if (every := read.size("moe_layer_freq", 1)) != 1:
        read.fault(f"has moe_layer_freq={every}.", "It must be 1: after the dense layers, each layer has experts.")
    width, dense = read.size("moe_intermediate_size"), read.size("first_k_dense_replace", least=0)
    sizes = {
        "intermediate_size": width,
        "num_experts": read.size("n_routed_experts"),
        "num_experts_per_token": read.size("num_experts_per_tok"),
        "shared_size": read.size("n_shared_experts", 0, least=0) * width,
        "dense_layers": dense,
        "dense_size": read.size("intermediate_size") if dense else 0,
    }
    if "kv_lora_rank" not in family.defaults:
        return sizes
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent = Latent(read.size("q_lora_rank", 0), *(read.size(name) for name in names))
    return sizes | {"latent": latent, "num_key_value_heads": 1, "head_dim": latent.plain_dim + latent.rope_dim}


def _llama_4(read: ConfigNumbers) -> dict[str, Any]:
    layers, width, every = read.size("num_hidden_layers"), read.size("intermediate_size"), _global_every(read)
    chunk = read.size("attention_chunk_size", 0)
    mixed = layers // read.size("interleave_moe_layer_step")
    if read.config.get("moe_layers") is not None:
        mixed = len(set(map(str, read.items("moe_layers"))))
    return {
        "num_experts": read.size("num_local_experts"),
        "num_experts_per_token": read.size("num_experts_per_tok"),
        "shared_size": width,
        "dense_layers": layers - mixed,
        "dense_size": read.size("intermediate_size_mlp") if mixed < layers else 0,
        "sliding_window": chunk,
        "global_every": every if chunk else 0,
        "chunked": chunk > 0,
    }


def _global_every(read: ConfigNumbers) -> int:
    """Return the n of "every n-th layer attends to all tokens", which are those without rotary positions."""
    every, layers = read.size("no_rope_layer_interval"), read.size("num_hidden_layers")
    stated = [kind == "full_attention" for kind in read.items("layer_types")]
    stated = stated or [rotary == 0 for rotary in read.items("no_rope_layers")]
    if stated:
        every = stated.index(True) + 1 if True in stated else 0
        if stated != [every > 0 and (number + 1) % every == 0 for number in range(layers)]:
            read.fault("has no regular pattern of layers with chunks.", "Every n-th must attend to all tokens.")
    return every


EXPERTS = "experts"
"""In the description of a CPU engine, if one product is for all experts."""


def was_grouped(engine: Mapping[str, Any]) -> bool:
    """Return whether an engine was built with one product for all experts, by its config.json."""
    return bool(engine.get("engine", {}).get(EXPERTS) == "grouped")
