"""Read calibration texts lazily from local files."""

import csv
import itertools
import json
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipelines.checkpoint.tokenizer import RenderedChat
from pipelines.domain.errors import UserError

DEFAULT_COLUMN = "text"

_NOT_DATA = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "README.txt")
"""Files of a snapshot that describe its data."""

CHATS = ("messages", "conversations")
"""Columns that hold a chat, read where there is no column of texts."""

Message = Mapping[str, str]
Row = tuple[str, str, object]
"""Where a text stands, in which column, and what stands there."""

SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Names of roles in ShareGPT's layout."""


def plain_chat(messages: Sequence[Message]) -> str:
    """Return a chat as text, for models without a chat template."""
    return "\n\n".join(f"{each['role'].capitalize()}: {each['content']}" for each in messages)


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the ids of a text, with the tokenizer's special tokens unless a template wrote them."""
    ids: list[int] = tokenizer(text, add_special_tokens=not isinstance(text, RenderedChat), **options)["input_ids"]
    return ids


def load_texts(
    source: Path | str,
    *,
    size: int | None = None,
    split: str | None = None,
    column: str = DEFAULT_COLUMN,
    render: Callable[[Sequence[Message]], str] = plain_chat,
) -> Iterator[str]:
    """Yield up to `size` non-empty texts from a file or a folder, in a fixed order.

    A .txt file has one text per paragraph (paragraphs end at an empty line); .jsonl, .json, .csv and .parquet
    have one text or one chat per row. A chat is a list of {"role", "content"} (column `messages`) or of ShareGPT's
    {"from", "value"} (column `conversations`); these columns are read where the default column is missing. The files
    of a folder are read in the order of their paths. The folder may be a snapshot of a Hugging Face data set
    (data/train-00000-of-00002.parquet, ...), from which `split` selects the files.

    Args:
        source: file or folder.
        size: maximum number of texts; None means all.
        split: e.g. "train": only files whose name or folder starts with it.
        column: the field that contains the text.
        render: makes a text of a chat.

    Raises:
        UserError: the path does not exist, no file matches, the column is missing (the message lists those that
            exist), a row is no text, or there is no text. Raised before the first text for what is wrong there.
    """
    columns = Path(source).suffix.lower() != ".txt"
    if not columns and column != DEFAULT_COLUMN:
        raise UserError(f"{source} has no columns, so no column '{column}'.", todo="Leave the column out.")
    texts = itertools.islice(_all_texts(Path(source), split, column, render), size)
    first = next(texts, None)
    if first is None:
        inside = f" in the column '{column}'" if column != DEFAULT_COLUMN else ""  # else chats are read as well
        raise UserError(f"{source} contains no text{inside}.", todo="Give a file with text.")
    return itertools.chain([first], texts)


def _all_texts(
    source: Path, split: str | None, column: str, render: Callable[[Sequence[Message]], str]
) -> Iterator[str]:
    for path in _files(source, split):
        try:
            for where, name, value in _READERS[path.suffix.lower()](path, column):
                text = _as_text(value, name, where, render)
                if text.strip():
                    yield text
        except UnicodeDecodeError:
            _refuse_encoding(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}.", todo="Give a readable file in UTF-8.") from None


def _refuse_encoding(path: Path) -> NoReturn:
    """Name the first line that is not UTF-8."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8.",
                    todo="Save the file as UTF-8.",
                ) from None
    raise UserError(f"{path} changed while it was read.", todo="Try again.")


def _files(source: Path, split: str | None) -> list[Path]:
    types = ", ".join(_READERS)
    if source.is_file():
        if source.suffix.lower() not in _READERS:
            raise UserError(f"{source} has the unknown file type '{source.suffix}'.", allowed=f"Known: {types}.")
        return [source]
    if not source.is_dir():
        raise UserError(f"Calibration data {source} does not exist.", todo="Give a local file or folder.")
    inside = (path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.name not in _NOT_DATA)
    visible = (path for path in inside if not any(part.startswith(".") for part in path.parts))
    files = sorted(path for path in visible if path.suffix.lower() in _READERS)
    if not files:
        raise UserError(f"{source} contains no data file.", allowed=f"Known: {types}.")
    # e.g. data/train-00000.parquet or train/part.jsonl
    begins = (f"{split}-", f"{split}.", f"{split}_")
    chosen = [
        source / path
        for path in files
        if split is None or any(part == split or part.startswith(begins) for part in path.parts)
    ]
    if not chosen:
        names = ", ".join(map(str, files[:5]))
        raise UserError(f"{source} has no file of the split '{split}'.", allowed=f"It contains {names}.")
    return chosen


def _read_txt(path: Path, _column: str) -> Iterator[Row]:
    paragraph: list[str] = []
    first = 1
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                paragraph.append(line.rstrip("\n"))
            elif paragraph:
                yield f"{path}, line {first}", "", "\n".join(paragraph)
                paragraph = []
            if not paragraph:
                first = number + 1
    if paragraph:
        yield f"{path}, line {first}", "", "\n".join(paragraph)


def _read_jsonl(path: Path, column: str) -> Iterator[Row]:
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _cell(_parse(line, where, "A .jsonl file needs one JSON object per line."), column, where)


def _read_json(path: Path, column: str) -> Iterator[Row]:
    with path.open(encoding=ENCODING) as file:
        rows = _parse(file.read(), str(path), "A file with one JSON object per line is named .jsonl.")
    if not isinstance(rows, list):
        raise UserError(
            f"{path} contains a {type(rows).__name__}, not a list.", allowed="Allowed: a list of rows or strings."
        )
    for number, row in enumerate(rows, start=1):
        yield _cell(row, column, f"{path}, row {number}")


def _read_csv(path: Path, column: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # of a text; 131,072 otherwise
    with path.open(encoding=ENCODING, newline="") as file:
        rows = csv.DictReader(file)
        try:
            _check_column(column, rows.fieldnames or [], str(path))
            for row in rows:
                yield f"{path}, line {rows.line_num}", column, row[column]
        except csv.Error as error:
            raise UserError(
                f"{path}, line {rows.line_num}: not valid CSV ({error}).", todo="Write the file again."
            ) from None


def _read_parquet(path: Path, column: str) -> Iterator[Row]:
    from pyarrow import lib, parquet, types

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            lists = [field.name for field in schema if types.is_list(field.type) or types.is_large_list(field.type)]
            chosen = _column(column, schema.names, lists, str(path))
            batches = file.iter_batches(batch_size=256, columns=[chosen])
            for number, value in enumerate(itertools.chain.from_iterable(each.column(0) for each in batches), start=1):
                where = f"{path}, row {number}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    raise UserError(
                        f"{where}: the column '{chosen}' is not UTF-8.", todo="Write the file again."
                    ) from None
                yield where, chosen, text
    except (lib.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a valid parquet file: {error}.", todo="Download it again.") from None


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}

ENCODING = "utf-8-sig"
"""UTF-8; a byte order mark, as Windows and spreadsheets write, is no part of the text."""


def _parse(text: str, where: str, todo: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}).", todo=todo) from None


def _cell(row: Any, column: str, where: str) -> Row:
    if isinstance(row, str):
        return where, column, row
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: a row must be a JSON object, not {_kind(row)}.",
            todo=f"Write it as an object with the column '{column}', or leave it out.",
        )
    chosen = _column(column, row, [name for name, value in row.items() if isinstance(value, list)], where)
    return where, chosen, row[chosen]


def _column(column: str, names: Collection[str], lists: Collection[str], where: str) -> str:
    """Return the column to read: the given one, or a list of messages where the default one is missing."""
    chats = [name for name in CHATS if name in lists]
    if column == DEFAULT_COLUMN and column not in names and chats:
        return chats[0]
    _check_column(column, names, where)
    return column


def _as_text(value: object, column: str, where: str, render: Callable[[Sequence[Message]], str]) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return _rendered(value, column, where, render)
    if not isinstance(value, str):
        raise UserError(
            f"{where}: the column '{column}' contains {_kind(value)}, not text.",
            allowed="Allowed: a text, or a chat as a list of messages.",
            todo="Correct the row, or leave it out.",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"\\u{ord(value[error.start]):04x} at character {error.start + 1}"
        inside = f" in the column '{column}'" if column else ""
        raise UserError(
            f"{where}: half of a surrogate pair{inside}, {place}, is not text.",
            todo="Correct the row, or leave it out.",
        ) from None
    return value


def _rendered(chat: Sequence[Any], column: str, where: str, render: Callable[[Sequence[Message]], str]) -> str:
    messages = [_message(each, column, f"{where}, message {number}") for number, each in enumerate(chat, start=1)]
    try:
        return render(messages) if messages else ""
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _message(message: Any, column: str, where: str) -> Message:
    """Read one message in either layout; a list of parts must be of texts."""
    row = message if isinstance(message, dict) else {}
    role, content = (row.get(name, row.get(other)) for name, other in (("role", "from"), ("content", "value")))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise UserError(
            f"{where}: the column '{column}' has a message without a role or a text.",
            allowed="Allowed: {role, content} or {from, value}, both texts; tool calls and images are not read.",
            todo="Correct the row, or leave it out.",
        )
    return {"role": SHAREGPT.get(role, role), "content": _as_text(content, column, where, plain_chat)}


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _check_column(column: str, names: Collection[str], where: str) -> None:
    if column not in names:
        columns = [textwrap.shorten(str(name), 40, placeholder="...") for name in itertools.islice(names, 12)]
        raise UserError(
            f"{where}: there is no column '{column}'.",
            allowed=f"Columns: {', '.join(columns) or 'none'}.",
            todo="Name the column that contains the text.",
        )
