"""Settings of features that involve several stages: LoRA, speculative decoding, images.

Each group of files under conf/ sets in one place what a feature needs in conversion, build and server.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.settings.base import Group, Positive
from pipelines.settings.model import ModelSettings

LoraModule = Literal[
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense",
    "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
    "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense",
    "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up",
]  # fmt: skip
TaskId = Annotated[int, Field(ge=1)]
SpeculationMode = Literal["none", "draft_target", "medusa", "redrafter", "eagle", "lookahead"]
HEADS = ("medusa", "redrafter", "eagle")
"""Modes whose draft is part of the engine, as heads trained for the model."""
WITHOUT_REDUCE_FUSION = ("redrafter", "eagle")
"""Modes with classes of their own, for which trtllm-build overrides reduce_fusion. Source: tensorrt_llm/builder.py."""


class LoraSettings(Group):
    """LoRA adapters that are served with one engine.

    Attributes:
        adapters: folders of peft adapters by the `lora_task_id` with which requests select them.
        max_rank: largest rank of any adapter.
        target_modules: linears an adapter may change, under TensorRT-LLM's names; None without LoRA.
    """

    adapters: dict[TaskId, Path]
    max_rank: Positive = 64
    target_modules: Annotated[tuple[LoraModule, ...], Field(min_length=1)] | None = None


class SpeculativeSettings(Group):
    """Speculative decoding: draft tokens that the model checks several at a time.

    Attributes:
        mode: source of the draft: a smaller model, heads of the model itself, or its own n-grams.
        draft: draft_target: the smaller model.
        draft_qformat: draft_target: its format.
        heads_path: medusa, redrafter, eagle: folder of the trained heads.
        num_draft_tokens: draft tokens that are checked at once.
        num_heads: medusa: heads, which are as many tokens ahead.
        num_layers: medusa: layers of a head; eagle: how deep its tree is.
        num_beams: redrafter: beams of its search.
        draft_len_per_beam: redrafter: tokens of each beam.
    """

    mode: SpeculationMode = "none"
    draft: ModelSettings | None = None
    draft_qformat: QFormat | None = None
    heads_path: Path | None = None
    num_draft_tokens: Positive | None = None
    num_heads: Positive | None = None
    num_layers: Positive | None = None
    num_beams: Positive | None = None
    draft_len_per_beam: Positive | None = None

    @classmethod
    def none(cls) -> Self:
        """Return the settings of conf/speculative/none.yaml: one token at a time."""
        return cls.model_validate(dict.fromkeys(cls.model_fields) | {"mode": "none"})

    @property
    def draft_shape(self) -> ModelShape | None:
        """Sizes of the draft model, as far as its file under conf/model states them."""
        return self.draft.shape.to_shape() if self.draft and self.draft.shape else None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = {"draft_target": ("draft", "draft_qformat"), "medusa": ("heads_path", "num_heads", "num_layers")}
        needed |= {
            "redrafter": ("heads_path", "num_beams", "draft_len_per_beam"),
            "eagle": ("heads_path", "num_layers"),
        }
        required = needed.get(self.mode, ()) + (() if self.mode == "none" else ("num_draft_tokens",))
        if missing := [name for name in required if getattr(self, name) is None]:
            raise ValueError(f"mode '{self.mode}' needs speculative.{missing[0]}=...")
        return self


class MultimodalSettings(Group):
    """Images in prompts: a vision encoder before the language model.

    Attributes:
        model_type: of the encoder, as TensorRT-LLM's build_multimodal_engine.py names it.
        path: Hugging Face folder of the whole model, encoder included.
        visual_tokens: positions of the prompt that one image takes, at most.
        images_per_request: maximum number of images.
    """

    model_type: Literal["none", "llava"] = "none"
    path: Path | None = None
    visual_tokens: Positive | None = None
    images_per_request: Positive = 1

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for name in ("path", "visual_tokens") if self.model_type != "none" else ():
            if getattr(self, name) is None:
                raise ValueError(f"model_type '{self.model_type}' needs multimodal.{name}=...")
        return self


MC_SIM_7B_63 = (
    "{0}, {0, 0}, {1}, {0, 1}, {2}, {0, 0, 0}, {1, 0}, {0, 2}, {3}, {0, 3}, {4}, {0, 4}, {2, 0}, {0, 5}, {0, 0, 1}, "
    "{5}, {0, 6}, {6}, {0, 7}, {0, 1, 0}, {1, 1}, {7}, {0, 8}, {0, 0, 2}, {3, 0}, {0, 9}, {8}, {9}, {1, 0, 0}, "
    "{0, 2, 0}, {1, 2}, {0, 0, 3}, {4, 0}, {2, 1}, {0, 0, 4}, {0, 0, 5}, {0, 0, 0, 0}, {0, 1, 1}, {0, 0, 6}, "
    "{0, 3, 0}, {5, 0}, {1, 3}, {0, 0, 7}, {0, 0, 8}, {0, 0, 9}, {6, 0}, {0, 4, 0}, {1, 4}, {7, 0}, {0, 1, 2}, "
    "{2, 0, 0}, {3, 1}, {2, 2}, {8, 0}, {0, 5, 0}, {1, 5}, {1, 0, 1}, {0, 2, 1}, {9, 0}, {0, 6, 0}, {0, 0, 0, 1}, "
    "{1, 6}, {0, 7, 0}"
)
"""TensorRT-LLM's default tree. Source: cpp/include/tensorrt_llm/runtime/medusaModule.h and eagleModule.h."""


def tree_nodes(choices: str) -> list[tuple[int, ...]]:
    """Return the nodes of a tree of guesses, each as its path from the root; "{0}, {0, 0}" -> [(0,), (0, 0)]."""
    written = MC_SIM_7B_63 if choices == "mc_sim_7b_63" else choices
    return [tuple(map(int, node.split(","))) for node in re.findall(r"\{([^}]*)\}", written)]


def lookahead_draft_len(window: int, ngram: int, verification: int) -> int:
    """Return the draft tokens of a lookahead engine; (7, 7, 7) -> 83. Source: examples/lookahead/README.md@7ed07f0."""
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification) * (ngram - 1)


def lookahead_sizes(draft_len: int) -> tuple[int, int, int]:
    """Return the most even (window, n-gram, verification) of a draft length of 1 or more; 83 -> (7, 7, 7)."""
    sizes_that_fit = []
    for ngram in range(2, draft_len + 3):
        both, rest = divmod(draft_len - (ngram - 2), ngram - 1)  # window - 1 + verification
        if both > 0 and rest == 0:
            sizes_that_fit.append(((both + 2) // 2, ngram, (both + 1) // 2))
    return min(sizes_that_fit, key=lambda sizes: max(sizes) - min(sizes))
