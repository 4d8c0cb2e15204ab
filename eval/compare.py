"""Tables of the accuracy lost to compression: as rows for JSON and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.paired import ALPHA, SMALL_LOSS, above_chance, compare_pair, logprob_shift
from eval.results import EvalResult, Score
from pipelines.document.show import count
from pipelines.host.text import table, wrapped

Row = dict[str, Any]

_LOSS_HEADER = ("model", "format", "base %", "after", "loss %", "verdict")
_PAIRED_HEADER = ("format", "asked", "lost", "gained", "change", "95 % interval", "p")
_FORMATS_PER_BLOCK = 6
ITSELF = "baseline"
"""Verdict on the result that the others are compared with."""
ORIGINAL = "transformers"
"""What executes the model in a result of the model itself, before any conversion."""


def loss_rows(baseline: EvalResult, others: Iterable[EvalResult]) -> list[Row]:
    """Return one row per compressed result, paired with its baseline; plain JSON values.

    Accuracies, `difference`, `stderr` and `interval` are fractions (0..1); `loss_percent` is in percent
    of the baseline's accuracy, negative for a gain. `logprob_shift_mean` and `_max` are distances between the
    natural-log probabilities of a choice. The baseline itself may be among the others.

    Raises:
        UserError: a result did not answer the baseline's questions.
    """
    return [_loss_row(baseline, other) for other in others]


def _loss_row(baseline: EvalResult, other: EvalResult) -> Row:
    pair, (mean, most) = compare_pair(baseline, other), logprob_shift(baseline, other)
    return {
        "model": other.model,
        "format": other.qformat,
        "baseline_format": baseline.qformat,
        "baseline_engine": baseline.engine,
        "engine": other.engine,
        "task": other.task,
        "num_fewshot": other.num_fewshot,
        "questions": pair.questions,
        "baseline_accuracy": pair.baseline_accuracy,
        "baseline_stderr": baseline.overall.stderr,
        "baseline_above_chance": above_chance(baseline),
        "accuracy": pair.accuracy,
        "accuracy_stderr": other.overall.stderr,
        "loss_percent": pair.loss_percent,
        "lost": pair.lost,
        "gained": pair.gained,
        "flips": pair.flips,
        "difference": pair.difference,
        "stderr": pair.stderr,
        "interval": None if pair.interval is None else list(pair.interval),
        "p_value": pair.p_value,
        "logprob_shift_mean": mean,
        "logprob_shift_max": most,
        "verdict": ITSELF if other is baseline else pair.verdict,
    }


def loss_table(rows: Sequence[Row]) -> str:
    """Return the rows as two blocks of text: the loss, and the paired statistics behind the verdict.

    One table may contain rows of several models.
    """
    if not rows:
        return "No compressed result to compare."
    losses = table([_LOSS_HEADER, *map(_loss_cells, rows)], left=2, words=(5,))
    paired = table([_PAIRED_HEADER, *map(_paired_cells, rows)])
    return "\n".join([*losses, "", *paired, "", *_footnotes(rows)])


def _loss_cells(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        row["format"],
        _percent(row["baseline_accuracy"]),
        _percent(row["accuracy"]),
        "-" if row["loss_percent"] is None else f"{row['loss_percent']:.2f}",
        row["verdict"],
    )


def _paired_cells(row: Row) -> tuple[str, ...]:
    low_high = row["interval"]
    return (
        row["format"],
        str(row["questions"]),
        str(row["lost"]),
        str(row["gained"]),
        f"{100 * row['difference']:+.2f}",
        "-" if low_high is None else f"{100 * low_high[0]:+.2f} .. {100 * low_high[1]:+.2f}",
        f"{row['p_value']:.4f}" if row["p_value"] >= 0.0001 else "< 0.0001",
    )


def _footnotes(rows: Sequence[Row]) -> list[str]:
    notes = [
        "Loss is in percent of the baseline's accuracy, change and interval in points.",
        "lost, gained: questions right only before, only after. p: McNemar's exact test;",
        f"below {ALPHA}, accuracy changed. Above, 'no measurable loss' if the interval",
        f"excludes a loss of {100 * SMALL_LOSS:g} point, else 'not decided': ask more questions.",
    ]
    if any(row["verdict"] == ITSELF for row in rows):
        itself = "The 16-bit engine is the baseline. eval.baseline=hugging_face compares it with the model itself."
        notes += ["", wrapped(itself, 0)]
    original = [row for row in rows if row["baseline_engine"] == ORIGINAL]
    if original:
        notes += ["", "Baseline: the model itself, computed by Transformers in float32."]
        notes += [wrapped(against_original(row), 2) for row in original]
    if guessing := sorted({row["model"] for row in rows if not row["baseline_above_chance"]}):
        notes.append(
            wrapped(f"The baseline of {', '.join(guessing)} does not beat guessing, so no loss could be measured.", 0)
        )
    return notes


def against_original(row: Mapping[str, Any]) -> str:
    """Describe how far a result is from that of the model itself, in one sentence."""
    differing = (
        f"{row['model']} {row['format']} against Hugging Face: {row['flips']:,} of {count(row['questions'], 'answer')} "
        "differ"
    )
    if row["logprob_shift_mean"] is None:
        return f"{differing}."
    return (
        f"{differing}, and the log probabilities of the choices by {row['logprob_shift_mean']:.3g} on average, "
        f"{row['logprob_shift_max']:.3g} at most."
    )


def alone_rows(results: Iterable[EvalResult]) -> list[Row]:
    """Return one row per result that has no baseline to be compared with; accuracies are fractions (0..1)."""
    return [
        {
            "model": result.model,
            "format": result.qformat,
            "engine": result.engine,
            "task": result.task,
            "num_fewshot": result.num_fewshot,
            "questions": result.questions,
            "accuracy": result.accuracy,
            "accuracy_stderr": result.overall.stderr,
        }
        for result in results
    ]


def alone_table(rows: Sequence[Row]) -> str:
    """Return accuracies without a baseline as text."""
    cells = [(row["model"], row["format"], str(row["questions"]), _percent(row["accuracy"])) for row in rows]
    lines = table([("model", "format", "asked", "accuracy %"), *cells], left=2)
    return "\n".join(
        [*lines, "", "There is no baseline (eval.baseline=skip, or a server is asked), so no loss can be stated."]
    )


def subject_rows(baseline: EvalResult, others: Sequence[EvalResult]) -> list[Row]:
    """Return accuracy per category, subject and overall; `accuracy` holds one entry per result, the baseline first.

    Raises:
        UserError: a result did not answer the baseline's questions.
    """
    for other in others:
        compare_pair(baseline, other)
    results = [baseline, *others]
    rows = [_subject_row("overall", "all questions", [result.overall for result in results])]
    for kind in ("categories", "subjects"):
        tables: list[Mapping[str, Score]] = [getattr(result, kind) for result in results]
        rows += [_subject_row(kind, name, [table[name] for table in tables]) for name in tables[0]]
    return rows


def _subject_row(kind: str, name: str, scores: Sequence[Score]) -> Row:
    return {
        "kind": kind,
        "name": name,
        "questions": scores[0].questions,
        "accuracy": [score.accuracy for score in scores],
        "stderr": [score.stderr for score in scores],
    }


def subject_table(baseline: EvalResult, others: Sequence[EvalResult]) -> str:
    """Return accuracies in percent per category and subject, the baseline in the first column of each block.

    Columns are numbered, with a legend above, because format names are wider than the numbers.
    """
    rows = subject_rows(baseline, others)
    blocks = []
    for start in range(0, max(len(others), 1), _FORMATS_PER_BLOCK):
        shown = [0, *range(start + 1, min(start + _FORMATS_PER_BLOCK, len(others)) + 1)]
        names = [f"({i})\xa0{(baseline, *others)[i].qformat}" for i in shown]  # no line break between number and name
        legend = f"{baseline.model}, accuracy in percent: {', '.join(names)}"
        lines: list[Sequence[str] | str] = [("", "asked", *(f"({i})" for i in shown))]
        kind = "overall"
        for row in rows:
            if row["kind"] != kind:
                kind = row["kind"]
                lines.append(kind)
            lines.append((row["name"], str(row["questions"]), *(_percent(row["accuracy"][i], 1) for i in shown)))
        blocks.append("\n".join([wrapped(legend, 0).replace("\xa0", " "), *table(lines)]))
    return "\n\n".join(blocks)


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}"
