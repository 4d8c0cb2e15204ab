"""Check that a record read from a file holds values of the types that its class declares."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

Check = Callable[[Any, str], None]
"""Raises TypeError for a value, which it names by its place in the record."""


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
