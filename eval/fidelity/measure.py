"""Measure the fidelity of one engine to another: both read the same token ids, slice by slice.

Shapes: B windows read together, T tokens of each, t tokens of one slice, V vocabulary, N = B t positions.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np

from eval.fidelity.divergence import (
    FidelityResult,
    Figures,
    GreedyFidelity,
    LayerErrors,
    Positions,
    TextFidelity,
    compare_logits,
    joined,
)
from pipelines.checkpoint.tokenizer import RenderedChat
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Advance, Progress
from pipelines.engines.port import LogitsSession, NotFiniteError, SamplingParams, TeacherForcing, TokenIds

Array = np.ndarray[Any, Any]
Rows = Sequence[tuple[int, ...]]
Predictions = tuple["Side", Iterator[Array]]
"""A side, and its logits of a batch in slices."""

MAX_LOGITS = 13 * 2**19
"""Most logits of one slice, 26 MiB of float32; there are two slices at any time."""
TOKENS_AT_ONCE = 128
"""Most tokens of one iteration, of all windows together: what its activations take grows with them, 0.4 MiB for each in
a model of Gemma 2B's shape."""
WINDOWS_AT_ONCE = 2
"""More windows in one iteration are no faster."""
NOISE_SHARE = 0.25
"""Most of each text that the noise is measured on."""
NOISE_TOKENS = 4096
"""Where that is more, the noise is measured on so many tokens of all texts, rounded up to whole windows of each.

Where a model computes in bf16, the second run is in float32 and takes three times as long. Means of the bundled models'
noise over 4,096 tokens had a standard deviation of 8 to 16 %, over 8,192 of 5 %.
"""
PROMPT_TOKENS = 32
LAYER_WINDOWS = 4
"""Windows on which the outputs of blocks are compared."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models that are compared."""

    name: str
    session: LogitsSession


def check_sides(reference: Side, other: Side) -> None:
    """Refuse engines whose logits are not of the same tokens.

    Raises:
        UserError: their vocabularies differ in size.
    """
    sizes = reference.session.vocabulary, other.session.vocabulary
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{other.name} has a vocabulary of {sizes[1]:,} tokens and {reference.name} one of {sizes[0]:,}.",
            todo="Compare with the model it was made from.",
        )


def measure(
    reference: Side, other: Side, texts: "Sequence[Windows]", scratch: Path, progress: Progress, /, **labels: Any
) -> FidelityResult:
    """Let both read all texts, and then the reference against itself for the noise.

    `labels` are the fields of the result that are not measured here.

    Raises:
        UserError: one of them gives logits that are not finite.
    """
    rows = [text.rows for text in texts]
    parts = noise_parts(rows)
    with TemporaryFile(dir=scratch) as spill:
        with progress.task("comparing predictions", sum(text.tokens for text in texts), "tokens") as advance:
            compared, arithmetic = _compared(reference, other, rows, [len(part) for part in parts], spill, advance)
        token_bytes = spill.tell() // _predicted(parts)
        spill.seek(0)
        with progress.task("comparing the reference with itself", _predicted(parts), "tokens") as advance:
            noise, noise_arithmetic = _compared_with_itself(reference, parts, spill, token_bytes, advance)
    each = zip(texts, compared, noise, strict=True)
    return FidelityResult(
        arithmetic=arithmetic,
        noise_arithmetic=noise_arithmetic,
        window=len(rows[0][0]),
        vocabulary=reference.session.vocabulary,
        overall=Figures.of(joined(compared)),
        noise=Figures.of(joined(noise)),
        texts=tuple(
            TextFidelity(text.name, text.unseen, Figures.of(ours), Figures.of(own)) for text, ours, own in each
        ),
        **labels,
    )


def noise_parts(texts: Sequence[Rows]) -> list[Rows]:
    """Return the first windows of each text, on which the noise is measured."""
    share = min(NOISE_SHARE, NOISE_TOKENS / _predicted(texts))
    return [rows[: math.ceil(share * len(rows))] for rows in texts]


def _predicted(texts: Sequence[Rows]) -> int:
    return sum(len(row) - 1 for rows in texts for row in rows)


def _compared(
    reference: Side, other: Side, texts: Sequence[Rows], keep: Sequence[int], spill: IO[bytes], advance: Advance
) -> tuple[list[Positions], str]:
    """Let both read texts, and return the compared positions of each, and the arithmetic of the other.

    For the first windows of each text, `keep` of them, what the reference's last block puts out is written to a file,
    float32 [T, H] of each.
    """
    first, second = reference.session.teacher_forcing(), other.session.teacher_forcing()
    compared = []
    for rows, left in zip(texts, keep, strict=True):
        parts: list[Positions] = []
        for batch, sizes in batches(rows, (reference.session, other.session)):
            fed, seen = batch[:, :-1].tolist(), list[Array]()
            hidden = first.hidden(fed, sizes.tokens)
            ours = first.logits(_noted(hidden, seen) if left > 0 else hidden, sizes.logits)
            theirs = predictions(second, fed, sizes)
            parts += _positions((reference, ours), (other, theirs), batch, sizes, advance)
            if seen:
                spill.write(np.concatenate(seen, axis=1)[:left].tobytes())
            left -= len(batch)
        compared.append(joined(parts))
    return compared, second.arithmetic


def _noted(pieces: Iterable[Array], seen: list[Array]) -> Iterator[Array]:
    for piece in pieces:
        seen.append(piece.copy())
        yield piece


def _compared_with_itself(
    reference: Side, texts: Sequence[Rows], spill: IO[bytes], token_bytes: int, advance: Advance
) -> tuple[list[Positions], str]:
    """Let the reference read texts again, with other iterations and another arithmetic; return as `_compared` does.

    Its first predictions are made once more from what `_compared` has kept, so that only one model is loaded here and a
    head.
    """
    head, second = reference.session.head(), reference.session.teacher_forcing(varied=True)
    compared = []
    for rows in texts:
        parts: list[Positions] = []
        for batch, sizes in batches(rows, (reference.session,)):
            fed = batch[:, :-1]
            hidden = np.frombuffer(spill.read(fed.size * token_bytes), dtype=np.float32).reshape(*fed.shape, -1)
            ours, theirs = head.logits([hidden], sizes.logits), predictions(second, fed.tolist(), sizes)
            parts += _positions((reference, ours), (reference, theirs), batch, sizes, advance)
        compared.append(joined(parts))
    return compared, second.arithmetic


class ReadSizes(NamedTuple):
    """How windows are read.

    Attributes:
        tokens: of each window in one iteration.
        logits: of each window in one slice.
    """

    tokens: int
    logits: int


def batches(rows: Rows, sessions: Sequence[LogitsSession]) -> Iterator[tuple[Array, ReadSizes]]:
    """Yield windows to read together, int64 [B, T], and how; within what both engines are built for."""
    length, vocabulary = len(rows[0]) - 1, sessions[0].vocabulary
    most = min(WINDOWS_AT_ONCE, *(session.limits.max_batch_size for session in sessions))
    together = max(1, min(most, MAX_LOGITS // (vocabulary * length)))
    iteration = min(TOKENS_AT_ONCE, *(session.limits.max_num_tokens for session in sessions))
    for start in range(0, len(rows), together):
        batch = np.array(rows[start : start + together], dtype=np.int64)
        tokens = max(1, min(length, iteration // len(batch)))
        yield batch, ReadSizes(tokens, max(1, min(tokens, MAX_LOGITS // (vocabulary * len(batch)))))


def predictions(forcing: TeacherForcing, fed: Sequence[TokenIds], sizes: ReadSizes) -> Iterator[Array]:
    """Read sequences of one length together; yield the logits after their tokens as `Head.logits` does."""
    return forcing.logits(forcing.hidden(fed, sizes.tokens), sizes.logits)


def _positions(
    reference: Predictions, other: Predictions, batch: Array, sizes: ReadSizes, advance: Advance
) -> Iterator[Positions]:
    at = 1
    for ours, theirs in zip(reference[1], other[1], strict=True):
        rows, width, vocabulary = ours.shape
        targets = batch[:, at : at + width].reshape(-1)
        positions = compare_logits(ours.reshape(-1, vocabulary), theirs.reshape(-1, vocabulary), targets)
        if not np.isfinite(positions.kl).all():
            side = other[0] if np.isfinite(ours).all() else reference[0]
            raise not_finite(side, batch[:, :-1].tolist(), sizes.tokens)
        yield positions
        at += width
        advance(rows * width)


def not_finite(side: Side, sequences: Sequence[Sequence[int]], size: int) -> NotFiniteError:
    """Name the first block whose output is not finite, by reading the same windows again."""
    where = "all decoder blocks give finite outputs, so it is the last norm or the head"
    for blocks in side.session.block_outputs().slices(sequences, size):
        wrong = next((name for name in _in_order(blocks) if not np.isfinite(blocks[name]).all()), None)
        if wrong is not None:
            where = f"the output of decoder {wrong.replace('.', ' ')} is the first that is not finite"
            break
    return NotFiniteError(side.name, where, sequences[0])


def _in_order(blocks: Any) -> list[str]:
    return sorted(blocks, key=lambda name: int(name.partition(".")[2]))


def greedy(
    reference: Side, other: Side, texts: "Sequence[Windows]", *, prompts: int, new_tokens: int, progress: Progress
) -> GreedyFidelity:
    """Continue beginnings of windows greedily on both, one engine at a time; find the first token that differs."""
    rows = [row for text in texts for row in text.rows]
    chosen = rows[:: max(1, len(rows) // prompts)][:prompts]
    beginnings = [row[:PROMPT_TOKENS] for row in chosen]
    answers = []
    for side in (reference, other):
        with side.session as session:
            longest = max(1, min(new_tokens, session.limits.max_seq_len - max(map(len, beginnings))))
            answers.append([each.token_ids for each in session.generate(beginnings, SamplingParams(longest), progress)])
    both = (itertools.zip_longest(*each) for each in zip(*answers, strict=True))
    firsts = (next((at for at, (a, b) in enumerate(pairs) if a != b), None) for pairs in both)
    return GreedyFidelity(new_tokens, tuple(firsts))


def layer_errors(
    reference: Side, other: Side, texts: "Sequence[Windows]", *, scaled: bool, progress: Progress
) -> LayerErrors:
    """Compare the outputs of all decoder blocks, and the weights of all linears.

    Args:
        reference: the 16-bit model.
        other: the compressed one.
        texts: whose first windows are read.
        scaled: take a factor per input channel out of the weights first.
        progress: counts linears.
    """
    rows = [row for text in texts for row in text.rows if len(row) == len(texts[0].rows[0])][:LAYER_WINDOWS]
    blocks, noise = (_block_errors(reference, side, rows) for side in (other, reference))
    weights: dict[str, list[float]] = {}
    with progress.task("comparing weights", None, "linears") as advance:
        for (name, ours), (_, theirs) in zip(
            reference.session.linear_weights(), other.session.linear_weights(), strict=True
        ):
            weights.setdefault(name.partition(".")[2], []).append(weight_error(ours, theirs, scaled=scaled))
            advance(1)
    return LayerErrors(blocks, noise, {name: tuple(errors) for name, errors in weights.items()}, scaled)


def _block_errors(reference: Side, other: Side, rows: Rows) -> tuple[float, ...]:
    first = reference.session.block_outputs()
    second = other.session.block_outputs(varied=reference is other)
    wrong: dict[str, float] = {}
    size_of: dict[str, float] = {}
    for batch, sizes in batches(rows, (reference.session, other.session)):
        fed = batch[:, :-1].tolist()
        for ours, theirs in zip(*(each.slices(fed, sizes.tokens) for each in (first, second)), strict=True):
            for name, values in ours.items():
                right = values.astype(np.float64)
                wrong[name] = wrong.get(name, 0.0) + float(((theirs[name] - right) ** 2).sum())
                size_of[name] = size_of.get(name, 0.0) + float((right**2).sum())
    return tuple((wrong[name] / size_of[name]) ** 0.5 for name in _in_order(wrong))


def weight_error(reference: Array, other: Array, *, scaled: bool) -> float:
    """Return |other - reference| / |reference|, Frobenius norms of weights [out, in].

    Args:
        reference: the 16-bit weight.
        other: the same weight as it is multiplied after compression.
        scaled: multiply each input channel of the reference by the factor that fits best (least squares).
    """
    right, held = reference.astype(np.float64), other.astype(np.float64)
    if scaled:
        energy = (right**2).sum(axis=0)
        right = right * np.where(energy > 0, (right * held).sum(axis=0) / np.where(energy > 0, energy, 1), 1)
    total = float(np.linalg.norm(right))
    return float(np.linalg.norm(held - right)) / total if total else float(np.linalg.norm(held) > 0)


# Texts as windows of token ids, and whether two tokenizers give the same ids.

BETWEEN = "\n\n"
"""Joins the texts of a file."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text cut into sequences of one length that are read independently of each other.

    Attributes:
        rows: token ids of each window; all but the first of a window are predicted.
        unseen: whether calibration observed none of it.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    unseen: bool

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return sum(len(row) - 1 for row in self.rows)


def cut(
    name: str, texts: Callable[[], Iterable[str]], tokenizer: Any, *, length: int, tokens: int, observed: int
) -> Windows:
    """Cut the first tokens of a text into windows.

    Each window begins with the tokenizer's BOS token, if it has one, as a prompt would; the texts follow each other
    without special tokens between them, but for those that a chat template writes.

    Args:
        name: of the text.
        texts: returns the texts of the file, from its beginning.
        tokenizer: of the model.
        length: tokens of a window.
        tokens: number of predicted tokens, rounded up to whole windows.
        observed: how many of the texts calibration may have observed; they are left out if the others are enough.

    Raises:
        UserError: the text has fewer than two tokens.
    """
    bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    new, count = length - len(bos), -(-tokens // (length - 1))
    later = _ids(itertools.islice(texts(), observed, None), tokenizer, count * new) if observed else []
    unseen = not observed or len(later) == count * new
    ids = later if observed and unseen else _ids(texts(), tokenizer, count * new)
    rows = tuple((*bos, *ids[at : at + new]) for at in range(0, len(ids) - new + 1, new)) or ((*bos, *ids),)
    if len(rows[0]) < 2:
        raise UserError(
            f"The text '{name}' has {len(ids)} tokens, so that nothing is predicted.", todo="Give a longer text."
        )
    return Windows(name, rows, unseen)


def _ids(texts: Iterable[str], tokenizer: Any, most: int) -> list[int]:
    """Return the ids of the first texts that have `most` tokens together, or of all of them."""
    ids: list[int] = []
    for text in texts:
        between = BETWEEN if ids and not isinstance(text, RenderedChat) else ""
        ids += tokenizer.encode(between + text, add_special_tokens=False, verbose=False)
        if len(ids) >= most:
            break
    return ids[:most]


def refuse_other_tokens(ours: Any, theirs: Any, *, model: str, reference: str) -> None:
    """Refuse to compare two models whose token ids mean different texts.

    Raises:
        UserError: the tokenizers differ; the message names the first id that they read differently.
    """
    if ours is theirs:
        return
    mine, other = ({number: token for token, number in each.get_vocab().items()} for each in (ours, theirs))
    wrong = next(
        (number for number in sorted(mine.keys() | other.keys()) if mine.get(number) != other.get(number)), None
    )
    if wrong is None:
        return
    texts = [f"{each[wrong]!r}" if wrong in each else "no token" for each in (mine, other)]
    raise UserError(
        f"{model} and {reference} have different tokenizers: token {wrong} is {texts[0]} in {model} and {texts[1]} in "
        f"{reference}, so their probabilities are not of the same tokens.",
        todo="Compare with the model it was made from, with its own tokenizer.",
    )
