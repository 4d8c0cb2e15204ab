"""The shape of a decoder-only language model, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that decide bytes, divisibility and cost.

    Attributes:
        architecture: Hugging Face class name, e.g. "LlamaForCausalLM".
        num_hidden_layers: decoder layers.
        hidden_size: residual stream width.
        num_attention_heads: query heads.
        num_key_value_heads: KV heads (1 = MQA, fewer than query heads = GQA).
        head_dim: width of one head; Gemma's is not hidden / heads.
        intermediate_size: width of the gated MLP.
        vocab_size: rows of the embedding.
        max_position_embeddings: longest sequence the model was made for, in tokens.
        tie_word_embeddings: the output head is the embedding.
    """

    architecture: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def family(self) -> Family:
        """What is known of all models of this architecture."""
        return FAMILIES[self.architecture]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
        """Read the shape from a parsed Hugging Face config.json.

        Raises:
            UserError: the architecture is not one of `FAMILIES`, or a size is missing.
        """
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in FAMILIES:
            raise UserError(
                f"{source} names the architecture '{architecture}', which is not known here.",
                allowed=f"Known: {', '.join(FAMILIES)}.",
            )
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                architecture=architecture,
                num_hidden_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                intermediate_size=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                max_position_embeddings=int(config["max_position_embeddings"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", FAMILIES[architecture].head_is_embedding)),
            )
        except KeyError as missing:
            raise UserError(f"{source} has no {missing}; it is not a complete model configuration.") from None

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear of one layer, by TensorRT-LLM name (qkv merged)."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "attention.qkv": (q + 2 * kv, self.hidden_size),
            "attention.dense": (self.hidden_size, q),
            "mlp.fc": (self.intermediate_size, self.hidden_size),
            "mlp.gate": (self.intermediate_size, self.hidden_size),
            "mlp.proj": (self.hidden_size, self.intermediate_size),
        }

    @property
    def linear_params(self) -> int:
        """Weights of all linears of all layers (what quantization shrinks)."""
        return self.num_hidden_layers * sum(n * k for n, k in self.linear_shapes.values())

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding and, when not tied, of the output head."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def norms_per_layer(self) -> int:
        """RMS norms of a layer."""
        return len(self.family.layer_norms)

    @property
    def num_params(self) -> int:
        """All weights. Llama-3-8B: 8,030,261,248; Gemma-2B: 2,506,172,416."""
        norms = self.hidden_size * (self.norms_per_layer * self.num_hidden_layers + 1)
        return self.linear_params + self.embedding_params + norms

    @property
    def kv_bytes_per_token_16bit(self) -> int:
        """KV-cache bytes of one token at 16 bit: 2 (K, V) x layers x KV heads x head_dim x 2 bytes.

        Llama-3.1-8B: 2 * 32 * 8 * 128 * 2 = 131,072.
        """
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * 2
