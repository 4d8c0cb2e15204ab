"""Records read from JSON, checked by pydantic against the types that their classes declare."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pipelines.domain.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

Record = TypeVar("Record")


def read_record(kind: type[Record], data: Any, source: str, *, what: str, todo: str) -> Record:
    """Return the dataclass that `dataclasses.asdict` made JSON values of.

    Numbers must be finite, because JSON has no others: this project never wrote a file with `1e999` or `NaN`.

    Args:
        kind: the dataclass; records in it are built too.
        data: values from JSON.
        source: where they are from, for messages.
        what: the record in words: "a fidelity result".
        todo: how to make another one.

    Raises:
        UserError: a field is missing, unknown, or of another type.
    """
    from pydantic import ValidationError

    try:
        record: Record = _adapter(cast(Any, kind)).validate_json(json.dumps([data]))[0]
    except ValidationError as error:
        raise UserError(f"{source} is not {what}: {_reason(error.errors())}.", todo=todo) from None
    return record


@cache
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    # of a list, because pydantic takes a configuration for no dataclass that has none itself
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(list[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _reason(errors: list[ErrorDetails]) -> str:
    """Return the first error in words; names that are missing or unknown in one record are one error."""
    first, *place = errors[0], *errors[0]["loc"][1:]
    if first["type"] == "json_invalid":  # half a surrogate pair, or brackets without end
        return str(first["msg"])
    if first["type"] in ("missing", "unexpected_keyword_argument"):
        beside = [each for each in errors if each["loc"][:-1] == first["loc"][:-1]]
        names = {kind: sorted(each["loc"][-1] for each in beside if each["type"] == kind) for kind in _NAMES_WRONG}
        return _at(place[:-1]) + ", ".join(f"{word} {names[kind]}" for kind, word in _NAMES_WRONG.items())
    if first["type"] == "dataclass_type":
        return f"{_at(place)}it is not a JSON object"
    if place[-1] in ("int", "str"):  # the first type of a union
        place.pop()
    shown = repr(first["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{_path(place)}={shown} is not {_WANTED.get(first['type']) or first['ctx']['expected']}"


_NAMES_WRONG = {"missing": "missing", "unexpected_keyword_argument": "unknown"}
_WANTED = {
    "bool_type": "true or false", "dict_type": "an object", "finite_number": "a finite number",
    "float_type": "a finite number", "int_type": "a whole number", "none_required": "null", "string_type": "text",
    "tuple_type": "a list",
}  # fmt: skip


def _at(place: list[Any]) -> str:
    return f"{_path(place)}: " if place else ""


def _path(place: list[Any]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).removeprefix(".")
