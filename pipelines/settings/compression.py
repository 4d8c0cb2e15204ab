"""The groups `quant`, `sparsity`, `kv_cache` and `calibration`: what happens to weights, activations and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.settings.base import ChoosingGroup, Group, HubName, Positive, Revision, Tokens
from pipelines.settings.model import BUNDLED, ModelSettings


class QuantSettings(Group):
    """Weights and activations.

    Attributes:
        qformat: format of weights and activations.
        dtype: of everything that is not quantized; `auto` is the model's own 16-bit type.
        group_size: values of a weight's row that share one scale; for int4_awq, int4_gptq, int4_rtn, w4a8_awq.
        smoothquant_alpha: int8_sq: how much of the activations' range moves into the weights; null is ModelOpt's
            default.
        awq_alpha_step: int4_awq, w4a8_awq: step of the search for scales; null is ModelOpt's default.
        int4_scales: int4_rtn: scale of a group, from its largest weight (max) or with the least squared error (mse).
        fp4_inputs: nvfp4: scale of activations, from the largest that was seen (max), or with room above what was seen
            and less below (headroom).
        effective_bits: auto: most bits per weight of the layers' linears on average, without scales of groups.
        candidates: auto: formats that a linear may get; 16 bit is always among the choices.
        scoring: auto: how the effect of a format on a linear is judged, from gradients or from the logits (kl_div).
        scoring_texts: auto: how many calibration texts it is judged on.
    """

    SEARCH: ClassVar[tuple[str, ...]] = ("effective_bits", "candidates", "scoring", "scoring_texts")

    qformat: QFormat
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    smoothquant_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    awq_alpha_step: Annotated[float, Field(gt=0, le=1)] | None = None
    int4_scales: Literal["max", "mse"] = "max"
    fp4_inputs: Literal["max", "headroom"] = "max"
    effective_bits: Annotated[float, Field(gt=0, le=16)] | None = None
    candidates: tuple[QFormat, ...] | None = None
    scoring: Literal["gradient", "kl_div"] | None = None
    scoring_texts: Positive | None = None

    @property
    def formats(self) -> tuple[QFormat, ...]:
        """Formats that linears may have: the candidates of a search, or the one format."""
        return self.mixed or (self.qformat,)

    @property
    def mixed(self) -> tuple[QFormat, ...]:
        """Candidates of a search; none for a single format."""
        return (self.candidates or ()) if self.qformat is QFormat.AUTO else ()

    @property
    def mean_bits(self) -> float | None:
        """Most bits per weight that a searched mix has, with scales of groups; None for a single format."""
        if self.effective_bits is None or not self.mixed:
            return None
        scales = [FORMATS[each].bits_in_groups(self.group_size) - FORMATS[each].weights.bits for each in self.formats]
        return self.effective_bits + max(scales)

    @model_validator(mode="after")
    def _searches(self) -> QuantSettings:
        given = {name: getattr(self, name) for name in self.SEARCH}
        for name, value in given.items():
            if self.qformat is not QFormat.AUTO and value is not None:
                raise ValueError(f"{name}={value} has no effect on quant={self.qformat}: add quant=auto")
            if self.qformat is QFormat.AUTO and value is None:
                raise ValueError(f"{name} is null, but quant=auto needs it")
        return self


class SparsitySettings(Group):
    """2:4 sparsity of the linears.

    Attributes:
        method: how two of each four weights are chosen to become zero; none keeps all weights.
    """

    method: Literal["none", "magnitude", "sparsegpt"]


class KvCacheSettings(ChoosingGroup):
    """Element type and reuse of the KV cache.

    Attributes:
        dtype: element type; auto is the model's 16-bit type, and null is chosen by the tuning, or else auto.
        enable_block_reuse: keep the blocks of prompts for later requests that begin alike; null is on, except with a
            KV cache whose format rules it out.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = ("dtype", "enable_block_reuse")

    dtype: KvFormat = KvFormat.AUTO
    enable_block_reuse: bool = True


SHIPPED = {"bundled": BUNDLED / "corpus.jsonl", "real_text": BUNDLED / "texts" / "calibration.jsonl"}
"""Calibration texts by the source that reads them."""
ABOUT = {
    "bundled": "bundled (the bundled models' invented world)",
    "real_text": "real_text (dialogue, code and prose of free licences)",
}


class CalibrationSettings(Group):
    """Text that activations are observed on.

    Attributes:
        source: where the text is from: the Hub, a local file, or shipped with the project: `real_text`, or `bundled`,
            which is about the bundled models' invented world. `auto` is `bundled` for these and `real_text` for others.
        path: local: a file (.txt, .jsonl, .json, .csv, .parquet) or a folder of such files.
        dataset: hub: the data set, org/name.
        revision: hub: branch, tag or commit of the data set; null is its default branch.
        split: hub: the split to read.
        column: field of a row that holds the text.
        size: sequences to observe; AWQ uses 32 at most.
        seq_len: tokens of one sequence; longer ones are cut.
        batch_size: sequences at once; more is faster and takes more memory.
        seed: of the choice of sequences.
    """

    source: Literal["auto", "bundled", "real_text", "hub", "local"]
    path: Path | None
    dataset: HubName | None
    revision: Revision | None
    split: str
    column: str
    size: Positive
    seq_len: Tokens
    batch_size: Positive
    seed: Annotated[int, Field(ge=0)]

    @property
    def shipped(self) -> Path | None:
        """The text that ships with the project; None for another."""
        return SHIPPED.get(self.source)

    def for_model(self, model: ModelSettings) -> CalibrationSettings:
        """Return the settings with the text that `auto` stands for."""
        chosen = "bundled" if model.is_bundled else "real_text"
        return self.model_copy(update={"source": chosen}) if self.source == "auto" else self

    @model_validator(mode="after")
    def _has_source(self) -> CalibrationSettings:
        for source, key, given in (("local", "path", self.path), ("hub", "dataset", self.dataset)):
            if self.source == source and given is None:
                raise ValueError(f"source '{source}' needs calibration.{key}=...")
            if self.source != source and given is not None:
                raise ValueError(f"{key}='{given}' does not go with source '{self.source}': add calibration={source}")
        return self
