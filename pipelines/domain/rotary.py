"""Rotary position embedding as a model's config.json states it, in the spelling of Transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of scaling that both engines compute from a TensorRT-LLM checkpoint."""

_ENGINES_DIFFER = ("attention_factor", "mscale", "mscale_all_dim")
PLAIN_YARN = (
    "yarn works with factor, original_max_position_embeddings, beta_fast and beta_slow, a rotary base above 1, and"
    " neither attention_factor, mscale, mscale_all_dim nor truncate=false."
)


def yarn_differences(block: Mapping[str, Any]) -> list[str]:
    """List what makes TensorRT-LLM scale by yarn in another way than Transformers does.

    TensorRT-LLM knows no `attention_factor` and no `truncate`, uses one of the mscales without the other, and takes
    4096 for missing original positions. Source: `layers/attention.py`, `functional.py`
    (create_sinusoidal_positions_yarn); Transformers `modeling_rope_utils.py`.
    """
    found = [f"{key}={block[key]}" for key in _ENGINES_DIFFER if block.get(key) is not None]
    if block.get("truncate") is False:
        found.append("truncate=false")
    if block.get("original_max_position_embeddings") is None:
        found.append("no original_max_position_embeddings")
    return found


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a model does to its positions.

    Attributes:
        kind: type of scaling: "default", "linear", "llama3", "yarn", ...
        fraction: share of each head's channels that is rotated.
        differences: what makes an engine scale in another way than Transformers does, in words.
    """

    kind: str
    fraction: float
    differences: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rotary:
        """Read a Hugging Face configuration."""
        block = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = block.get("rope_type") or block.get("type") or "default"
        fraction = config.get("partial_rotary_factor") or block.get("partial_rotary_factor") or 1.0
        return cls(str(kind), float(fraction), tuple(yarn_differences(block)) if kind == "yarn" else ())
