"""Read questions: MMLU's from a folder, as parquet of the Hub or a jsonl tree, and the user's own from one table."""

import ast
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from eval.config import EvalSettings
from pipelines.domain.errors import Fault, UserError, refuse

Row = dict[str, Any]
Splits = dict[str, list[Row]]

MINI_MMLU = Path(__file__).parent / "mini_mmlu" / "data"
"""The questions that ship with the project."""

MINI_PICTURES = Path(__file__).parent / "mini_pictures" / "data"
"""Those about pictures."""

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
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        faults.insert(0, Fault(f"The data set at '{root}' has no {listed}.", LAYOUT, "Check eval.dataset_path."))
    refuse(faults)
    return read


def picture_questions(root: Path = MINI_PICTURES) -> dict[str, list[Row]]:
    """Read the questions about pictures by subject: rows of MMLU with `image`, a PNG in base64, and its `description`.

    Raises:
        UserError: there are none, or a row is not such a question.
    """
    files = {folder.name: folder / "test.jsonl" for folder in sorted(root.glob("*")) if folder.is_dir()}
    if not files:
        raise UserError(
            f"'{root}' has no questions about pictures.", allowed="Each subject needs <subject>/test.jsonl."
        )
    read = {subject: [row for _, row in rows_of(file)] for subject, file in files.items()}
    faults = [fault for subject, file in files.items() for fault in _faults(read[subject], file)]
    faults += [
        Fault(f"{file}, row {number}: no image among {sorted(row)}.", "It is a PNG in base64.")
        for subject, file in files.items()
        for number, row in enumerate(read[subject], start=1)
        if not isinstance(row, dict) or not isinstance(row.get("image"), str)
    ][:1]
    refuse(faults)
    return read


def complete_subjects(root: Path) -> int:
    """Return how many folders of `root` have all splits, without reading them."""
    return sum(all(_files(folder, split) for split in SPLITS) for folder in root.glob("*"))


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


# Questions of the user's own: a table with question, choices and answer, judged row by row.

MOST_BYTES = 64 * 2**20
MOST_SUBJECTS = 500
COLUMN_NAMES = {
    "question": ("question", "prompt", "query", "input", "stem"),
    "choices": ("choices", "options", "endings", "candidates"),
    "answer": ("answer", "label", "gold", "answerkey", "target", "correct", "correctanswer", "answeridx"),
    "subject": ("subject", "category", "topic"),
}
"""Names of columns that are recognized, without regard to case, spaces, `_` and `-`; the first has precedence."""
ANSWER_KINDS = ("letter", "index0", "index1", "text")
NO_HEADER = "If the file begins with a question, give it a first line of names: question,A,B,C,D,answer"
_LETTERS = re.compile(r"(choice|option|op|ending|)([a-z]|\d+)")


def read_own(path: Path, settings: EvalSettings) -> list[Row]:
    """Return the questions as {question, choices, answer (an index from 0), subject}.

    Raises:
        UserError: the file cannot be read, a column is missing, a row is not a question, or one repeats another; with
            file, row and column.
    """
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise UserError(f"eval.path='{path}' has {path.stat().st_size:,} bytes.", allowed=f"At most {MOST_BYTES:,}.")
    if not path.is_file() or path.suffix.lower() not in READERS:
        raise UserError(f"eval.path='{path}' is not a file of questions.", allowed=f"A file {', '.join(READERS)}.")
    table: list[tuple[str, Row]] = []
    for where, row in rows_of(path):
        if not isinstance(row, dict):
            raise UserError(f"{path}, {where}: {str(row)[:60]!r} is not an object with columns.")
        table.append((where, {str(name).strip(): value for name, value in row.items()}))
    if not table:
        raise UserError(f"eval.path='{path}' contains no questions.", todo="Give a file with rows.")
    columns = list(dict.fromkeys(name for _, row in table for name in row))
    place = {role: _column(path, columns, role, getattr(settings, f"{role}_column")) for role in COLUMN_NAMES}
    parts = [] if place["choices"] else _parts(path, columns, set(place.values()))
    for role in ("question", "answer") if parts else ("question", "choices", "answer"):
        if place[role] is None:
            headless = f" {NO_HEADER}" if path.suffix.lower() in (".csv", ".tsv") else ""
            raise UserError(
                f"eval.path='{path}' has no column with the {role}.",
                allowed=f"It has {', '.join(columns)}.",
                todo=f"Name it: eval.{role}_column=...{headless}",
            )
    read = [_row(f"{path}, {where}", row, place, parts, settings.own_name) for where, row in table]
    _settle(path, read, str(place["answer"]), settings.answers)
    _refuse_repeats(read)
    if len(subjects := {row["subject"] for row in read}) > MOST_SUBJECTS:
        raise UserError(
            f"eval.path='{path}' has {len(subjects):,} subjects in the column '{place['subject']}'.",
            allowed=f"At most {MOST_SUBJECTS}.",
            todo="Name another column with eval.subject_column.",
        )
    return [{key: row[key] for key in ("question", "choices", "answer", "subject")} for row in read]


def _refuse_repeats(rows: Sequence[Row]) -> None:
    """Refuse questions that are asked twice: a verdict takes each for evidence of its own, and would be too sure."""
    first: dict[tuple[str, frozenset[str]], Row] = {}
    repeats = []
    for row in rows:
        if (before := first.setdefault((row["question"], frozenset(row["choices"])), row)) is not row:
            repeats.append((before, row))
    if not repeats:
        return
    other = [pair for pair in repeats if len({row["choices"][row["answer"]] for row in pair}) > 1]
    before, row = (other or repeats)[0]
    earlier = before["where"].rpartition(", ")[2]
    raise UserError(
        f"{row['where']} asks the same as {earlier}{', with another answer' if other else ''}.",
        allowed="Each question once: a verdict takes each for evidence of its own.",
        todo=f"Remove repeated rows ({len(repeats):,} of {len(rows):,}).",
    )


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) of a file of questions.

    Raises:
        UserError: it cannot be read; names the file, and the row if one is at fault.
    """
    try:
        yield from READERS[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}.", todo="Save it as UTF-8.") from None
    except (OSError, csv.Error, ValueError) as error:  # Arrow's errors are ValueErrors, too
        raise UserError(f"{path} cannot be read: {error}.") from None


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MOST_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        by = "\t" if path.suffix.lower() == ".tsv" else ";" if ";" in head and "," not in head else ","
        rows = csv.DictReader(file, delimiter=by, restkey="\0", strict=True)
        names = [name.strip() for name in rows.fieldnames or []]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"{path}: the column '{min(twice)}' stands there twice.")
        for number, row in enumerate(rows, 1):
            if "\0" in row:
                raise UserError(f"{path}, row {number} (line {rows.line_num}): more fields than columns.")
            yield f"row {number} (line {rows.line_num})", row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"row {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, row {number}: not valid JSON: {error}.") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if (size := sum(group.total_byte_size for group in groups)) > MOST_BYTES:
            raise UserError(f"{path} holds {size:,} bytes.", allowed=f"At most {MOST_BYTES:,}.")
        for number, row in enumerate(file.read().to_pylist(), 1):
            yield f"row {number}", row


READERS = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
"""Readers of files of questions, by suffix."""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _column(path: Path, columns: Sequence[str], role: str, chosen: str | None) -> str | None:
    if chosen is not None:
        if chosen not in columns:
            raise UserError(
                f"eval.{role}_column='{chosen}' is not a column of {path}.", allowed=f"It has {', '.join(columns)}."
            )
        return chosen
    for usual in COLUMN_NAMES[role][:1], COLUMN_NAMES[role][1:]:
        matching = [name for name in columns if _plain(name) in usual]
        if len(matching) > 1:
            raise UserError(
                f"{path}: {' and '.join(matching)} may each be the {role}.",
                todo=f"Name one: eval.{role}_column={matching[0]}",
            )
        if matching:
            return matching[0]
    return None


def _parts(path: Path, columns: Sequence[str], taken: set[str | None]) -> list[str]:
    """Return the columns with one choice each: A, B, ...; option_1, option_2, ...; opa, opb, ...

    Raises:
        UserError: it is in doubt which columns are choices.
    """
    matching = [(m, name) for name in columns if name not in taken and (m := _LETTERS.fullmatch(_plain(name)))]
    parts = sorted(((m[2].lstrip("0") or m[2][:1], name) for m, name in matching), key=lambda e: (len(e[0]), e[0]))
    keys, numbers = [key for key, _ in parts], [str(number) for number in range(len(parts) + 1)]
    if not {"a", "0", "1"} & set(keys):
        return []
    runs = list(ascii_lowercase[: len(keys)]), numbers[:-1], numbers[1:]
    if keys not in runs or len({m[1] for m, _ in matching}) > 1:
        raise UserError(
            f"{path}: the columns {', '.join(name for _, name in parts)} may each be a choice.",
            allowed="A, B, ... or option_1, option_2, ..., one kind of them, without a gap.",
            todo=f"Rename or remove those that are none. {NO_HEADER}",
        )
    return [name for _, name in parts]


def _row(where: str, row: Row, place: Mapping[str, str | None], parts: Sequence[str], name: str) -> Row:
    def fault(column: str | None, why: str) -> UserError:
        return UserError(f"{where}, column '{column}': {why}.", todo="Correct the row, or remove it.")

    question = row.get(str(place["question"]))
    if not isinstance(question, str) or not question.strip():
        raise fault(place["question"], f"{question!r} is not a question")
    column = place["choices"] or "/".join(parts)
    choices, labels = _choices(row.get(str(place["choices"])) if place["choices"] else [row.get(p) for p in parts])
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in choices):
        raise fault(column, f"{str(choices)[:80]} are not choices")
    texts = [str(each).strip() for each in choices]
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise fault(column, f"{len(texts)} choice(s); a question needs 2 to {len(ascii_uppercase)}")
    if "" in texts or len(set(texts)) < len(texts):
        raise fault(column, f"an empty or repeated choice in {str(texts)[:80]}")
    answer = _given(row.get(str(place["answer"])))
    if answer is None:
        raise fault(place["answer"], f"{row.get(str(place['answer']))!r} is not an answer")
    subject = row.get(place["subject"]) if place["subject"] else name
    if not isinstance(subject, str | int) or not str(subject).strip().isprintable() or not str(subject).strip():
        raise fault(place["subject"], f"{subject!r} is not a subject")
    if any("\ud800" <= letter <= "\udfff" for letter in "".join((question, *texts))):
        raise fault(f"{place['question']}/{column}", "half of a surrogate pair, which no tokenizer reads")
    return {
        "question": question.strip(), "choices": texts, "given": answer, "labels": labels,
        "subject": str(subject).strip(), "where": where,
    }  # fmt: skip


def _given(answer: Any) -> str | None:
    """Return an answer as text; None if it is not one."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return None
    return str(answer).strip() or None


def _choices(value: Any) -> tuple[list[Any], list[str]]:
    """Return the texts and labels of choices: a list, a list in text, {"text", "label"}, {label: text}, or cells."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return [], []
    if isinstance(value, dict) and set(value) == {"text", "label"}:
        return list(value["text"] or ()), [str(each) for each in value["label"] or ()]
    if isinstance(value, dict):
        return list(value.values()), [str(each) for each in value]
    if not isinstance(value, list):
        return [], []
    if value and all(isinstance(each, dict) and {"text", "label"} <= set(each) for each in value):
        return [each["text"] for each in value], [str(each["label"]) for each in value]
    while value and value[-1] in (None, ""):
        value = value[:-1]
    return value, []


def _readings(row: Row) -> dict[str, int]:
    """Return the index that an answer means, for each kind that it may be."""
    answer, texts, index = row["given"], row["choices"], {}
    letter = answer.strip("().").upper()
    if answer in row["labels"]:
        index["label"] = row["labels"].index(answer)
    if answer in texts:
        index["text"] = texts.index(answer)
    if len(letter) == 1 and letter in ascii_uppercase[: len(texts)]:
        index["letter"] = ascii_uppercase.index(letter)
    number = int(answer) if re.fullmatch(r"\d{1,3}(\.0)?", answer) is not None and "." not in answer else None
    if number is not None and number < len(texts):
        index["index0"] = number
    if number is not None and 1 <= number <= len(texts):
        index["index1"] = number - 1
    return index


def _settle(path: Path, rows: Sequence[Row], column: str, stated: str | None) -> None:
    """Set the index of each answer: by one kind for the whole file, which has to be beyond doubt."""
    readings = [_readings(row) for row in rows]
    labels = ["label"] if any(row["labels"] for row in rows) else []
    kinds = [stated] if stated else [*labels, *ANSWER_KINDS]
    whole = [kind for kind in kinds if all(kind in each for each in readings)]
    if not whole:
        best = max(kinds, key=lambda kind: sum(kind in each for each in readings))
        row = next(row for row, each in zip(rows, readings, strict=True) if best not in each)
        raise UserError(
            f"{row['where']}, column '{column}': {row['given']!r} is not among its {len(row['choices'])} choices"
            f" (read as {best}).",
            allowed="A letter, an index from 0 or from 1, or the text of a choice, alike in the whole file.",
            todo="Correct the row, or set eval.answers.",
        )
    meant = {kind: [each[kind] for each in readings] for kind in whole}
    sure = meant.get("label", meant[whole[0]])
    if "label" not in meant and any(each != sure for each in meant.values()):
        raise UserError(
            f"{path}, column '{column}': the answers may be {' or '.join(whole)}, which are different choices.",
            todo=f"Set {' or '.join(f'eval.answers={kind}' for kind in whole)}.",
        )
    for row, index in zip(rows, sure, strict=True):
        row["answer"] = index
