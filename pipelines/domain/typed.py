"""Records read from JSON: built from plain values, and checked against the types that their classes declare."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from pipelines.domain.errors import UserError

Record = TypeVar("Record")
Check = Callable[[Any, str], None]
"""Raises TypeError for a value, which it names by its place in the record."""


def read_record(kind: type[Record], data: Any, source: str, *, what: str, todo: str) -> Record:
    """Return the dataclass that `dataclasses.asdict` made JSON values of.

    Args:
        kind: the dataclass; records in it are built too.
        data: values from JSON.
        source: where they are from, for messages.
        what: the record in words: "a fidelity result".
        todo: how to make another one.

    Raises:
        UserError: a field is missing, unknown, or of another type.
    """
    try:
        record: Record = _built(kind, data, "")
        check_types(record)
    except TypeError as error:
        raise UserError(f"{source} is not {what}: {error}.", todo=todo) from None
    return record


def _built(hint: Any, value: Any, place: str) -> Any:
    """Return a value with the records and tuples that a type asks for; other values are left to the check."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _record(hint, value, place)  # type: ignore[arg-type]
    if origin in (typing.Union, types.UnionType):
        others = [each for each in inner if each is not type(None)]
        return value if value is None or len(others) > 1 else _built(others[0], value, place)
    if origin is tuple and isinstance(value, tuple | list):
        return tuple(_built(inner[0], each, f"{place}[{number}]") for number, each in enumerate(value))
    if origin is not None and isinstance(value, Mapping):
        return {name: _built(inner[-1], each, f"{place}.{name}") for name, each in value.items()}
    return value


def _record(kind: type, value: Any, place: str) -> Any:
    at = f"{place}: " if place else ""
    if not isinstance(value, Mapping):
        raise TypeError(f"{at}it is not a JSON object")
    needed, hints = _names(kind)
    if needed - set(value) or set(value) - set(hints):
        missing, unknown = sorted(needed - set(value)), sorted(set(value) - set(hints))
        raise TypeError(f"{at}missing {missing}, unknown {unknown}")
    inside = f"{place}." if place else ""
    return kind(**{name: _built(hints[name], each, f"{inside}{name}") for name, each in value.items()})


@cache
def _names(kind: Any) -> tuple[frozenset[str], Mapping[str, Any]]:
    """Return the names of the fields that must be given, and the types of all."""
    given = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    return frozenset(given), typing.get_type_hints(kind)


def check_types(record: Any, place: str = "") -> None:
    """Check every field of a dataclass, and of the records in it.

    Numbers must be finite, because JSON has no others: this project never wrote a file with `1e999` or `NaN`.

    Raises:
        TypeError: names the first value of another type, by its place in the record.
    """
    for name, check in _field_checks(record.__class__):
        check(getattr(record, name), f"{place}.{name}" if place else name)


@cache
def _field_checks(record: type) -> tuple[tuple[str, Check], ...]:
    hints = typing.get_type_hints(record)
    return tuple((item.name, _check_of(hints[item.name])) for item in fields(record))


def _check_of(hint: Any) -> Check:
    """Return the check of one type: records, unions, mappings, tuples, and plain values."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _anything
    if origin is typing.Literal:
        return _literal(inner)
    if origin in (typing.Union, types.UnionType):
        return _union([_check_of(each) for each in inner], hint)
    if origin is tuple:
        return _tuple(_check_of(inner[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_check_of(inner[1]))
    if is_dataclass(hint):
        return check_types
    return _plain(hint)


def _anything(value: Any, place: str) -> None:
    """Accept every value."""


def _union(checks: list[Check], hint: Any) -> Check:
    def check(value: Any, place: str) -> None:
        for each in checks:
            try:
                return each(value, place)
            except TypeError:
                continue
        raise _wrong(value, place, str(hint))

    return check


def _literal(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any, place: str) -> None:
        if value not in allowed:
            raise _wrong(value, place, f"one of {', '.join(map(str, allowed))}")

    return check


def _tuple(inner: Check) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, tuple | list):
            raise _wrong(value, place, "a list")
        for number, each in enumerate(value):
            inner(each, f"{place}[{number}]")

    return check


def _mapping(inner: Check) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, Mapping):
            raise _wrong(value, place, "an object")
        for name, each in value.items():
            inner(each, f"{place}.{name}")

    return check


def _plain(hint: type) -> Check:
    def check(value: Any, place: str) -> None:
        allowed = (int, float) if hint is float else hint
        wrong = not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool)
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise _wrong(value, place, _NAMES.get(hint, hint.__name__))

    return check


_NAMES = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", type(None): "null"}


def _wrong(value: object, place: str, wanted: str) -> TypeError:
    shown = repr(value)
    return TypeError(f"{place}={shown if len(shown) <= 60 else shown[:57] + '...'} is not {wanted}")
