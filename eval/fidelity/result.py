"""Result of one fidelity measurement, as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from eval.fidelity.divergence import Figures
from pipelines.domain.typed import read_record

RESULT = "fidelity.json"


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
        found = [at for at in self.first_difference if at is not None]
        return float(median(found)) if found else None


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
class FidelityResult:
    """Fidelity of one model in one format to the 16-bit model.

    Attributes:
        model: label of the model.
        qformat: how it was compressed.
        engine: what executed both.
        reference: label of the model that it was compared with, in 16 bit.
        arithmetic: of both.
        noise_arithmetic: of the reference's second run, from which the noise is known.
        window: tokens that were read together.
        vocabulary: tokens whose probabilities were compared.
        overall: figures over all texts.
        noise: of the reference against itself over the first part of all texts.
        texts: figures of each text.
        greedy: greedy continuations.
        layers: errors by layer, if they were asked for.
    """

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

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(asdict(self), allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, data: Any, source: str) -> FidelityResult:
        """Read what `save` wrote.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        return read_record(cls, data, source, what="a fidelity result", todo="Measure again: make fidelity")
