"""Measure the fidelity of a server that gives the log probabilities of a few tokens only: bounds.

The 16-bit model is read by an engine here, which gives the logits of the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eval.fidelity.bounds import ROUNDING, BoundedPositions, BoundFigures, KnownTokens, bound_logits
from eval.fidelity.measure import Rows, Side, batches, not_finite, predictions
from eval.fidelity.windows import Windows
from pipelines.domain.errors import UserError, read_record
from pipelines.domain.progress import Advance, Progress
from pipelines.engines.port import TeacherForcing, TokenIds

Array = np.ndarray[Any, Any]
RESULT = "bounds.json"


class LikelyTokens(Protocol):
    """A server that gives log probabilities; see `eval.server.OpenAiServer`."""

    def top_logprobs(self, rows: Sequence[TokenIds], top: int, progress: Progress) -> list[dict[str, Any]]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class TextBounds:
    """Figures of one text.

    Attributes:
        name: "bundled", "calibration" or "user".
        figures: of the served model against the reference.
    """

    name: str
    figures: BoundFigures


@dataclass(frozen=True, slots=True)
class BoundsResult:
    """What is known of the fidelity of a served model to the 16-bit model.

    Attributes:
        model: label of the model.
        url: of the server.
        served_model: name of the model there.
        arithmetic: of the engine that read the 16-bit model.
        window: tokens that were read together.
        vocabulary: tokens whose probabilities the 16-bit model gave.
        top_logprobs: tokens whose probabilities the server gave at each position.
        rounding: error of the server's log probabilities that the bounds allow for.
        overall: figures over all texts.
        texts: figures of each text.
    """

    model: str
    url: str
    served_model: str
    arithmetic: str
    window: int
    vocabulary: int
    top_logprobs: int
    rounding: float
    overall: BoundFigures
    texts: tuple[TextBounds, ...]

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(asdict(self), allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, data: Any, source: str) -> BoundsResult:
        """Read what `save` wrote.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        return read_record(cls, data, source, what="a result of fidelity bounds", todo="Measure again: make fidelity")


@dataclass(frozen=True, slots=True)
class MeasuredBounds:
    """Figures of all texts, and the arithmetic of the engine."""

    overall: BoundFigures
    texts: tuple[TextBounds, ...]
    arithmetic: str


def measure_served(
    reference: Side, server: LikelyTokens, texts: Sequence[Windows], top: int, progress: Progress
) -> MeasuredBounds:
    """Ask the server about all texts, and let the reference read them.

    Raises:
        UserError: the server does not answer or does not return what is needed, what it returned is of another
            vocabulary or not of one distribution, or the reference gives logits that are not finite.
    """
    if top > reference.session.vocabulary:
        raise UserError(
            f"fidelity.top_logprobs={top} is more than {reference.name} has tokens: {reference.session.vocabulary:,}.",
            todo="Give a smaller one.",
        )
    said = server.top_logprobs([row for text in texts for row in text.rows], top, progress)
    answers = iter(said)
    known = [[_known(row, next(answers), reference) for row in text.rows] for text in texts]
    forcing = reference.session.teacher_forcing()
    found = []
    with progress.task("comparing predictions", sum(text.tokens for text in texts), "tokens") as advance:
        for text, each in zip(texts, known, strict=True):
            found.append(BoundedPositions.joined(list(_read(reference, forcing, text.rows, each, advance))))
    return MeasuredBounds(
        BoundFigures.of(BoundedPositions.joined(found)),
        tuple(TextBounds(text.name, BoundFigures.of(each)) for text, each in zip(texts, found, strict=True)),
        forcing.arithmetic,
    )


def _known(row: TokenIds, answer: Mapping[str, Any], reference: Side) -> KnownTokens:
    """Check what the server said about a window.

    Raises:
        UserError: it has a token that the reference lacks, or probabilities that add up to more than 1.
    """
    ids, logprobs = np.array(answer["ids"], dtype=np.int64), np.array(answer["logprobs"], dtype=np.float64)
    targets, own = np.array(row[1:], dtype=np.int64), np.array(answer["own"], dtype=np.float64)
    vocabulary = reference.session.vocabulary
    if ids.max() >= vocabulary:
        raise UserError(
            f"The server returned token {ids.max()}, and {reference.name} has {vocabulary:,}: it serves another model.",
            todo="Give the model that is served: model=... or model.path=...",
        )
    outside = (ids != targets[:, None]).all(axis=1)
    total = float((np.exp(logprobs).sum(axis=1) + np.where(outside, np.exp(own), 0)).max())
    if total > np.exp(ROUNDING):
        raise UserError(
            f"The probabilities that the server returned for a position add up to {total:.6f}, so they are not of one"
            " distribution.",
            todo="Ask a server that returns log probabilities of the model's own distribution, in float32.",
        )
    return KnownTokens(ids, logprobs, targets, own)


def _read(
    reference: Side, forcing: TeacherForcing, rows: Rows, known: Sequence[KnownTokens], advance: Advance
) -> Iterator[BoundedPositions]:
    """Let the reference read a text's windows, and compare each slice with what is known of it."""
    first = 0
    for batch, sizes in batches(rows, (reference.session,)):
        fed, at = batch[:, :-1].tolist(), 0
        for logits in predictions(forcing, fed, sizes):
            if not np.isfinite(logits).all():
                raise not_finite(reference, fed, sizes.tokens)
            width = logits.shape[1]
            for number, row in enumerate(logits):
                yield bound_logits(row, known[first + number].part(slice(at, at + width)))
            at += width
            advance(len(batch) * width)
        first += len(batch)
