"""The group `prune`: a smaller model made by removing what matters least."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from pipelines.settings.base import Group, Positive


class PruningSettings(Group):
    """Removal of MLP channels, attention heads or layers; the result is an ordinary, smaller model.

    Attributes:
        method: width makes every layer narrower, depth removes whole layers; none removes nothing.
        mlp: width: MLP channels that stay in every layer; null keeps all.
        heads: width: query heads that stay in every layer; null keeps all.
        kv_heads: width: KV heads that stay; null keeps all, or one for each query head where the model has that.
        layers: depth: layers that stay.
        texts: calibration texts on which importance is observed, each cut at calibration.seq_len.
    """

    SIZES: ClassVar[dict[str, tuple[str, ...]]] = {
        "none": (),
        "width": ("mlp", "heads", "kv_heads"),
        "depth": ("layers",),
    }

    EXAMPLES: ClassVar[dict[str, str]] = {
        "width": "add prune.mlp=..., prune.heads=... or both",
        "depth": "add prune.layers=...",
    }

    method: Literal["none", "width", "depth"] = "none"
    mlp: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    layers: Positive | None = None
    texts: Positive | None = None

    @property
    def prunes(self) -> bool:
        """Whether anything is removed."""
        return self.method != "none"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are given, by name."""
        names = ("mlp", "heads", "kv_heads", "layers")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    @property
    def word(self) -> str:
        """The pruning as one word: "mlp_512_heads_2", "layers_3"; empty without pruning."""
        return "_".join(f"{name.replace('_', '')}_{size}" for name, size in self.sizes.items())

    @model_validator(mode="after")
    def _goes_together(self) -> PruningSettings:
        read = self.SIZES[self.method]
        for name, size in self.sizes.items():
            if name not in read:
                right = next(method for method, names in self.SIZES.items() if name in names)
                raise ValueError(f"{name}={size} has no effect on prune={self.method}: add prune={right}")
        if not self.prunes:
            if self.texts is not None:
                raise ValueError(f"texts={self.texts} has no effect on prune=none")
            return self
        if self.texts is None:
            raise ValueError(f"texts is null, but prune={self.method} needs it")
        if self.kv_heads is not None and self.heads is None:
            raise ValueError(f"kv_heads={self.kv_heads} needs prune.heads=...: the query heads that stay")
        if not self.sizes:
            raise ValueError(f"{read[0]} is null, but prune={self.method} needs a size: {self.EXAMPLES[self.method]}")
        return self
