"""Lower bound of the divergence from a distribution of which only a few probabilities are known.

Shapes: N positions, V vocabulary, k known tokens. p is the reference's distribution, of which all is known; q the
other's, of which the likeliest k tokens and the text's own token are known. Natural logarithms (nats).

The least KL(p || q) over every q that agrees with what is known. The terms of known tokens are exact. The others share
the rest r of q's mass, and none is likelier than the least likely c of the top k. Minimizing sum p ln(p / q) over
sum q = r and q <= c gives q = min(c, s p) with one factor s (the conditions of Karush, Kuhn and Tucker; the problem is
convex). Without the limit c this is the log-sum inequality. There is no upper bound: an unknown q may be 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.fidelity.divergence import VALUES_AT_ONCE, joined, perplexity, spread
from eval.fidelity.measure import Rows, Side, Windows, batches, not_finite, predictions
from eval.server import OpenAiServer
from pipelines.domain.errors import JsonFile, UserError
from pipelines.domain.progress import Advance, Progress
from pipelines.engines.port import TeacherForcing, TokenIds

Array = np.ndarray[Any, Any]

ROUNDING = 1e-5
"""Largest error of a log probability that a server computes in float32; ten units in the last place at -10."""


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """A server's log probabilities of the next token at each position.

    Attributes:
        ids: tokens with the highest log probabilities [N, k], different from each other.
        logprobs: their log probabilities [N, k].
        targets: the text's own next tokens [N].
        target_logprobs: their log probabilities [N].
    """

    ids: Array
    logprobs: Array
    targets: Array
    target_logprobs: Array

    def part(self, which: slice) -> "KnownTokens":
        """Return some of the positions."""
        return KnownTokens(self.ids[which], self.logprobs[which], self.targets[which], self.target_logprobs[which])


@dataclass(frozen=True, slots=True)
class BoundedPositions:
    """Comparison of a prediction with a partly known one, position by position.

    Attributes:
        kl_at_least: the KL divergence from the reference is this or more, nats.
        known_mass: probability that the reference gives to the tokens whose q is known.
        same_top: whether both find the same token likeliest.
        reference_nll: negative log likelihood of the text's own next token under the reference, nats.
        other_nll: likewise under the other.
    """

    kl_at_least: Array
    known_mass: Array
    same_top: Array
    reference_nll: Array
    other_nll: Array


def bound_logits(reference: Array, other: KnownTokens, rounding: float = ROUNDING) -> BoundedPositions:
    """Compare a prediction with a partly known one.

    Args:
        reference: logits [N, V] of the reference, finite.
        other: of the other; the probabilities of a position add up to at most 1, but for the rounding.
        rounding: largest error of a known log probability; the bound holds in spite of it. At 0 that is true but for
            the cancellation in 1 - sum q.
    """
    rows = max(1, VALUES_AT_ONCE // reference.shape[1])
    slices = [slice(at, at + rows) for at in range(0, len(other.targets), rows)]
    return joined([_block(reference[each], other.part(each), rounding) for each in slices])


def _block(reference: Array, other: KnownTokens, rounding: float) -> BoundedPositions:
    logp = reference.astype(np.float64)
    logp -= logp.max(axis=1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
    each = np.arange(len(other.targets))
    p, logq = np.exp(logp), np.full_like(logp, np.nan)
    np.put_along_axis(logq, other.ids, other.logprobs, axis=1)
    logq[each, other.targets] = other.target_logprobs
    unknown = np.isnan(logq)
    exact = np.where(unknown, 0.0, p * (logp - np.where(unknown, 0.0, logq))).sum(axis=1)
    mass = np.where(unknown, 0.0, p).sum(axis=1)
    rest = 1 - np.exp(-rounding) * np.exp(logq, out=np.zeros_like(logq), where=~unknown).sum(axis=1)
    likeliest = np.exp(other.logprobs.min(axis=1) + rounding)
    least = _least(p, logp, unknown, np.maximum(rest, 0.0), likeliest)
    # of several likeliest tokens, the one with the lowest id, as `argmax` of logits
    best = other.logprobs == other.logprobs.max(axis=1, keepdims=True)
    first = np.where(best, other.ids, np.iinfo(np.int64).max).min(axis=1)
    return BoundedPositions(
        np.maximum(exact - rounding * mass + least, 0.0),
        mass,
        logp.argmax(axis=1) == first,
        -logp[each, other.targets],
        -other.target_logprobs,
    )


def _least(p: Array, logp: Array, unknown: Array, rest: Array, likeliest: Array) -> Array:
    """Return the least sum of p ln(p / q) over the unknown tokens [N].

    A token is at the limit as soon as the factor takes it there; the factor only grows as others are fixed, so a token
    that is at the limit stays there.
    """
    total, free = np.zeros(len(p)), unknown.copy()
    while True:
        mass = np.where(free, p, 0.0).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(mass > 0, rest / mass, 0.0)
        over = free & (p * factor[:, None] > likeliest[:, None])
        if not over.any():
            with np.errstate(divide="ignore"):
                total -= np.where(mass > 0, mass * np.log(np.where(mass > 0, factor, 1.0)), 0.0)
            return total
        total += np.where(over, p * (logp - np.log(likeliest)[:, None]), 0.0).sum(axis=1)
        free &= ~over
        left = factor * np.where(free, p, 0.0).sum(axis=1)  # never less than this; the difference may cancel
        rest = np.maximum(rest - over.sum(axis=1) * likeliest, left)


@dataclass(frozen=True, slots=True)
class BoundFigures:
    """Positions in a few numbers.

    Attributes:
        kl_mean_at_least: mean of the least KL divergences, nats per token; the mean KL divergence is this or more.
        kl_median_at_least: likewise of the median.
        kl_p99_at_least: of the 99th percentile, linear between neighbours.
        kl_max_at_least: of the largest.
        known_mass: mean probability that the reference gives to the tokens whose probability is known on both sides.
        top1_agreement: share of positions where both find the same token likeliest.
        reference_perplexity: exp of the mean negative log likelihood under the reference.
        perplexity: likewise under the other.
    """

    tokens: int
    kl_mean_at_least: float
    kl_median_at_least: float
    kl_p99_at_least: float
    kl_max_at_least: float
    known_mass: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float

    @classmethod
    def of(cls, positions: BoundedPositions) -> "BoundFigures":
        """Summarize positions; all four figures grow with every divergence, so bounds give bounds."""
        mass, top1 = float(positions.known_mass.mean()), float(positions.same_top.mean())
        nlls = (positions.reference_nll, positions.other_nll)
        return cls(len(positions.kl_at_least), *spread(positions.kl_at_least), mass, top1, *map(perplexity, nlls))

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the other over that of the reference."""
        return self.perplexity / self.reference_perplexity


# Measure the fidelity of a server that gives the log probabilities of a few tokens only: bounds.
#
# The 16-bit model is read by an engine here, which gives the logits of the whole vocabulary.


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
class BoundsResult(JsonFile):
    """Bounds on the fidelity of a served model to the 16-bit model.

    Attributes:
        arithmetic: of the engine that read the 16-bit model.
        window: tokens that were read together.
        vocabulary: tokens whose probabilities the 16-bit model gave.
        top_logprobs: tokens whose probabilities the server gave at each position.
        rounding: error of the server's log probabilities that the bounds allow for.
    """

    FILE = "bounds.json"
    WHAT = "a result of fidelity bounds"
    TODO = "Measure again: make fidelity"

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


def measure_served(
    reference: Side, server: OpenAiServer, texts: Sequence[Windows], top: int, progress: Progress, **labels: Any
) -> BoundsResult:
    """Ask the server about all texts, and let the reference read them.

    `labels` are the fields of the result that are not measured here.

    Raises:
        UserError: the server does not answer or does not return what is needed, what it returned is of another
            vocabulary or not of one distribution, or the reference gives logits that are not finite.
    """
    if top > reference.session.vocabulary:
        raise UserError(
            f"fidelity.top_logprobs={top} is more than {reference.name} has tokens: {reference.session.vocabulary:,}.",
            todo="Give a smaller one.",
        )
    answers = iter(server.top_logprobs([row for text in texts for row in text.rows], top, progress))
    answered = [[_known(row, next(answers), reference) for row in text.rows] for text in texts]
    forcing = reference.session.teacher_forcing()
    compared = []
    with progress.task("comparing predictions", sum(text.tokens for text in texts), "tokens") as advance:
        for text, each in zip(texts, answered, strict=True):
            compared.append(joined(list(_read(reference, forcing, text.rows, each, advance))))
    return BoundsResult(
        arithmetic=forcing.arithmetic,
        window=len(texts[0].rows[0]),
        vocabulary=reference.session.vocabulary,
        top_logprobs=top,
        rounding=ROUNDING,
        overall=BoundFigures.of(joined(compared)),
        texts=tuple(TextBounds(text.name, BoundFigures.of(each)) for text, each in zip(texts, compared, strict=True)),
        **labels,
    )


def _known(row: TokenIds, answer: Mapping[str, Any], reference: Side) -> KnownTokens:
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
    reference: Side, forcing: TeacherForcing, rows: Rows, answered: Sequence[KnownTokens], advance: Advance
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
                yield bound_logits(row, answered[first + number].part(slice(at, at + width)))
            at += width
            advance(len(batch) * width)
        first += len(batch)
