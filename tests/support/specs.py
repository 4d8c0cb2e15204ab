"""Compressions in one line, for tests."""

from collections.abc import Sequence
from typing import Any, Literal

from pipelines.compress.config import PruningSettings, QuantSettings, RecoverSettings
from pipelines.compress.specs import QuantSpec, RecoverySpec
from pipelines.domain.formats import KvFormat, QFormat

LoRA = tuple[int, float, tuple[str, ...]]
"""Rank, alpha and linears."""


def quant_spec(qformat: QFormat, kv_cache: KvFormat = KvFormat.AUTO, **settings: Any) -> QuantSpec:
    return QuantSpec(QuantSettings(qformat=qformat, **settings), kv_cache)


def mix_spec(
    candidates: Sequence[QFormat],
    bits: float,
    kv_cache: KvFormat = KvFormat.AUTO,
    *,
    scoring: str = "gradient",
    texts: int = 128,
    **settings: Any,
) -> QuantSpec:
    """A format for each linear, searched within so many bits per weight."""
    search = {"candidates": candidates, "effective_bits": bits, "scoring": scoring, "scoring_texts": texts}
    return quant_spec(QFormat.AUTO, kv_cache, **search, **settings)


def recovery_spec(
    method: Literal["finetune", "distill"],
    *,
    sparse: bool = False,
    rounding: QuantSettings | None = None,
    lora: LoRA | None = None,
    processes: int = 1,
    **settings: Any,
) -> RecoverySpec:
    low_rank = dict(zip(("lora_rank", "lora_alpha", "lora_targets"), lora, strict=True)) if lora else {}
    return RecoverySpec(RecoverSettings(method=method, **settings, **low_rank), sparse, rounding, processes)


def pruned_to(method: Literal["width", "depth"], texts: int = 6, **sizes: int) -> PruningSettings:
    return PruningSettings(method=method, texts=texts, **sizes)
