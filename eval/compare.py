"""Tables of what compression cost: as rows for JSON and as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.paired import ALPHA, above_chance, compare_pair
from eval.results import EvalResult, Score
from pipelines.host.screen import width

Row = dict[str, Any]

_LOSS_WIDTHS = (14, 24, 6, 6, 6, 18)
_LOSS_HEADER = ("model", "format", "base %", "after", "loss %", "verdict")
_PAIRED_WIDTHS = (24, 6, 5, 6, 6, 16, 8)
_LEAST_TEXT = 8
_PAIRED_HEADER = ("format", "asked", "lost", "gained", "change", "95 % interval", "p")
_FORMATS_PER_BLOCK = 6


def loss_rows(baseline: EvalResult, others: Iterable[EvalResult]) -> list[Row]:
    """Return one row per compressed result, paired with its baseline; plain JSON values.

    Accuracies, `difference`, `stderr` and `interval` are shares (0..1); `loss_percent` is in percent
    of the baseline's accuracy, negative for a gain.

    Raises:
        UserError: a result did not answer the baseline's questions.
    """
    return [_loss_row(baseline, other) for other in others]


def _loss_row(baseline: EvalResult, other: EvalResult) -> Row:
    pair = compare_pair(baseline, other)
    return {
        "model": other.model,
        "format": other.qformat,
        "baseline_format": baseline.qformat,
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
        "verdict": pair.verdict,
    }


def loss_table(rows: Sequence[Row]) -> str:
    """Return the rows as two blocks of text: the loss, and the paired statistics behind the verdict.

    Rows of several models may stand in one table.
    """
    if not rows:
        return "No compressed result to compare."
    lines = [_line(_LOSS_HEADER, _LOSS_WIDTHS, text_columns=(0, 1, 5))]
    for row in rows:
        cells = (
            row["model"],
            row["format"],
            _percent(row["baseline_accuracy"]),
            _percent(row["accuracy"]),
            "-" if row["loss_percent"] is None else f"{row['loss_percent']:.2f}",
            row["verdict"],
        )
        lines.append(_line(cells, _LOSS_WIDTHS, text_columns=(0, 1, 5)))
    lines += ["", _line(_PAIRED_HEADER, _PAIRED_WIDTHS, text_columns=(0,))]
    lines += [_line(_paired_cells(row), _PAIRED_WIDTHS, text_columns=(0,)) for row in rows]
    return "\n".join([*lines, "", *_footnotes(rows)])


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
        f"a verdict other than 'no measurable loss' needs p < {ALPHA}.",
    ]
    if guessing := sorted({row["model"] for row in rows if not row["baseline_above_chance"]}):
        notes += textwrap.wrap(
            f"The baseline of {', '.join(guessing)} does not beat guessing: a loss could not show.", width() + 1
        )
    return notes


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

    Columns are numbered and named above, because names of formats are longer than numbers.
    """
    rows = subject_rows(baseline, others)
    blocks = []
    for start in range(0, max(len(others), 1), _FORMATS_PER_BLOCK):
        shown = [0, *range(start + 1, min(start + _FORMATS_PER_BLOCK, len(others)) + 1)]
        names = [f"({i})\xa0{(baseline, *others)[i].qformat}" for i in shown]  # a number stays with its name
        widths, text_columns = (30, 6, *(5 for _ in shown)), (0,)
        legend = f"{baseline.model}, accuracy in percent: {', '.join(names)}"
        lines = [line.replace("\xa0", " ") for line in textwrap.wrap(legend, width() + 1, break_on_hyphens=False)]
        lines.append(_line(("", "asked", *(f"({i})" for i in shown)), widths, text_columns))
        kind = "overall"
        for row in rows:
            if row["kind"] != kind:
                kind = row["kind"]
                lines.append(kind)
            cells = (row["name"], str(row["questions"]), *(_percent(row["accuracy"][i], 1) for i in shown))
            lines.append(_line(cells, widths, text_columns))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}"


def _line(cells: Sequence[str], widths: Sequence[int], text_columns: Sequence[int]) -> str:
    """One row of a table; a text too long for its column goes on in the next line.

    On a narrow screen the columns of text give way.
    """
    over = sum(widths) + len(widths) - 1 - width()
    if over > 0:
        share = -(-over // len(text_columns))
        widths = [max(_LEAST_TEXT, size - share) if i in text_columns else size for i, size in enumerate(widths)]
    wrapped = [
        textwrap.wrap(cell, width) or [""] if i in text_columns else [cell]
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    lines = []
    for n in range(max(len(parts) for parts in wrapped)):
        parts = [parts[n] if n < len(parts) else "" for parts in wrapped]
        lines.append(
            " ".join(
                part.ljust(width) if i in text_columns else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ).rstrip()
        )
    return "\n".join(lines)
