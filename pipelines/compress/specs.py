"""Arguments of a compression: one settings group, plus values from other groups and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.compress.config import QuantSettings, RecoverSettings
from pipelines.domain.formats import FORMATS, INT4_WEIGHTS, KvFormat, QFormat, calibrates, reads_texts

Layout = Literal["tensorrt_llm", "hugging_face"]
"""Output layout: a TensorRT-LLM checkpoint for trtllm-build, or a Hugging Face folder for its PyTorch backend."""


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Formats of a checkpoint."""

    quant: QuantSettings
    kv_cache: KvFormat = KvFormat.AUTO

    @property
    def searches(self) -> bool:
        """Whether a format is searched for each linear."""
        return self.quant.qformat is QFormat.AUTO

    @property
    def sixteen_bit(self) -> bool:
        """Whether a checkpoint has everything in 16 bit, so that nothing is calibrated or rounded."""
        return not calibrates(self.quant.formats, self.kv_cache)

    @property
    def by_tensor(self) -> bool:
        """Whether every tensor of a TensorRT-LLM checkpoint follows from those of the model alone, without ModelOpt."""
        rounds = FORMATS[self.quant.qformat].weights is INT4_WEIGHTS and self.quant.int4_scales == "max"
        return not self.reads_texts and (self.sixteen_bit or rounds)

    @property
    def reads_texts(self) -> bool:
        """Whether a checkpoint depends on calibration texts."""
        return reads_texts(self.quant.formats, self.kv_cache)

    @property
    def cache_alone(self) -> bool:
        """Whether nothing but the KV cache depends on calibration texts."""
        return not reads_texts(self.quant.formats, KvFormat.AUTO)


@dataclass(frozen=True, slots=True)
class RecoverySpec:
    """Training of a compressed model.

    Attributes:
        recover: how to train.
        sparse: keep the zeros of the linears.
        rounding: rounding of weights that is simulated; None is none.
        processes: that share each batch.
    """

    recover: RecoverSettings
    sparse: bool = False
    rounding: QuantSettings | None = None
    processes: int = 1
