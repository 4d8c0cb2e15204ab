"""Arguments of a compression: one settings group, plus values from other groups and the machine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.compress.config import PruningSettings, QuantSettings, RecoverSettings
from pipelines.domain.errors import Fault, refuse
from pipelines.domain.families import FAMILIES, Architecture
from pipelines.domain.formats import FORMATS, INT4_WEIGHTS, KvFormat, QFormat, calibrates, reads_texts
from pipelines.domain.model_shape import ModelShape

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
        sparse: keep the zeros of the linears.
        rounding: rounding of weights that is simulated; None is none.
        processes: that share each batch.
    """

    recover: RecoverSettings
    sparse: bool = False
    rounding: QuantSettings | None = None
    processes: int = 1


# Shape of a pruned model, and the sizes that pruning cannot produce.

PRUNED = (
    Architecture.LLAMA, Architecture.GEMMA, Architecture.GRANITE, Architecture.MISTRAL, Architecture.QWEN2,
    Architecture.QWEN3,
)  # fmt: skip
"""Families whose layers are pruned: separate q, k, v, gate and up, two norms, one kind of attention."""


def pruned_shape(pruning: PruningSettings, shape: ModelShape) -> ModelShape:
    """Return the shape of the pruned model.

    Raises:
        UserError: lists everything that keeps a model of this shape from being pruned so.
    """
    refuse(_faults(pruning, shape))
    return replace(
        shape,
        num_hidden_layers=pruning.layers or shape.num_hidden_layers,
        intermediate_size=pruning.mlp or shape.intermediate_size,
        num_attention_heads=pruning.heads or shape.num_attention_heads,
        num_key_value_heads=_kv_heads(pruning, shape),
        pruned_from=shape,
    )


def _kv_heads(pruning: PruningSettings, shape: ModelShape) -> int:
    """Return the KV heads that stay: all of them, unless each query head has its own."""
    own = shape.num_key_value_heads == shape.num_attention_heads
    return pruning.kv_heads or (pruning.heads if pruning.heads and own else shape.num_key_value_heads)


def _faults(pruning: PruningSettings, shape: ModelShape) -> Iterator[Fault]:
    family = FAMILIES.get(shape.architecture)
    if shape.architecture not in PRUNED or shape.num_experts > 1:
        name = family.title if family else shape.architecture or "this architecture"
        why = "is a mixture of experts" if shape.num_experts > 1 else "has layers of another kind"
        yield Fault(
            f"prune={pruning.method} does not prune {name}, which {why}.",
            f"It prunes {', '.join(FAMILIES[each].title for each in PRUNED)}.",
            "Set prune=none.",
        )
        return
    if pruning.layers and 0 < shape.window_layers < shape.num_hidden_layers:
        yield Fault(
            f"prune=depth does not drop layers of a model in which {shape.window_layers} of"
            f" {shape.num_hidden_layers} attend to a window and the others to all tokens.",
            todo="Set prune=width, or prune=none.",
        )
    sizes = (
        ("mlp", pruning.mlp, shape.intermediate_size, "MLP channels"),
        ("heads", pruning.heads, shape.num_attention_heads, "query heads"),
        ("layers", pruning.layers, shape.num_hidden_layers, "layers"),
    )
    for name, size, has, what in sizes:
        if size and size >= has:
            allowed = f"1 to {has - 1}." if has > 1 else ""
            yield Fault(f"prune.{name}={size} removes nothing: the model has {has} {what}.", allowed)
    if pruning.heads and pruning.heads < shape.num_attention_heads:
        yield from _head_faults(pruning, pruning.heads, shape)


def _head_faults(pruning: PruningSettings, heads: int, shape: ModelShape) -> Iterator[Fault]:
    """Check that every KV head that stays is shared by as many query heads as every other."""
    has, kv_heads = shape.num_key_value_heads, _kv_heads(pruning, shape)
    if kv_heads > has:
        yield Fault(f"prune.kv_heads={kv_heads} is more than the model's {has} KV heads.", f"1 to {has}.")
        return
    shared = shape.num_attention_heads // has
    works = [kv_heads * each for each in range(1, shared + 1) if kv_heads * each < shape.num_attention_heads]
    if heads in works:
        return
    groups = [n for n in range(1, has + 1) if heads % n == 0 and heads // n <= shared]
    yield Fault(
        f"prune.heads={heads} with {kv_heads} KV heads does not work: every KV head must be shared by the same"
        f" number of query heads, at most {shared} as in the model.",
        f"With prune.kv_heads={kv_heads}: prune.heads={'|'.join(map(str, works))}.",
        f"Or set prune.kv_heads={'|'.join(map(str, groups))}." if groups else "",
    )
