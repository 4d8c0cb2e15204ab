"""Perplexity of texts as lm-eval defines it: a number without right and wrong, and so without a verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.document.blocks import Table, left, right
from pipelines.domain.errors import JsonFile, UserError

NO_VERDICT = (
    "Perplexity: exp of the mean negative log likelihood per word of the text. Ratio: over the baseline's; above 1, "
    "the text became less likely. It has no verdict: a text is neither right nor wrong, so that no loss of answers "
    "follows from it. GO and NO-GO need questions (make evaluate with another task)."
)


@dataclass(frozen=True, slots=True)
class PerplexityResult(JsonFile):
    """Perplexity of one model, in one format, on one engine, for one task.

    Attributes:
        qformat: how the model was compressed, "none" for the 16-bit baseline.
        task: name of the task, e.g. wikitext.
        limit: maximum number of documents, None for all.
        max_length: tokens of a window; longer documents are read in several, each token predicted once.
        lm_eval_version: the version that split the documents and computed the figures.
        prompts_sha256: hash of all documents in order.
        word_perplexity: per word of the document, as lm-eval counts words.
        byte_perplexity: per byte of UTF-8.
        bits_per_byte: binary logarithm of that.
    """

    FILE = "perplexity.json"
    WHAT = "a result of perplexity"
    TODO = "Evaluate again with this version."

    model: str
    qformat: str
    engine: str
    task: str
    limit: int | None
    max_length: int
    lm_eval_version: str
    prompts_sha256: str
    documents: int
    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float


def same_texts(a: PerplexityResult, b: PerplexityResult) -> bool:
    """Return whether two results read the same texts in the same windows, so that their ratio means something."""
    return all(getattr(a, name) == getattr(b, name) for name in ("task", "limit", "max_length", "prompts_sha256"))


def perplexity_rows(
    pairs: Sequence[tuple[PerplexityResult | None, PerplexityResult]],
) -> list[dict[str, Any]]:
    """Return one row per pair (baseline or None, result); `ratio` is of the perplexities per word.

    Raises:
        UserError: a baseline read other texts.
    """
    rows = []
    for baseline, result in pairs:
        if baseline is not None and not same_texts(baseline, result):
            raise UserError(
                f"{baseline.model} {baseline.qformat} and {result.model} {result.qformat} did not read the same texts "
                f"of {result.task} in windows of one length ({baseline.max_length} and {result.max_length} tokens).",
                todo="Evaluate both with the same eval settings and build.max_seq_len.",
            )
        row = asdict(result) | {"verdict": None, "baseline_word_perplexity": None, "ratio": None}
        if baseline is not None:
            ratio = result.word_perplexity / baseline.word_perplexity
            row |= {"baseline_word_perplexity": baseline.word_perplexity, "ratio": ratio}
        rows.append(row)
    return rows


def perplexity_table(named: Sequence[tuple[str, PerplexityResult | None, PerplexityResult]]) -> Table:
    """Return perplexities beside the baseline's: of each row its name, the baseline's result and its own."""
    lengths = dict.fromkeys(f"{result.max_length:,}" for _, _, result in named)
    engines = dict.fromkeys(result.engine for _, _, result in named)
    rows = []
    for name, baseline, result in named:
        before = "-" if baseline is None else f"{baseline.word_perplexity:.4g}"
        ratio = "-" if baseline is None else f"{result.word_perplexity / baseline.word_perplexity:.4f}"
        own = f"{result.word_perplexity:.4g}", ratio, f"{result.byte_perplexity:.4f}", f"{result.bits_per_byte:.4f}"
        rows.append((name, result.task, f"{result.documents:,}", before, *own))
    return Table(
        caption=f"Perplexity of texts: windows of {', '.join(lengths)} tokens, engine {', '.join(engines)}; no verdict",
        origin="measured",
        columns=(*left("format", "task"), *right("texts", "base", "per word", "ratio", "per byte", "bits/byte")),
        rows=tuple(rows),
        notes=(NO_VERDICT,),
    )
