"""Specification of a repository, collected from other groups of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipelines.engines.description import EngineDescription
from pipelines.engines.registry import describe


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Images in prompts.

    Attributes:
        model_type: of the encoder, as TensorRT-LLM's build_multimodal_engine.py names it.
        hf_model_path: Hugging Face folder of the whole model, on the machine that serves.
        max_images: in one request.
    """

    model_type: str
    hf_model_path: str
    max_images: int


@dataclass(frozen=True, slots=True)
class RepositorySpec:
    """One repository to write.

    Attributes:
        flavour: name of the engine, see `pipelines.engines.registry`.
        label: the model's name, for display and for OpenAI clients.
        variant: its compression as one word, e.g. "fp8".
        enable_kv_cache_reuse: whether to share KV blocks of equal prompt prefixes.
        enable_chunked_context: whether to split prompts longer than max_num_tokens.
        tp_size: tensor parallel ranks the engine must have.
        pp_size: pipeline parallel ranks.
        num_draft_tokens: tokens that a draft model proposes at a time; None without one.
        lora_tasks: ids of the LoRA adapters in it, sorted.
        images: settings of a vision encoder; None for text alone.
        options: the engine's own settings by name, where Triton serves it in Python; None is its default.
    """

    flavour: str
    label: str
    variant: str
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = False
    tp_size: int = 1
    pp_size: int = 1
    num_draft_tokens: int | None = None
    lora_tasks: tuple[int, ...] = ()
    images: ImageSpec | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> EngineDescription:
        """The engine that the repository serves."""
        return describe(self.flavour)

    @property
    def world_size(self) -> int:
        """Ranks, each with a GPU of its own."""
        return self.tp_size * self.pp_size
