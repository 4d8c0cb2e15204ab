"""The groups `quant`, `sparsity`, `kv_cache` and `calibration`: what happens to weights, activations and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines.domain.formats import KvFormat, QFormat
from pipelines.settings.base import Group, Positive


class QuantSettings(Group):
    """Weights and activations.

    Attributes:
        dtype: of everything that is not quantized; `auto` is the model's own 16-bit type.
    """

    qformat: QFormat
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    awq_alpha_step: Annotated[float, Field(gt=0, le=1)] | None = None


class SparsitySettings(Group):
    """2:4 sparsity of the linears."""

    method: Literal["none", "magnitude", "sparsegpt"]


class KvCacheSettings(Group):
    """Element type and reuse of the KV cache."""

    dtype: KvFormat
    enable_block_reuse: bool


class CalibrationSettings(Group):
    """Text that activations are observed on."""

    source: Literal["bundled", "hub", "local"]
    path: Path | None
    dataset: str | None
    revision: str | None
    split: str
    column: str
    size: Positive
    seq_len: Positive
    batch_size: Positive
    seed: int

    @model_validator(mode="after")
    def _has_source(self) -> CalibrationSettings:
        for source, key, given in (("local", "path", self.path), ("hub", "dataset", self.dataset)):
            if self.source == source and given is None:
                raise ValueError(f"source '{source}' needs calibration.{key}=...")
            if self.source != source and given is not None:
                raise ValueError(f"{key}='{given}' does not go with source '{self.source}': add calibration={source}")
        return self
