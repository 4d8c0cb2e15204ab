"""Convert files and printed text to named rows that must stay the same, without paths, versions, times."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.records.weights import Rows, digest, graph_rows, tensor_rows


@dataclass(frozen=True, slots=True)
class Neutral:
    """Replaces in a text what differs from run to run: this recording's paths, keys of the store, versions.

    Attributes:
        paths: the replacement for each path; a path that contains another one comes first.
    """

    paths: Mapping[str, str]

    def __call__(self, text: str) -> str:
        """Return the text with placeholders."""
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


def file_rows(path: Path, neutral: Neutral) -> Rows | None:
    """Return the rows of one file; None for prose, and for Python code, whose imports change as modules move.

    Raises:
        ValueError: the file is not in the format that its extension promises.
    """
    if path.suffix == ".safetensors":
        return tensor_rows(path)
    if path.suffix == ".xml":
        return graph_rows(path)
    if path.suffix in (".py", ".md") or (path.suffix == ".bin" and path.with_suffix(".xml").is_file()):
        return None  # a .bin is read together with its .xml
    if path.suffix == ".json" and path.stat().st_size <= LARGEST_TEXT:
        return json_rows(_load(path), neutral)
    return text_rows(path, neutral)


LARGEST_TEXT = 100_000
"""Maximum bytes of a text or JSON file; a larger one (a tokenizer) is recorded as one row with its digest."""


def number_rows(path: Path) -> Rows:
    """Return the numbers of a JSON or CSV file; none of other files."""
    if path.suffix == ".csv":
        return column_rows(path)
    if path.suffix != ".json":
        return {}
    numbers = [(where, value) for where, value in _leaves(_load(path)) if isinstance(value, int | float)]
    if len(numbers) <= MOST_ROWS:
        return dict(numbers)
    columns: dict[str, list[float]] = defaultdict(list)
    for where, value in numbers:
        columns[re.sub(r"\[\d+\]", "[]", where)].append(value)
    return {where: _summary(values) for where, values in columns.items()}


MOST_ROWS = 5000
"""With more numbers than this (a trace), each key is one row with the digest of its values."""


def printed_rows(text: str, neutral: Neutral) -> dict[str, Rows]:
    """Return a plan's commands word for word, and all its numbers regardless of their order and wording."""
    text = neutral(text)
    commands = {f"command {number}": words for number, words in enumerate(commands_in(text), 1)}
    return {"commands": commands, "numbers": {"numbers": sorted(numbers_in(text))}}


def commands_in(text: str) -> Iterator[str]:
    r"""Yield indented command lines with options, each as one line; a line that ends with `\` continues on the next."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("  ") and re.search(r"\s--[a-z]", line):
            yield " ".join(line.split())


def numbers_in(text: str) -> list[float]:
    """Return the numbers that stand alone, not those inside names such as h100_sxm or int4_awq."""
    numbers = re.findall(r"(?<![\w.,/-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w-]|[.,]\d)", text)
    return [float(number.replace(",", "")) for number in numbers]


def json_rows(value: Any, neutral: Neutral) -> Rows:
    """Return one row per value of a JSON file, with placeholders for prose and versions (libraries, this project)."""
    return {where: _value(where, leaf, neutral) if isinstance(leaf, str) else leaf for where, leaf in _leaves(value)}


def _value(where: str, text: str, neutral: Neutral) -> str:
    if where.endswith("version"):
        return "<version>"
    return "<prose>" if _is_prose(text) else neutral(text)


def _is_prose(text: str) -> bool:
    """Return whether a text is a sentence for people; commands have options, and templates have braces."""
    return len(text.split()) >= SHORTEST_PROSE and " --" not in text and not re.search(r"[{}<>=\n]", text)


SHORTEST_PROSE = 5
"""Minimum number of words of a text that counts as prose."""


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything that is neither an object nor a list; empty ones count as values."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def column_rows(path: Path) -> Rows:
    """Return one row per numeric column of a CSV file; an empty cell is a missing value."""
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    rows: Rows = {}
    for name, cells in zip(head, zip(*lines, strict=True), strict=False):
        try:
            values = [float(cell) if cell else None for cell in cells]
        except ValueError:
            continue  # a column of words
        if any(value is not None for value in values):
            rows[name] = _summary(values)
    return rows


def _summary(values: Iterable[float | None]) -> str:
    """Return count and sum for people to read, and a digest of all values in order."""
    listed = list(values)
    total = sum(value for value in listed if value is not None)
    text = " ".join("" if value is None else repr(float(value)) for value in listed)
    return f"{len(listed)} values, sum {total:.10g}, {digest(text.encode())}"


def text_rows(path: Path, neutral: Neutral) -> Rows:
    """Return the lines of a text file without comments, or the digest of a large or binary file."""
    content = path.read_bytes()
    if len(content) > LARGEST_TEXT:
        return {"sha256": digest(content)}
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return {"sha256": digest(content)}
    return {"text": neutral("\n".join(_without_comments(text.splitlines())))}


def _without_comments(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without a script's comments and messages, which may be reworded."""
    for line in lines:
        if line.startswith(("#!", "#SBATCH")):
            yield line
        elif not line.lstrip().startswith("#"):
            yield re.sub(r"^(\s*echo ).*", r"\1<message>", re.sub(r"\s+# .*$", "", line))


def _load(path: Path) -> Any:
    return json.loads(path.read_text())
