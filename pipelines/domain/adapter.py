"""A LoRA adapter, as its files describe it."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.model_shape import ModelShape

MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
}
"""Hugging Face's name of a linear -> TensorRT-LLM's name of the LoRA module. Source: `tensorrt_llm/lora_manager.py`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter for a base model.

    Attributes:
        place: path of the adapter, for messages.
        kind: peft's type; only "LORA" can be served.
        rank: r.
        modules: Hugging Face names of the linears it changes, e.g. ("q_proj", "v_proj").
        widths: (inputs, outputs) of each of these linears, from its tensors.
        is_dora: whether it also scales magnitudes (DoRA).
    """

    place: str
    kind: str
    rank: int
    modules: tuple[str, ...]
    widths: dict[str, tuple[int, int]]
    is_dora: bool = False

    @property
    def trtllm_modules(self) -> tuple[str, ...]:
        """The linears under TensorRT-LLM's names; unknown ones keep their own."""
        return tuple(MODULES.get(name, name) for name in self.modules)


def linear_widths(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear of one layer, by Hugging Face name."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
