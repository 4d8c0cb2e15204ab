"""Settings of the features that more than one stage takes part in: LoRA, speculative decoding, images.

Each group of files under conf/ sets what a feature needs everywhere, conversion, build and server, in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.settings.base import Group, Positive
from pipelines.settings.build import LoraModule
from pipelines.settings.model import ModelSettings

TaskId = Annotated[int, Field(ge=1)]
SpeculationMode = Literal["none", "draft_target", "medusa", "redrafter", "eagle", "lookahead"]
HEADS = ("medusa", "redrafter", "eagle")
"""Modes whose draft is part of the engine: heads that were trained for the model."""


class LoraSettings(Group):
    """Adapters that are served beside one engine.

    Attributes:
        adapters: folders of peft adapters by the `lora_task_id` that requests choose them with.
        max_rank: of any adapter.
        target_modules: linears an adapter may change, under TensorRT-LLM's names; None without LoRA.
    """

    adapters: dict[TaskId, Path]
    max_rank: Positive
    target_modules: Annotated[tuple[LoraModule, ...], Field(min_length=1)] | None

    @field_validator("adapters", mode="before")
    @classmethod
    def _none_is_empty(cls, given: object) -> object:
        """Hydra lets a mapping take the place of null, but not of an empty mapping."""
        return {} if given is None else given


class SpeculativeSettings(Group):
    """How tokens are guessed ahead, so that the model checks several at once.

    Attributes:
        mode: who guesses: a smaller model, heads of the model itself, or its own n-grams.
        draft: draft_target: the smaller model.
        draft_qformat: draft_target: its format.
        heads_path: medusa, redrafter, eagle: folder of the trained heads.
        num_draft_tokens: tokens that are checked at once.
        num_heads: medusa: heads, which are as many tokens ahead.
        num_layers: medusa: layers of a head; eagle: how deep its tree is.
        num_beams: redrafter: beams of its search.
        draft_len_per_beam: redrafter: tokens of each beam.
    """

    mode: SpeculationMode
    draft: ModelSettings | None
    draft_qformat: QFormat | None
    heads_path: Path | None
    num_draft_tokens: Positive | None
    num_heads: Positive | None
    num_layers: Positive | None
    num_beams: Positive | None
    draft_len_per_beam: Positive | None

    @classmethod
    def none(cls) -> SpeculativeSettings:
        """One token at a time, as conf/speculative/none.yaml says it."""
        return cls.model_validate(dict.fromkeys(cls.model_fields) | {"mode": "none"})

    @property
    def draft_shape(self) -> ModelShape | None:
        """Sizes of the smaller model, as far as its file under conf/model says them."""
        return self.draft.shape.to_shape() if self.draft and self.draft.shape else None

    @model_validator(mode="after")
    def _is_whole(self) -> SpeculativeSettings:
        needed = {"draft_target": ("draft", "draft_qformat"), "medusa": ("heads_path", "num_heads", "num_layers")}
        needed |= {
            "redrafter": ("heads_path", "num_beams", "draft_len_per_beam"),
            "eagle": ("heads_path", "num_layers"),
        }
        wanted = needed.get(self.mode, ()) + (() if self.mode == "none" else ("num_draft_tokens",))
        if missing := [name for name in wanted if getattr(self, name) is None]:
            raise ValueError(f"mode '{self.mode}' needs speculative.{missing[0]}=...")
        return self


class MultimodalSettings(Group):
    """Images in prompts: a vision encoder before the language model.

    Attributes:
        model_type: of the encoder, in the words of TensorRT-LLM's build_multimodal_engine.py.
        path: Hugging Face folder of the whole model, encoder included.
        visual_tokens: positions of the prompt that one image takes.
        images_per_request: at most.
    """

    model_type: Literal["none", "llava", "llava_next", "vila"]
    path: Path | None
    visual_tokens: Positive | None
    images_per_request: Positive

    @model_validator(mode="after")
    def _is_whole(self) -> MultimodalSettings:
        for name in ("path", "visual_tokens") if self.model_type != "none" else ():
            if getattr(self, name) is None:
                raise ValueError(f"model_type '{self.model_type}' needs multimodal.{name}=...")
        return self


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Draft tokens of a lookahead engine; (7, 7, 7) -> 83. Source: examples/lookahead/README.md@7ed07f0."""
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification) * (ngram - 1)
