"""Rotary position embedding as a model's config.json states it, in the spelling of Transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")
"""Types of scaling that both engines compute from a TensorRT-LLM checkpoint."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a model does to its positions.

    Attributes:
        kind: type of scaling: "default", "linear", "llama3", "yarn", ...
        fraction: share of each head's channels that is rotated.
    """

    kind: str
    fraction: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rotary:
        """Read a Hugging Face configuration."""
        block = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = block.get("rope_type") or block.get("type") or "default"
        fraction = config.get("partial_rotary_factor") or block.get("partial_rotary_factor") or 1.0
        return cls(str(kind), float(fraction))
