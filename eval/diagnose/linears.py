"""Decoded weights of linears against the model's own, and which scale is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.diagnose import arithmetic
from eval.diagnose.result import LINEARS, PREQUANT, QKV, SCALE, SECOND, Examined
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.domain.formats import FLOAT_WEIGHTS, FP4_WEIGHTS, INT8_WEIGHTS, FormatSpec, WeightKind

if TYPE_CHECKING:
    from pipelines.compress.traced import TracedModel

Array = np.ndarray[Any, Any]

MOSTLY_EQUAL, MOSTLY = 0.1, 0.9
"""Factors of groups are one factor if nine of ten are within 10 % of their median."""
SOLVED = 2.0
"""Error of a weight that GPTQ solved, at most, in units of the error of rounding it to the nearest.

GPTQ moves weights away from their nearest codes so that the errors of an output cancel: 1.6 times was measured on both
bundled models, whose planted outliers make inputs unequal.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A linear, or one of q, k and v of a merged one, in the source model.

    Attributes:
        module: its name in the checkpoint.
        layer: None for the head.
        part: its name within a layer, e.g. "attention.qkv.q".
        source: its weight there, [O, I].
    """

    model: "TracedModel"
    module: str
    layer: int | None
    part: str
    source: Array

    def taken(self, checkpoint: Checkpoint, values: Array) -> Array:
        """Return the rows of a merged tensor that belong to this part; others are returned whole."""
        config = checkpoint.config
        if ".qkv." not in f".{self.part}.":
            return values
        q, kv = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
        start = {"q": 0, "k": q, "v": q + kv}[self.part[-1]]
        return values[start : start + (q if self.part[-1] == "q" else kv)]

    @property
    def tensor(self) -> str:
        """Name of the weight, with the part."""
        rows = f" ({self.part[-1]} rows)" if ".qkv." in self.part else ""
        return f"{self.module}.weight{rows}"


def compare_linear(checkpoint: Checkpoint, part: Part, examined: Examined) -> None:
    """Compare a decoded weight with the model's own, and explain it if it is further off than its format is."""
    form = checkpoint.config.format_of(part.module)
    kind = FLOAT_WEIGHTS if form.weights.at_build else form.weights
    prequant = scale_of(checkpoint, part.module, PREQUANT)
    # formats that the build quantizes are floats here, and must be the model's own
    floats = kind is FLOAT_WEIGHTS
    name = f"{part.module}.weight"
    whole = checkpoint.tensor(name).astype(np.float32) if floats else dequantize(checkpoint, part.module)
    decoded = part.taken(checkpoint, whole)
    if decoded.shape != part.source.shape:
        shapes = f"its shape is {list(decoded.shape)}, the model's {list(part.source.shape)}"
        examined.add(part.layer, part.tensor, "shape", shapes)
        return
    decoded = decoded if prequant is None else decoded * prequant
    group = checkpoint.config.quantization_of(part.module).group_size
    form = replace(form, weights=kind, sequential=form.sequential and not examined.rounded)
    measured, expected = measure(part.source, decoded, prequant, form, group)
    examined.saw(part.tensor, measured.ratio)
    if not measured.suspicious:
        return
    of_heads, heads = part.part == "attention.dense", 0
    if of_heads or part.part.endswith(".qkv.q"):
        heads = checkpoint.config.num_attention_heads
    elif ".qkv." in part.part:
        heads = checkpoint.config.num_key_value_heads
    suspect = arithmetic.Suspect(part.source, decoded, expected, heads, of_heads)
    explained = _scale_cause(checkpoint, part, suspect, kind)
    tensor, cause = explained or (part.tensor, arithmetic.explain(suspect, _others(part)))
    examined.add(part.layer, tensor, figure_of(measured), cause)


def measure(
    source: Array, decoded: Array, smoothing: Array | None, form: FormatSpec, group: int
) -> tuple[arithmetic.WeightError, Array]:
    """Return how far a weight [O, I] is from its source, and the source with the error that its format has at best.

    Args:
        source: what it was made from.
        decoded: as it is multiplied, with the factors of the input channels undone.
        smoothing: those factors [I]; None without.
        form: how it is quantized.
        group: input channels that share a scale.
    """
    factors = np.ones(decoded.shape[1], np.float32) if smoothing is None else smoothing
    expected = arithmetic.best_codes(source / factors, form.weights, group) * factors
    if form.sequential:
        expected = source + SOLVED * (expected - source)
    measured = arithmetic.compare(source, decoded, expected, rounded_alone=not form.sequential)
    if form.sequential:
        measured = replace(measured, gain=1.0)  # solving shrinks weights, by as much as the inputs correlate
    if measured.suspicious and smoothing is not None:
        # with a wrong factor the best codes under it prove nothing
        plain = arithmetic.best_codes(source, form.weights, group)
        expected = min((expected, plain), key=lambda each: float(np.linalg.norm(each - source)))
        measured = arithmetic.compare(source, decoded, expected)
    return measured, expected


def figure_of(measured: arithmetic.WeightError) -> str:
    """Return the error in words."""
    return f"{100 * measured.error:.3g} % off, {100 * measured.expected:.2g} % expected"


def scale_of(checkpoint: Checkpoint, module: str, leaf: str) -> Array | None:
    """Return a scale of a linear, float32; None if the checkpoint has none, or the linear is not quantized."""
    name = f"{module}.{leaf}"
    if name not in checkpoint or checkpoint.config.format_of(module).weights is FLOAT_WEIGHTS:
        return None
    return checkpoint.tensor(name).astype(np.float32)


def _others(part: Part) -> Iterator[tuple[str, Array]]:
    """Yield the tensors that may have taken the place of one: of the same layer, then of the others."""
    if part.layer is None:
        yield "transformer.vocab_embedding.weight", part.model.other("transformer.vocab_embedding")
        return
    beside = [f"attention.qkv.{name}" for name in QKV] if ".qkv." in part.part else ["mlp.fc", "mlp.gate"]
    for name in beside:
        if name != part.part:
            yield f"{name} of the same layer", part.model.linear(part.layer, name)
    for layer in range(part.model.layers):
        if layer != part.layer:
            yield f"the tensor of layer {layer}", part.model.linear(layer, part.part)


def _scale_cause(
    checkpoint: Checkpoint, part: Part, suspect: arithmetic.Suspect, kind: WeightKind
) -> tuple[str, str] | None:
    """Return (tensor, cause) if other scales would make the weight right."""
    if kind is FLOAT_WEIGHTS:
        return None
    prequant = scale_of(checkpoint, part.module, PREQUANT)
    if prequant is not None and (cause := _prequant_cause(suspect, prequant)):
        return f"{part.module}.{PREQUANT}", cause
    factor = _refitted(checkpoint.config.quantization_of(part.module).group_size, suspect, kind)
    if arithmetic.compare(suspect.source, suspect.decoded * factor[1], suspect.expected).suspicious:
        return None
    ratio, scale = factor[0], scale_of(checkpoint, part.module, SCALE)
    assert scale is not None
    if np.mean(np.abs(ratio / np.median(ratio) - 1) < MOSTLY_EQUAL) > MOSTLY:
        leaf = SECOND if kind is FP4_WEIGHTS else SCALE
        return f"{part.module}.{leaf}", f"the scale is {1 / float(np.median(ratio)):.4g} times what the weight needs"
    stored = part.taken(checkpoint, scale) if scale.ndim and len(scale) > 1 else scale
    return f"{part.module}.{SCALE}", _scales_of(checkpoint, part, stored * ratio.reshape(stored.shape), stored)


def _prequant_cause(suspect: arithmetic.Suspect, prequant: Array) -> str:
    decoded, right = suspect.decoded.astype(np.float64), suspect.expected.astype(np.float64)
    energy = (decoded**2).sum(0)
    ratio = (decoded * right).sum(0) / np.where(energy > 0, energy, 1)
    corrected = (decoded * ratio).astype(np.float32)
    if arithmetic.compare(suspect.source, corrected, suspect.expected).suspicious and not (prequant == 1).all():
        return ""
    if (prequant == 1).all():
        return "the smoothing factor of each input channel is missing (all are 1)"
    if np.allclose(ratio, np.median(ratio), rtol=0.05):
        return ""  # one factor for all: a scale of the weight
    return f"smoothing factors are wrong by up to {max(ratio.max(), 1 / max(ratio.min(), 1e-9)):.3g} times"


def _refitted(group_size: int, suspect: arithmetic.Suspect, kind: WeightKind) -> tuple[Array, Array]:
    """Return the best factor of each scale, and the same for each weight."""
    decoded, right = suspect.decoded.astype(np.float64), suspect.expected.astype(np.float64)
    rows, columns = decoded.shape
    if kind.group:
        size = kind.group_size(group_size)
        shape = (rows, columns // size, size)
    else:
        shape = (rows, 1, columns) if kind is INT8_WEIGHTS else (1, 1, rows * columns)
    decoded, right = decoded.reshape(shape), right.reshape(shape)
    energy = (decoded**2).sum(2, keepdims=True)
    ratio = (decoded * right).sum(2, keepdims=True) / np.where(energy > 0, energy, 1)
    return ratio[:, :, 0], np.broadcast_to(ratio, shape).reshape(rows, columns).astype(np.float32)


def _scales_of(checkpoint: Checkpoint, part: Part, needed: Array, stored: Array) -> str:
    """Name where the stored scales come from, given those that the weight needs."""
    path = part.module.rpartition(".")[0]
    for other in LINEARS:
        name = f"{path.rpartition('.')[0]}.{other}.{SCALE}"
        if f"{path.rpartition('.')[0]}.{other}" == part.module or name not in checkpoint:
            continue
        values = checkpoint.tensor(name).astype(np.float32)
        if values.shape == needed.shape and np.median(np.abs(values / needed - 1)) < 0.1:
            return f"the scales are not its own: {other} has the ones that it needs"
    if np.allclose(stored, stored.reshape(-1)[0]):
        return f"the scales are missing: all are {float(stored.reshape(-1)[0]):.4g}"
    if needed.ndim == 2 and np.median(np.abs(np.sort(stored, 1) / np.sort(np.abs(needed), 1) - 1)) < 0.1:
        return "the scales of the groups of a row are in another order"
    return "the scales are not those of this weight"
