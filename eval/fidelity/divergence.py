"""Divergence of two next-token distributions over the whole vocabulary, in float64.

Shapes: N positions, V vocabulary. p is the reference's distribution, q the other's; natural logarithms (nats).

KL(p || q) = sum_v p_v (ln p_v - ln q_v)  (Kullback and Leibler, On Information and Sufficiency, 1951).
"""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, Self, TypeVar

import numpy as np

from pipelines.domain.errors import JsonFile

Array = np.ndarray[Any, Any]
Arrays = TypeVar("Arrays")

VALUES_AT_ONCE = 2**18
"""Values of a block of rows in float64, 2 MiB, so that a slice of logits is never widened as a whole."""
MOST_THREADS = 4
"""Each takes up to six blocks of rows in float64."""
SMALL = 1e-6
"""Below this the sum of p (ln p - ln q) loses digits to cancellation, and the sum of terms that are never negative
takes its place."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Two predictions compared, position by position.

    Attributes:
        kl: KL divergence from the reference, nats; not finite where a logit of one of the two is not.
        same_top: whether both find the same token likeliest.
        reference_nll: negative log likelihood of the text's own next token under the reference, nats.
        other_nll: likewise under the other.
    """

    kl: Array
    same_top: Array
    reference_nll: Array
    other_nll: Array


def joined(parts: Sequence[Arrays]) -> Arrays:
    """Return records that hold nothing but arrays as one, all parts in order."""
    first: Any = parts[0]
    return type(parts[0])(*(np.concatenate([getattr(p, each.name) for p in parts]) for each in fields(first)))


def compare_logits(reference: Array, other: Array, targets: Array) -> Positions:
    """Compare two predictions.

    Args:
        reference: logits [N, V] of the reference.
        other: logits [N, V] of the other.
        targets: the text's own next tokens [N].
    """
    rows = max(1, VALUES_AT_ONCE // reference.shape[1])
    blocks = [slice(at, at + rows) for at in range(0, len(targets), rows)]
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:  # numpy computes outside the GIL
        return joined(list(pool.map(lambda at: _compared(reference[at], other[at], targets[at]), blocks)))


def _compared(reference: Array, other: Array, targets: Array) -> Positions:
    with np.errstate(invalid="ignore"):  # of logits that are not finite
        return _block(reference, other, targets)


def _block(reference: Array, other: Array, targets: Array) -> Positions:
    a, b = reference.astype(np.float64), other.astype(np.float64)
    same_top = a.argmax(axis=1) == b.argmax(axis=1)
    a -= a.max(axis=1, keepdims=True)
    b -= b.max(axis=1, keepdims=True)
    each = np.arange(len(targets))
    chosen_a, chosen_b = a[each, targets], b[each, targets]
    weights = np.exp(a)
    total_a = weights.sum(axis=1)
    np.subtract(a, b, out=a)  # ln p - ln q, except for the norms
    norm_a, norm_b = np.log(total_a), np.log(np.exp(b, out=b).sum(axis=1))
    kl = np.einsum("nv,nv->n", weights, a) / total_a - norm_a + norm_b
    if (small := kl < SMALL).any():
        # the sum of p (e^x - 1 - x) for x = ln q - ln p: the same number, as the sum of p e^x is 1
        p, x = weights[small] / total_a[small, None], (norm_a - norm_b)[small, None] - a[small]
        kl[small] = np.maximum(np.einsum("nv,nv->n", p, np.expm1(x) - x), 0.0)
    return Positions(kl, same_top, norm_a - chosen_a, norm_b - chosen_b)


def spread(values: Array) -> tuple[float, float, float, float]:
    """Return mean, median, 99th percentile and maximum."""
    return float(values.mean()), float(np.median(values)), float(np.percentile(values, 99)), float(values.max())


def perplexity(nll: Array) -> float:
    """Return exp of the mean negative log likelihood."""
    return math.exp(float(nll.mean()))


DIVERGENCES = ("kl_mean", "kl_median", "kl_p99", "kl_max")


@dataclass(frozen=True, slots=True)
class Figures:
    """Positions in a few numbers.

    Attributes:
        kl_mean: mean KL divergence, nats per token.
        kl_p99: 99th percentile, linear between neighbours.
        top1_agreement: share of positions where both find the same token likeliest.
        reference_perplexity: exp of the mean negative log likelihood under the reference.
        perplexity: likewise under the other.
    """

    tokens: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float

    @classmethod
    def of(cls, positions: Positions) -> Self:
        """Summarize positions."""
        top1, nlls = float(positions.same_top.mean()), (positions.reference_nll, positions.other_nll)
        return cls(len(positions.kl), *spread(positions.kl), top1, *map(perplexity, nlls))

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the other over that of the reference."""
        return self.perplexity / self.reference_perplexity

    def within(self, noise: Self) -> frozenset[str]:
        """Return the names of the figures that are no worse than those of the reference against itself."""
        names = {name for name in DIVERGENCES if getattr(self, name) <= getattr(noise, name)}
        if self.top1_agreement >= noise.top1_agreement:
            names.add("top1_agreement")
        if abs(math.log(self.perplexity_ratio)) <= abs(math.log(noise.perplexity_ratio)):
            names.add("perplexity_ratio")
        return frozenset(names)


# Result of one fidelity measurement, as a JSON file.


@dataclass(frozen=True, slots=True)
class TextFidelity:
    """Figures of one text.

    Attributes:
        name: "bundled", "calibration" or "user".
        unseen: whether calibration observed none of it.
        figures: of the compressed model against the reference.
        noise: of the reference against itself, on the first part of the same text.
    """

    name: str
    unseen: bool
    figures: Figures
    noise: Figures


@dataclass(frozen=True, slots=True)
class GreedyFidelity:
    """Greedy continuations of the same prompts by both.

    Attributes:
        new_tokens: most tokens of a continuation.
        first_difference: per prompt, the number of equal tokens before the first that differs; None if none does.
    """

    new_tokens: int
    first_difference: tuple[int | None, ...]

    @property
    def equal(self) -> int:
        """Number of continuations without a difference."""
        return sum(at is None for at in self.first_difference)

    @property
    def median_first(self) -> float | None:
        """Median number of equal tokens of the continuations that differ; None if none does."""
        places = [at for at in self.first_difference if at is not None]
        return float(median(places)) if places else None


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Relative errors, Frobenius norm of the difference over that of the reference, by decoder layer.

    Attributes:
        blocks: of each block's output, the first block first.
        noise: likewise of the reference against itself.
        weights: of each linear's weight, by its name within the layer; one value per layer.
        scaled: whether a factor per input channel was taken out of the weights first, because the format moves such
            factors between activations and weights.
    """

    blocks: tuple[float, ...]
    noise: tuple[float, ...]
    weights: Mapping[str, tuple[float, ...]]
    scaled: bool


@dataclass(frozen=True, slots=True)
class FidelityResult(JsonFile):
    """Fidelity of one model in one format to the 16-bit model.

    Attributes:
        reference: label of the model that it was compared with, in 16 bit.
        noise_arithmetic: of the reference's second run, from which the noise is known.
        window: tokens that were read together.
        vocabulary: tokens whose probabilities were compared.
        noise: of the reference against itself over the first part of all texts.
        layers: errors by layer, if they were asked for.
    """

    FILE = "fidelity.json"
    WHAT = "a fidelity result"
    TODO = "Measure again: make fidelity"

    model: str
    qformat: str
    engine: str
    reference: str
    arithmetic: str
    noise_arithmetic: str
    window: int
    vocabulary: int
    overall: Figures
    noise: Figures
    texts: tuple[TextFidelity, ...]
    greedy: GreedyFidelity
    layers: LayerErrors | None

    @property
    def within_noise(self) -> frozenset[str]:
        """Names of the figures over all texts that are no worse than the noise."""
        return self.overall.within(self.noise)
