"""How a model is compressed: one record, and the word that artifacts, results and tables name it by."""

import re
from dataclasses import dataclass
from typing import Self

from pipelines.domain.formats import KvFormat, QFormat

_TRAINING = re.compile(r"(finetune|distill)(?:_lora_(\d+))?$")
_SIZE = re.compile(r"(mlp|kvheads|heads|layers)_(\d+)")
_SPARSE = "_2_4"
_KV = "kv_"


@dataclass(frozen=True, slots=True)
class Variant:
    """The compression of a model.

    Attributes:
        pruned: sizes that pruning leaves, by the setting of each, e.g. (("mlp", 512),).
        lora_rank: of recovery training; None if all weights are trained.
        quant: weight format, or the word of another tool.
    """

    pruned: tuple[tuple[str, int], ...] = ()
    sparsity: str = "none"
    training: str = "none"
    lora_rank: int | None = None
    quant: str = QFormat.NONE.value
    kv_cache: str = KvFormat.AUTO.value

    @classmethod
    def of(cls, label: str) -> Self:
        """Parse a label: "magnitude_2_4-distill-fp8-kv_fp8". Parts of another tool's word stay together in quant."""
        parts: dict[str, str] = {}
        for part in label.split("-"):
            if _SIZE.match(part):
                name = "pruned"
            elif _TRAINING.match(part):
                name = "training"
            elif part.startswith(_KV):
                name = "kv_cache"
            else:
                name = "sparsity" if part.endswith(_SPARSE) else "quant"
            parts[name] = f"{parts[name]}-{part}" if name in parts else part
        sizes = [
            (name.replace("kvheads", "kv_heads"), int(size)) for name, size in _SIZE.findall(parts.get("pruned", ""))
        ]
        training = _TRAINING.match(parts.get("training", ""))
        method, rank = training.groups() if training else ("none", None)
        return cls(
            pruned=tuple(sizes),
            sparsity=parts.get("sparsity", "none").removesuffix(_SPARSE),
            training=method,
            lora_rank=None if rank is None else int(rank),
            quant=parts.get("quant", QFormat.NONE.value),
            kv_cache=parts.get("kv_cache", KvFormat.AUTO.value).removeprefix(_KV),
        )

    @property
    def label(self) -> str:
        """The compression as one word: "fp8", "mlp_512-magnitude_2_4-distill-int8_sq", "fp8-kv_int8", "none"."""
        parts = ["_".join(f"{name.replace('_', '')}_{size}" for name, size in self.pruned)] if self.pruned else []
        if self.sparsity != "none":
            parts.append(self.sparsity + _SPARSE)
        if self.training != "none":
            parts.append(self.training if self.lora_rank is None else f"{self.training}_lora_{self.lora_rank}")
        if self.quant != QFormat.NONE or not parts:
            parts.append(self.quant)
        if self.kv_cache != KvFormat.AUTO:
            parts.append(_KV + self.kv_cache)
        return "-".join(parts)

    @property
    def overrides(self) -> list[str]:
        """The overrides that make it: prune=width prune.mlp=512 quant=fp8."""
        overrides = []
        if self.pruned:
            overrides = ["prune=depth" if self.pruned[0][0] == "layers" else "prune=width"]
            overrides += [f"prune.{name}={size}" for name, size in self.pruned]
        overrides += [] if self.sparsity == "none" else [f"sparsity={self.sparsity}{_SPARSE}"]
        if self.quant != QFormat.NONE or not (overrides or self.training != "none"):
            overrides.append(f"quant={self.quant}")
        overrides += [] if self.kv_cache == KvFormat.AUTO else [f"kv_cache={self.kv_cache}"]
        overrides += [] if self.training == "none" else [f"recover={self.training}"]
        return overrides + ([] if self.lora_rank is None else [f"recover.lora_rank={self.lora_rank}"])

    @property
    def formats(self) -> tuple[QFormat, KvFormat] | None:
        """The formats of weights and KV cache; None for another tool's word, and for a pruned model of other sizes."""
        if self.pruned:
            return None
        try:
            return QFormat(self.quant), KvFormat(self.kv_cache)
        except ValueError:
            return None
