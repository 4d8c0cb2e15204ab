"""Describe the keys of a group of settings: type, allowed values, and the sentence from the class's docstring."""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pipelines.settings.base import OptionTable
from pipelines.settings.root import Settings

BASIC = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", Any: "any value"}
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        name: as on the command line: build.max_batch_size.
        kind: its type and allowed values, in words.
        choices: the values, if there is a fixed list.
        sentence: its meaning; empty if the class has no sentence about it.
    """

    name: str
    kind: str
    choices: tuple[str, ...]
    sentence: str


def keys_of(group: str) -> list[Key]:
    """List all keys of a group, including those of nested groups; empty for a group that only sets keys of others."""
    field = Settings.model_fields.get(group)
    return list(_keys(_model(field.annotation), group)) if field else []


def about(group: str) -> str:
    """Return the first sentence of the group's class, or an empty string."""
    field = Settings.model_fields.get(group)
    return (inspect.getdoc(_model(field.annotation)) or "").splitlines()[0] if field else ""


def _model(annotation: Any) -> type[BaseModel]:
    group: type[BaseModel] = annotation
    return group


def _keys(group: type[BaseModel], prefix: str) -> Iterator[Key]:
    sentences = _sentences(group)
    for name, field in group.model_fields.items():
        nested = _nested(field.annotation)
        if table := OptionTable.of(field):
            for option, kind in table.kinds.items():
                key = f"{prefix}.{name}.{option}"
                yield Key(key, f"{_kind(kind)} or null", tuple(_choices(kind)), table.sentences[option])
        elif nested is None:
            kind, choices = _kind(field.annotation, field.metadata), tuple(_choices(field.annotation))
            yield Key(f"{prefix}.{name}", kind, choices, sentences.get(name, ""))
        elif type(None) in get_args(field.annotation):
            inner = ", ".join(nested.model_fields)
            yield Key(f"{prefix}.{name}", f"null, or a mapping with the keys {inner}", (), sentences.get(name, ""))
        else:
            yield from _keys(nested, f"{prefix}.{name}")


def _nested(annotation: Any) -> type[BaseModel] | None:
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    groups = [option for option in options if inspect.isclass(option) and issubclass(option, BaseModel)]
    return groups[0] if groups else None


def _sentences(group: type[BaseModel]) -> dict[str, str]:
    """Read the "Attributes" sections of a class and its base classes."""
    sentences: dict[str, str] = {}
    for each in reversed(group.__mro__):
        if each is not BaseModel and issubclass(each, BaseModel):
            sentences |= _attributes(inspect.cleandoc(each.__doc__ or ""))
    return sentences


def _attributes(docstring: str) -> dict[str, str]:
    sentences: dict[str, str] = {}
    name = ""
    for line in docstring.partition("\nAttributes:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if match := re.match(r" {4}(\w+): (.*)", line):
            name, text = match.groups()
            sentences[name] = text
        elif name and line.strip():
            sentences[name] += f" {line.strip()}"
    return sentences


def _kind(annotation: Any, metadata: Any = ()) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0], [*inside[1:], *metadata])
    if origin in (Union, types.UnionType):
        some = [_kind(each, metadata) for each in inside if each is not type(None)]
        return " or ".join([*some, "null"] if type(None) in inside else some)
    if origin is Literal:
        return f"one of {', '.join(str(each) for each in inside)}"
    if origin is tuple:
        return f"list of {_kind(inside[0])}"
    if origin is dict:
        return f"mapping of {_kind(inside[0])} to {_kind(inside[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"mapping with the keys {', '.join(annotation.model_fields)}"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return f"one of {', '.join(each.value for each in annotation)}"
    return BASIC[annotation] + _bounds(metadata)


def _choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(each) for each in get_args(annotation))
    elif get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _choices(each)
    elif inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        yield from (str(each.value) for each in annotation)


def _bounds(metadata: Any) -> str:
    limits, pattern = [], ""
    for each in metadata:
        nested = getattr(each, "metadata", None)  # a pydantic Field inside Annotated
        for item in nested if nested is not None else [each]:
            limits += [f"{sign} {_number(getattr(item, name))}" for name, sign in BOUNDS.items() if hasattr(item, name)]
            pattern = getattr(item, "pattern", None) or pattern
    return (" " + " and ".join(limits) if limits else "") + (f" that matches {pattern}" if pattern else "")


def _number(value: float) -> str:
    """Write a limit as it is typed: whole numbers with all their digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"
