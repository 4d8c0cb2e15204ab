"""Convert the files that a case's commands wrote to rows by group and document."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.records.documents import Neutral, file_rows, number_rows, text_rows
from scripts.records.weights import Rows

Found = dict[str, dict[str, Rows]]
"""Rows of each document, by group and by the document's name."""


def artifacts(paths: Iterable[Path], _folder: Path, neutral: Neutral) -> Found:
    """Read the store's folders, which are classified by their content and named by their label.

    Raises:
        ValueError: two of a kind have the same label, so that they could be confused between commits.
    """
    records: Found = {}
    for path in (path for path in paths if path.is_dir()):
        if (kind := _kind(path)) is None:
            continue
        group, noun = kind
        label = f"{noun} {re.sub('-[0-9a-f]{16}$', '', path.name)}"
        documents = records.setdefault(group, {})
        if any(name.startswith(f"{label}/") for name in documents):
            raise ValueError(f"the store contains two artifacts named '{label}'")
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            recorded = file.is_file() and name != "manifest.json" and not file.name.startswith(".")
            if recorded and (rows := file_rows(file, neutral)) is not None:
                documents[f"{label}/{name}"] = rows
    return records


def _kind(folder: Path) -> tuple[str, str] | None:
    """Return (group, noun) of a folder; None if it is not recorded, such as a download."""
    kinds = (
        ("**/config.pbtxt", "repositories", "repository"),
        ("rank*.safetensors", "checkpoints", "checkpoint"),
        ("*.xml", "engines", "engine"),
        ("*.yaml", "engines", "LLM API"),
        ("*.safetensors", "checkpoints", "model"),
    )
    return next(((group, noun) for pattern, group, noun in kinds if any(folder.glob(pattern))), None)


def numbers(paths: Iterable[Path], _folder: Path, _neutral: Neutral) -> Found:
    """Read JSON and CSV files, named by file name alone because their folders have times in their names."""
    rows_of = {path.name: number_rows(path) for path in paths if path.is_file()}
    return {"numbers": {name: rows for name, rows in rows_of.items() if rows}}


def texts(paths: Iterable[Path], folder: Path, neutral: Neutral) -> Found:
    """Read the text files that belong to a repository, named by their path."""
    files = [path for path in paths if path.is_file()]
    return {"repositories": {path.relative_to(folder).as_posix(): text_rows(path, neutral) for path in files}}


READERS: dict[str, Callable[[Iterable[Path], Path, Neutral], Found]] = {
    "artifacts": artifacts,
    "numbers": numbers,
    "texts": texts,
}
