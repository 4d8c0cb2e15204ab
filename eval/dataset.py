"""Read MMLU questions from a folder: the Hub's parquet layout or a jsonl tree, checked row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval.own import rows_of
from pipelines.domain.errors import Fault, UserError

Row = Mapping[str, Any]
Splits = dict[str, list[Row]]

MINI_MMLU = Path(__file__).parent / "mini_mmlu" / "data"
"""The questions that ship with the project."""

SPLITS = ("dev", "test")
"""Splits that MMLU is scored with: worked examples and questions; `validation` is not read."""

CHOICES = 4

LAYOUT = "Each subject needs each split as <subject>/<split>-00000-of-00001.parquet or <subject>/<split>.jsonl."


def read_subjects(root: Path, subjects: Iterable[str]) -> dict[str, Splits]:
    """Read `dev` and `test` of each subject.

    Args:
        root: contains one folder per subject, each with `<split>-*.parquet` or `<split>.jsonl`.
        subjects: folder names, in the desired order.

    Raises:
        UserError: files are missing, or a row is not a question with four choices; lists every fault at once.
    """
    faults: list[Fault] = []
    read: dict[str, Splits] = {}
    missing: list[str] = []
    for subject in subjects:
        read[subject] = {}
        for split in SPLITS:
            if files := _files(root / subject, split):
                rows = [row for file in files for _, row in rows_of(file)]
                faults.extend(_faults(rows, files[0]))
                read[subject][split] = rows
            else:
                missing.append(f"{subject}/{split}")
    if missing:
        faults.insert(0, _missing(root, missing))
    if faults:
        raise UserError.of(faults)
    return read


def complete_subjects(root: Path) -> int:
    """Return how many folders of `root` have all splits, without reading them."""
    return sum(all(_files(folder, split) for split in SPLITS) for folder in root.glob("*"))


def _missing(root: Path, missing: list[str]) -> Fault:
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return Fault(
        f"The data set at '{root}' has no {shown}.",
        LAYOUT,
        "Check eval.dataset_path.",
    )


def _files(folder: Path, split: str) -> list[Path]:
    jsonl = folder / f"{split}.jsonl"
    return sorted(folder.glob(f"{split}-*.parquet")) or ([jsonl] if jsonl.is_file() else [])


def _faults(rows: list[Row], file: Path) -> list[Fault]:
    """Return only the first fault of a file, because a wrong column would be reported once per row."""
    if not rows:
        return [Fault(f"{file} contains no questions.")]
    for number, row in enumerate(rows, start=1):
        if problem := _problem(row):
            return [Fault(f"{file}, row {number}: {problem}.", "A row must look like those of cais/mmlu.")]
    return []


def _problem(row: Any) -> str:
    if not isinstance(row, dict):
        return f"{row!r} is not a JSON object"
    if lacking := {"question", "choices", "answer"} - set(row):
        return f"no {', '.join(sorted(lacking))} among {sorted(row)}"
    question, choices, answer = row["question"], row["choices"], row["answer"]
    if not isinstance(question, str) or not question.strip():
        return f"question={question!r} is not a non-empty string"
    if not isinstance(choices, list) or len(choices) != CHOICES or not all(isinstance(c, str) for c in choices):
        return f"choices={choices!r} is not a list of {CHOICES} strings"
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < CHOICES:
        return f"answer={answer!r} is not one of 0..{CHOICES - 1}"
    return ""


def load_mini_subject(*, subject: str, **_metadata: object) -> dict[str, Any]:
    """Load one packaged subject for stock lm-eval; the task files in `eval/tasks` name this as `custom_dataset`."""
    return as_datasets(read_subjects(MINI_MMLU, [subject])[subject])


def load_mini_answers(*, subject: str, **_metadata: object) -> dict[str, Any]:
    """Load one packaged subject as open questions, in the same way as `load_mini_subject`."""
    return as_datasets(open_questions(read_subjects(MINI_MMLU, [subject])[subject]))


def open_questions(splits: Splits) -> Splits:
    """Return questions without options: each wording once, and the text of its right choice as `answer`."""
    return {
        split: [
            {"question": question, "answer": answer}
            for question, answer in {row["question"]: row["choices"][row["answer"]] for row in rows}.items()
        ]
        for split, rows in splits.items()
    }


def as_datasets(splits: Splits) -> dict[str, Any]:
    """Return the splits as `datasets.Dataset`s, held in memory."""
    from datasets import Dataset

    return {split: Dataset.from_list([dict(row) for row in rows]) for split, rows in splits.items()}
