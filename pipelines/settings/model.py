"""Which model: its place and its sizes."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from pipelines.domain.families import Architecture
from pipelines.domain.model_shape import ModelShape, implied_sizes
from pipelines.settings.base import FileName, Group, HubName, Positive, Revision

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"


class ShapeSettings(Group):
    """Sizes of a model before it is downloaded; checked against its config.json afterwards.

    Attributes:
        architecture: class of the model, as in config.json.
        num_hidden_layers: layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of one head.
        intermediate_size: width of the MLP.
        vocab_size: tokens of the vocabulary.
        max_position_embeddings: positions the model was trained for.
        tie_word_embeddings: whether the output layer is the embedding.
        num_experts: experts per layer; 1 is a dense model.
        num_experts_per_token: experts that one token goes through.
        sliding_window: tokens that each layer with a window attends to; null is what the architecture implies.
    """

    architecture: Architecture
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    tie_word_embeddings: bool
    num_experts: Positive = 1
    num_experts_per_token: Positive = 1
    sliding_window: Positive | None = None

    @model_validator(mode="after")
    def _states_window(self) -> Self:
        implied = implied_sizes(self.architecture)
        if implied["global_every"] and not implied["sliding_window"] and self.sliding_window is None:
            raise ValueError(
                f"has no sliding_window: those of {self.architecture} differ; give the one in the model's config.json"
            )
        return self

    def to_shape(self, name: str = "") -> ModelShape:
        """Return the shape, with what its architecture implies; `name` is for display."""
        stated = self.model_dump(exclude_none=True)
        return ModelShape(**(implied_sizes(self.architecture) | stated), name=name)


LONGEST_NAME = 120
"""Bytes of the name of a model's folder; file systems allow 255 for names that are made of it."""


class ModelSettings(Group):
    """Source of the model: `path` takes precedence over `bundled` and `hub_id`.

    Attributes:
        name: short name, for folders and tables; `hub` is the name of its source, and that of a folder wins.
        hub_id: model on the Hub: org/name.
        revision: branch, tag or commit on the Hub; the commit it resolves to is recorded.
        bundled: one of the tiny models that ship with the project.
        path: local Hugging Face folder; takes precedence over `bundled` and `hub_id`.
        shape: sizes of the model, known before it is downloaded; null reads them from its config.json.
    """

    name: FileName = "hub"
    hub_id: HubName | None = None
    revision: Revision | None = None
    bundled: (
        Literal["tiny_gemma", "tiny_llama", "tiny_qwen", "tiny_llava", "tiny_gemma_draft", "tiny_llama_draft"] | None
    ) = None
    path: Path | None = None
    shape: ShapeSettings | None = None

    @field_validator("path")
    @classmethod
    def _can_be_shown(cls, path: Path | None) -> Path | None:
        """The folder's name stands on the screen, and in the names of artifacts and reports."""
        if path is not None and not str(path).isprintable():
            raise ValueError(f"has control characters: {str(path)!r}; rename the folder, or give a link to it")
        if path is not None and len(path.name.encode()) > LONGEST_NAME:
            raise ValueError(
                f"names a folder with {len(path.name.encode())} bytes in its name; {LONGEST_NAME} are allowed, because"
                " files are named after it: rename it, or give a link to it"
            )
        return path

    @model_validator(mode="after")
    def _has_source(self) -> Self:
        if not (self.path or self.bundled or self.hub_id):
            raise ValueError("has no source: hub_id (org/name) must be given, or path, or bundled")
        ignored = [name for name in ("hub_id", "revision") if getattr(self, name)]
        if ignored and self.bundled and not self.path:
            raise ValueError(
                f"has {ignored[0]}='{getattr(self, ignored[0])}' beside bundled='{self.bundled}', which would be "
                "taken: for a model of the Hub choose `hub` (model=hub, model@speculative.draft=hub)"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The local Hugging Face folder, or None for a model from the Hub."""
        if self.path:
            return self.path.absolute()
        return BUNDLED / "models" / self.bundled if self.bundled else None

    @property
    def is_bundled(self) -> bool:
        """Whether the model ships with the project, named or given by its path."""
        return self.folder is not None and Path(os.path.normpath(self.folder)).parent == BUNDLED / "models"

    @property
    def label(self) -> str:
        """Short name for folders and tables."""
        if self.path:
            return Path(os.path.normpath(self.path.absolute())).name or "root"
        return str(self.hub_id).replace("/", "--") if self.name == "hub" else self.name
