"""Describe the keys of a group of settings (type, allowed values, the sentence of its docstring), and complete them."""

import enum
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pipelines.settings.base import Group, OptionTable, at, group_in
from pipelines.settings.groups import CONF, config_folders, groups
from pipelines.settings.plain import KEY, MISSING, parse, unresolved
from pipelines.settings.project import NotPlainError
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
    kind = Settings.group(group)
    return list(_keys(kind, group)) if kind else []


def about(group: str) -> str:
    """Return the first sentence of the group's class, or an empty string."""
    kind = Settings.group(group)
    return (inspect.getdoc(kind) or "").partition("\n")[0] if kind else ""


def _keys(group: type[Group], prefix: str) -> Iterator[Key]:
    sentences = _sentences(group)
    for name, field in group.model_fields.items():
        nested = None if get_origin(field.annotation) is tuple else group_in(field.annotation)
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


def _sentences(group: type[Group]) -> dict[str, str]:
    """Read the "Attributes" sections of a class and its base classes."""
    sentences: dict[str, str] = {}
    for each in reversed(group.__mro__):
        if issubclass(each, Group):
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
    if annotation is not bool and (choices := list(_choices(annotation))):
        return f"one of {', '.join(choices)}"
    if origin is tuple:
        return f"list of {_kind(inside[0])}"
    if origin is dict:
        return f"mapping of {_kind(inside[0])} to {_kind(inside[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, Group):
        return f"mapping with the keys {', '.join(annotation.model_fields)}"
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


# Complete a command line: groups, choices and keys as Hydra completes them, values by the settings.

LISTS = ","
PLAIN_WORD = re.compile(rf"({KEY}\.?|)(=[A-Za-z0-9_-]*)?")
LAUNCHER = "hydra/launcher="
"""The only choice of a user in the group hydra."""


def complete(words: Sequence[str]) -> list[str]:
    """List candidates for the last word, which may be empty; the words before it are overrides."""
    *before, word = words
    head, comma, _ = word.rpartition(LISTS)
    if comma and "=" in head:  # quant=fp8,in: keep what is left of the comma
        key, _, value = word.partition("=")
        done, _, part = value.rpartition(LISTS)
        return [f"{key}={done},{candidate.partition('=')[2]}" for candidate in _complete(before, f"{key}={part}")]
    return _complete(before, word)


def _complete(before: Sequence[str], word: str) -> list[str]:
    candidates = plain_candidates(before, word)
    if candidates is None:
        from pipelines.settings.by_hydra import hydra_candidates

        candidates = hydra_candidates(before, word)
    names = {LAUNCHER if each == "hydra" else each for each in (*candidates, *_values(word))}
    return sorted(each for each in names if each.startswith(word) and not each.startswith("hydra."))


def plain_candidates(before: Sequence[str], word: str) -> list[str] | None:
    """List groups, choices and keys, with their present values; None if Hydra has to be asked."""
    if not PLAIN_WORD.fullmatch(word):
        return None
    key, equals, _ = word.partition("=")
    try:
        if equals and (CONF / key).is_dir():
            parse(before)
            names = (path.stem for root in config_folders() for path in (root / key).glob("*.yaml"))
            return sorted(candidate for name in names if (candidate := f"{key}={name}").startswith(word))
        config = unresolved(before)
        return _value_of(config, word) if equals else _groups(word) + _key_candidates(config, word)
    except NotPlainError:
        return None


def _groups(word: str) -> list[str]:
    return [each for each in (*(f"{name}=" for name in groups()), "hydra") if each.startswith(word)]


def _key_candidates(config: Mapping[str, Any], word: str) -> list[str]:
    """List the keys that begin with a word; those of a group end with a dot."""
    inside, dot, _ = word.rpartition(".")
    node = _node(config, inside) if dot else config
    ends = {key: "." if isinstance(value, dict | list) else "=" for key, value in node.items()}
    return [candidate for key, end in ends.items() if (candidate := f"{inside}{dot}{key}{end}").startswith(word)]


def _value_of(config: Mapping[str, Any], word: str) -> list[str]:
    """List the current value of a key, unless another value is being typed."""
    key, _, typed = word.partition("=")
    inside, _, last = key.rpartition(".")
    value = _node(config, inside).get(last, {})
    if typed:
        return []
    if isinstance(value, dict | list) or "$" in str(value) or value == MISSING:
        raise NotPlainError
    return [] if value is None else [f"{word}{str(value).lower() if isinstance(value, bool) else value}"]


def _node(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    node = at(config, key)
    if not isinstance(node, dict):
        raise NotPlainError
    return node


def _values(word: str) -> list[str]:
    """List `key=value` for each value that a key may have."""
    key, equals, _ = word.partition("=")
    group = key.partition(".")[0]
    if not equals or group == key:
        return []
    return [f"{key}={value}" for each in keys_of(group) if each.name == key for value in each.choices]
