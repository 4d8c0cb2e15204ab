"""Files and printed text -> documents: named rows of what must stay the same, without paths, versions and times."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from scripts.records.weights import Rows, digest, graph_rows, tensor_rows


class Kind(StrEnum):
    """How a document is compared."""

    EXACT = "exact"  # every row
    NUMBERS = "numbers"  # every row, but keys may be renamed where all values stay
    WHOLE = "whole"  # digest of a whole file whose content is compared row by row as well: on request
    SHOWN = "shown"  # digest of Python code, whose imports follow the modules, or of prose: never a difference


@dataclass(frozen=True, slots=True)
class Document:
    """Rows by name; values are JSON."""

    kind: Kind
    rows: Rows

    def to_json(self) -> dict[str, Any]:
        """For the recording."""
        return {"kind": str(self.kind), "rows": self.rows}


@dataclass(frozen=True, slots=True)
class Neutral:
    """Takes out of a text what differs from run to run: paths of this recording, keys of the store, versions.

    Attributes:
        paths: what stands for each path; a path that contains another one comes first.
    """

    paths: Mapping[str, str]

    def __call__(self, text: str) -> str:
        """The text without them."""
        for path, name in self.paths.items():
            text = text.replace(path, name)
        for pattern, name in _VARYING:
            text = pattern.sub(name, text)
        return text


_VARYING = (
    (re.compile(r"\b[0-9a-f]{40,64}\b"), "<digest>"),
    (re.compile(r"-[0-9a-f]{16}\b"), "-<key>"),
    (re.compile(r'(key: "\w*version"\s+value \{\s+string_value: )"[^"]*"'), r'\1"<version>"'),
    (re.compile(r"((?:kubernetes\.io/|engine-)version: ).*"), r"\1<version>"),
    (re.compile(r"(newTag: )[0-9.]+"), r"\1<version>"),
)


def file_documents(path: Path, name: str, neutral: Neutral) -> dict[str, Document]:
    """The documents of one file, by name.

    Args:
        path: the file.
        name: how it is called in the recording.
        neutral: for texts.

    Raises:
        ValueError: the file is not what its ending says.
    """
    if path.suffix == ".safetensors":
        return {name: Document(Kind.EXACT, tensor_rows(path)), f"{name} (whole)": _whole(path, Kind.WHOLE)}
    if path.suffix == ".xml":
        weights = path.with_suffix(".bin")
        return {
            name: Document(Kind.EXACT, graph_rows(path)),
            f"{name} (whole)": _whole(path, Kind.WHOLE),
            f"{name.removesuffix('.xml')}.bin (whole)": _whole(weights, Kind.WHOLE),
        }
    if path.suffix == ".bin" and path.with_suffix(".xml").is_file():
        return {}  # read with its .xml
    if path.suffix in (".py", ".md"):
        return {name: _whole(path, Kind.SHOWN)}
    if path.suffix == ".json" and path.stat().st_size <= LARGEST_TEXT:
        return {name: Document(Kind.EXACT, json_rows(_load(path), neutral))}
    return {name: Document(Kind.EXACT, text_rows(path, neutral))}


LARGEST_TEXT = 100_000
"""Bytes of a text or JSON file; a larger one (a tokenizer) is one row with its digest."""


def number_document(path: Path) -> Document | None:
    """The numbers of a JSON or CSV file; None for other files."""
    if path.suffix == ".csv":
        return Document(Kind.NUMBERS, column_rows(path))
    if path.suffix != ".json":
        return None
    numbers = [(where, value) for where, value in _leaves(_load(path)) if isinstance(value, int | float)]
    if len(numbers) <= MOST_ROWS:
        return Document(Kind.NUMBERS, dict(numbers))
    columns: dict[str, list[float]] = defaultdict(list)
    for where, value in numbers:
        columns[without_indices(where)].append(value)
    return Document(Kind.NUMBERS, {where: _summary(values) for where, values in columns.items()})


MOST_ROWS = 5000
"""Of more numbers than that (a trace) each key is one row, with the digest of its values."""


def without_indices(where: str) -> str:
    """The path of a value with every place in a list the same: `options[].rate`."""
    return re.sub(r"\[\d+\]", "[]", where)


def printed_documents(text: str, neutral: Neutral) -> dict[str, Document]:
    """A plan: the commands it shows word by word, and all numbers, in whatever words and order they come."""
    text = neutral(text)
    commands = {f"command {number}": words for number, words in enumerate(commands_in(text), 1)}
    return {
        "commands": Document(Kind.EXACT, commands),
        "numbers": Document(Kind.EXACT, {"numbers": sorted(numbers_in(text))}),
    }


def commands_in(text: str) -> Iterator[str]:
    r"""Indented command lines with options, each as one line; a line that ends with `\` goes on in the next."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("  ") and re.search(r"\s--[a-z]", line):
            yield " ".join(line.split())


def numbers_in(text: str) -> list[float]:
    """Numbers that stand alone: not those in names such as h100_sxm or int4_awq."""
    found = re.findall(r"(?<![\w.,/-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w-]|[.,]\d)", text)
    return [float(number.replace(",", "")) for number in found]


def json_rows(value: Any, neutral: Neutral) -> Rows:
    """One row per value of a JSON file; versions of libraries and of this project are left out, and so is prose."""
    return {where: _value(where, leaf, neutral) if isinstance(leaf, str) else leaf for where, leaf in _leaves(value)}


def _value(where: str, text: str, neutral: Neutral) -> str:
    if where.endswith("version"):
        return "<version>"
    return "<prose>" if _is_prose(text) else neutral(text)


def _is_prose(text: str) -> bool:
    """Whether it is a sentence for people; commands have options, templates have braces."""
    return len(text.split()) >= SHORTEST_PROSE and " --" not in text and not re.search(r"[{}<>=\n]", text)


SHORTEST_PROSE = 5
"""Words."""


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is neither object nor list; empty ones are values."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def column_rows(path: Path) -> Rows:
    """One row per column of numbers of a CSV file; an empty cell is no value."""
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    rows: Rows = {}
    for name, cells in zip(head, zip(*lines, strict=True), strict=False):
        try:
            values = [float(cell) if cell else None for cell in cells]
        except ValueError:
            continue  # words
        if any(value is not None for value in values):
            rows[name] = _summary(values)
    return rows


def _summary(values: Iterable[float | None]) -> str:
    """Count and sum to look at, and a digest of all values in their order."""
    listed = list(values)
    total = sum(value for value in listed if value is not None)
    text = " ".join("" if value is None else repr(float(value)) for value in listed)
    return f"{len(listed)} values, sum {total:.10g}, {digest(text.encode())}"


def text_rows(path: Path, neutral: Neutral) -> Rows:
    """The lines of a text file without comments; the digest of a large file and of one that is no text."""
    content = path.read_bytes()
    if len(content) > LARGEST_TEXT:
        return {"sha256": digest(content)}
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"sha256": digest(content)}
    return {"text": neutral("\n".join(_without_comments(text.splitlines())))}


def _without_comments(lines: Iterable[str]) -> Iterator[str]:
    """The lines without what is written for people: comments and messages of a script, which may be reworded."""
    for line in lines:
        if line.startswith(("#!", "#SBATCH")):
            yield line
        elif not line.lstrip().startswith("#"):
            yield re.sub(r"^(\s*echo ).*", r"\1<message>", re.sub(r"\s+# .*$", "", line))


def _whole(path: Path, kind: Kind) -> Document:
    return Document(kind, {"sha256": digest(path.read_bytes())})


def _load(path: Path) -> Any:
    return json.loads(path.read_text())
