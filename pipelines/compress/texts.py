"""Read calibration texts lazily from local files."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError

DEFAULT_COLUMN = "text"


def load_texts(
    source: Path | str, *, size: int | None = None, split: str | None = None, column: str = DEFAULT_COLUMN
) -> Iterator[str]:
    """Yield up to `size` non-empty texts from a file or a folder, in a fixed order.

    A .txt file has one text per paragraph (paragraphs end at an empty line); .jsonl, .json, .csv and .parquet
    have one text per row. The files of a folder are read in the order of their paths. The folder may be a snapshot
    of a Hugging Face data set (data/train-00000-of-00002.parquet, ...), from which `split` selects the files.

    Args:
        source: file or folder.
        size: maximum number of texts; None means all.
        split: e.g. "train": only files whose name or folder starts with it.
        column: the field that contains the text.

    Raises:
        UserError: the path does not exist, no file matches, the column is missing (the message lists those that
            exist), or there is no text. Raised before the first text.
    """
    texts = itertools.islice(_all_texts(Path(source), split, column), size)
    first = next(texts, None)
    if first is None:
        raise UserError(f"{source} contains no text in the column '{column}'.", todo="Give a file with text.")
    return itertools.chain([first], texts)


def _all_texts(source: Path, split: str | None, column: str) -> Iterator[str]:
    for path in _files(source, split):
        try:
            for text in _READERS[path.suffix](path, column):
                if text.strip():
                    yield text
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path} cannot be read: {error}.", todo="Give a readable file in UTF-8.") from None


def _files(source: Path, split: str | None) -> list[Path]:
    known = ", ".join(_READERS)
    if source.is_file():
        if source.suffix not in _READERS:
            raise UserError(f"{source} has the unknown file type '{source.suffix}'.", allowed=f"Known: {known}.")
        return [source]
    if not source.is_dir():
        raise UserError(f"Calibration data {source} does not exist.", todo="Give a local file or folder.")
    found = sorted(path for path in source.rglob("*") if path.suffix in _READERS and _is_data(path, source))
    if not found:
        raise UserError(f"{source} contains no data file.", allowed=f"Known: {known}.")
    chosen = [path for path in found if split is None or _in_split(path.relative_to(source), split)]
    if not chosen:
        names = ", ".join(str(path.relative_to(source)) for path in found[:5])
        raise UserError(f"{source} has no file of the split '{split}'.", allowed=f"It contains {names}.")
    return chosen


def _is_data(path: Path, root: Path) -> bool:
    """Return whether a file contains data; hidden files and descriptions of a data set do not."""
    inside = path.relative_to(root)
    return not any(part.startswith(".") for part in inside.parts) and path.name not in {
        "dataset_infos.json",
        "dataset_info.json",
        "state.json",
        "dataset_dict.json",
        "README.txt",
    }


def _in_split(inside: Path, split: str) -> bool:
    """Return whether a path such as data/train-00000.parquet or train/part.jsonl belongs to a split."""
    return any(part == split or part.startswith((f"{split}-", f"{split}.", f"{split}_")) for part in inside.parts)


def _read_txt(path: Path, _column: str) -> Iterator[str]:
    paragraph: list[str] = []
    with _open(path) as lines:
        for line in lines:
            if line.strip():
                paragraph.append(line.rstrip("\n"))
            elif paragraph:
                yield "\n".join(paragraph)
                paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text_of(_parse(line, f"{path}, line {number}"), column, f"{path}, line {number}")


def _read_json(path: Path, column: str) -> Iterator[str]:
    with _open(path) as file:
        rows = _parse(file.read(), str(path))
    if not isinstance(rows, list):
        raise UserError(
            f"{path} contains a {type(rows).__name__}, not a list.", allowed="Allowed: a list of rows or strings."
        )
    for number, row in enumerate(rows, start=1):
        yield row if isinstance(row, str) else _text_of(row, column, f"{path}, row {number}")


def _read_csv(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        _check_column(column, rows.fieldnames or [], str(path))
        for row in rows:
            yield row[column] or ""


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowInvalid

    try:
        file = pq.ParquetFile(path)
    except ArrowInvalid as error:
        raise UserError(f"{path} is not a valid parquet file: {error}.", todo="Download it again.") from None
    with file:
        _check_column(column, file.schema_arrow.names, str(path))
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield _as_text(text, column, str(path))


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}


def _open(path: Path) -> Any:
    return path.open(encoding="utf-8", errors="strict")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{where}: not valid JSON ({error}).", todo="A .jsonl file needs one JSON object per line."
        ) from None


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {type(row).__name__}.")
    _check_column(column, row, where)
    return _as_text(row[column], column, where)


def _as_text(value: Any, column: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: the column '{column}' contains {type(value).__name__}, not text.")
    return value


def _check_column(column: str, names: Iterable[str], where: str) -> None:
    if column not in names:
        raise UserError(
            f"{where}: there is no column '{column}'.",
            allowed=f"Columns: {', '.join(names) or 'none'}.",
            todo="Name the column that contains the text.",
        )
