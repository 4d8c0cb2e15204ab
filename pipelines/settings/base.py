"""Base class of all groups of settings, and the messages for values that are not valid."""

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from pipelines.domain.errors import Fault, UserError, did_you_mean, masked
from pipelines.settings.former import former

Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of one sequence or iteration."""
Ranks = Annotated[int, Field(ge=1, le=1024)]
"""GPUs, processes or threads that one engine spans."""

HERE = Path()

LARGEST = 10**9
"""Largest number that a setting takes, unless its name ends like one of these."""
LARGEST_BY_NAME = {"_bytes": 2**44, "seed": 2**32 - 1}


def largest(name: str) -> int:
    """Return the largest value of a setting with this name; 16 TiB for sizes in bytes."""
    return next((most for end, most in LARGEST_BY_NAME.items() if name.endswith(end)), LARGEST)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool | Enum):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _numbers(pair)
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)


def _in_range(name: str, value: Any) -> Any:
    if absurd := [number for number in _numbers(value) if abs(number) > LARGEST and abs(number) > largest(name)]:
        raise ValueError(f"is {absurd[0]:,g}, which is out of range: give at most {largest(name):,}")
    return value


def _texts(value: object) -> Iterator[str | Path]:
    if isinstance(value, str | Path):
        yield value
    elif isinstance(value, Mapping | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _check_text(text: str | Path) -> None:
    """Refuse an address with a password, which would be shown and stored, and a path that no file system takes."""
    if isinstance(text, Path):
        _check_path(text)
    if (hidden := masked(str(text))) != str(text):
        raise ValueError(
            f"is '{hidden}', with a password or a token in it, which would be shown and stored: leave it out. A "
            "server's key is read from OPENAI_API_KEY, the Hub's from HF_TOKEN, MLflow's name and password from "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, a container's from a Secret"
        )


def _at_home(value: Any) -> Any:
    """Return a value whose paths, also in lists and mappings, have the home folder in place of `~`."""
    if isinstance(value, Path):
        try:
            return value.expanduser()
        except RuntimeError:
            raise ValueError(f"is '{value}', and this machine knows no user '{value.parts[0][1:]}'") from None
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    return {key: _at_home(each) for key, each in value.items()} if type(value) is dict else value


LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a file's name and of a whole path, at most, on Linux."""


def _check_path(path: Path) -> None:
    """Refuse a path that is too long for a file system, or has such a name in it."""
    longest = max(path.parts, key=lambda part: len(os.fsencode(part)), default="")
    for most, text in ((LONGEST_NAME, longest), (LONGEST_PATH, str(path))):
        if (size := len(os.fsencode(text))) > most:
            raise ValueError(
                f"is '{str(path)[:60]}...', where '{text[:20]}...' has {size:,} bytes: give at most {most:,}"
            )


@cache
def _kinds(annotation: Any) -> frozenset[Any]:
    """Return the plain types that a field takes, as they are or in lists."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal or not inner:
        return frozenset([annotation]) if not inner else frozenset()
    return frozenset().union(*(_kinds(each) for each in inner if isinstance(each, Hashable)))


def _of_its_kind(annotation: Any, value: Any) -> Any:
    """Refuse true and false for numbers, which Python counts with, and read a number as text where text belongs.

    A mapping may be null, which Hydra can replace by another mapping, as it cannot an empty one.
    """
    if value is None and get_origin(annotation) is dict:
        return {}
    truths = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, bool)]
    if not truths and type(value) is not int:
        return value
    kinds = _kinds(annotation)
    if truths and kinds & {int, float} and bool not in kinds:
        raise ValueError(f"is {str(truths[0]).lower()}, and a number belongs there")
    is_text = bool(kinds & {str, Path}) and not kinds & {int, float}
    return str(value) if is_text and type(value) is int else value


NAME = re.compile(r"\w[\w.+-]*")
HOST = r"(?:\[[0-9a-fA-F:.]+\]|[^\s:/?#@\[\]]+)"
PORT = r":(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
"""A colon and 1 to 65535."""
HUB_NAME = re.compile(r"(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)?")
REVISION = re.compile(r"(?!.*\.\.)\w[\w.+-]*(/\w[\w.+-]*)*")


def _matching(pattern: re.Pattern[str], reason: str, text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"'{text}' {reason}")
    return text


_FOLDERS = "names folders: give letters, digits, '_', '-', '+' and '.', and begin with no '.'"
FileName = Annotated[str, AfterValidator(partial(_matching, NAME, _FOLDERS))]
"""A name that becomes part of the names of folders in the store."""
HubName = Annotated[str, AfterValidator(partial(_matching, HUB_NAME, "is not a name on the Hub: give org/name"))]
"""A model or data set on the Hub."""
_COMMIT = "is not a revision: give a branch, a tag or a commit"
Revision = Annotated[str, AfterValidator(partial(_matching, REVISION, _COMMIT))]
"""A branch, tag or commit on the Hub."""


@dataclass(frozen=True, eq=False)
class OptionTable:
    """Annotation of a mapping {name: value}: another program's options, of which only those given are kept.

    Null is no value. It tells Hydra which names there are, so that `group.field.name=value` works beside
    `group.field={name: value}`.

    Attributes:
        refused: options that are set in one other place -> where.
    """

    kinds: Mapping[str, Any]
    sentences: Mapping[str, str]
    refused: Mapping[str, str]

    @staticmethod
    def of(field: FieldInfo) -> "OptionTable | None":
        """Return the table of a field; None for a field that is no such mapping."""
        return next((each for each in field.metadata if isinstance(each, OptionTable)), None)

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema of the mapping."""
        kinds = {
            name: Annotated[
                kind, BeforeValidator(partial(_of_its_kind, kind)), AfterValidator(partial(_in_range, name))
            ]
            for name, kind in self.kinds.items()
        }
        kinds |= {name: Annotated[Any, AfterValidator(partial(_refuse, why))] for name, why in self.refused.items()}
        fields = {
            name: core_schema.typed_dict_field(handler.generate_schema(kind), required=False)
            for name, kind in kinds.items()
        }
        mapping = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
        return core_schema.no_info_before_validator_function(_without_nulls, mapping)


def _refuse(reason: str, value: Any) -> Any:
    raise ValueError(f"cannot be set to '{typed(value)}': {reason}")


def typed(value: Any) -> Any:
    """Return a value as it is typed: null, true and false."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def _without_nulls(values: Any) -> Any:
    return {n: value for n, value in values.items() if value is not None} if isinstance(values, dict) else values


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of nested mappings; an empty one, or one with keys that are no text, is a value."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        nested = isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value)
        result |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return result


def at(values: Any, key: str, default: Any = None) -> Any:
    """Return the value with a dotted name in nested mappings, or the default."""
    for part in key.split("."):
        values = values.get(part, default) if isinstance(values, Mapping) else default
    return values


def group_in(annotation: Any) -> "type[Group] | None":
    """Return the class of a field that is a group, or a group or null."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Group)), None)


class Group(BaseModel):
    """Base of all groups: frozen, strict about unknown keys and about types.

    A group's validator is built on first use: most groups are validated only inside `Settings`, which builds its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)
    LATER: ClassVar[tuple[str, ...]] = ()
    """Keys that came after results were stored. What is stored lacks them where they have their defaults, which never
    change, so that results, keys of artifacts and nights are comparable with those of before."""

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later keys at their defaults."""
        fields = type(self).model_fields
        usual = {key: fields[key].get_default(call_default_factory=True) for key in self.LATER}
        return {key: value for key, value in plain(self).items() if usual.get(key, ...) != getattr(self, key)}

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_plausible(cls, raw: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Refuse values that are wrong for every field; one validator, because each costs start-up time."""
        name = str(info.field_name)
        value = validate(_of_its_kind(cls.__pydantic_fields__[name].annotation, raw))
        if value is None or isinstance(value, int | float | Group):  # most, and nothing below is about them
            return _in_range(name, value)
        value = _at_home(value)
        if HERE in (texts := [*_texts(value)]) and "" in _texts(tuple(raw) if isinstance(raw, list) else raw):
            raise ValueError("has an empty path: give a file or a folder, '.' for this one, or leave the key out")
        for text in texts:
            _check_text(text)
        return _in_range(name, value)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of all keys as Hydra takes them, without those that must be given."""
        defaults: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if field.is_required():
                continue
            default: Any
            if table := OptionTable.of(field):
                default = dict.fromkeys((*table.kinds, *table.refused))
            elif isinstance(field.annotation, type) and (kind := group_in(field.annotation)):
                default = kind.defaults()
            else:
                default = _as_yaml(field.get_default(call_default_factory=True))
            defaults[name] = default
        return defaults

    def changed(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of the fields that differ from their defaults."""
        usual = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in names}
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @classmethod
    def judged(cls, values: Mapping[str, Any], key: str = "") -> Self:
        """Validate a user's values and make the group.

        Args:
            values: by field.
            key: prefix of the fields in messages, e.g. "engine.openvino."; empty for the whole configuration.

        Raises:
            UserError: every fault at once: the key, what was given, what is allowed.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError.of([_fault(cls, key, item) for item in _of_fields(cls, error)]) from None


def _as_yaml(value: Any) -> Any:
    """Return a default as plain values; an empty mapping as null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_as_yaml(each) for each in value]
    return {key: _as_yaml(each) for key, each in value.items()} or None if isinstance(value, dict) else value


class ChoosingGroup(Group):
    """Base of groups with fields that this tool chooses where they are null: for the load, or for speed.

    A user's value always wins, and a chosen one does not count as given: a derived configuration (a baseline, a draft
    model, a proposal) chooses anew.
    """

    CHOSEN: ClassVar[tuple[str, ...]] = ()
    """Fields whose null means "not given"; their defaults are those of the program they are for."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defaults of all keys; null for those that are chosen."""
        return super().defaults() | dict.fromkeys(cls.CHOSEN)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, data: object) -> object:
        """Leave out such fields where they are null, so that `given` tells a user's value from an equal default."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.CHOSEN}

    def given(self, name: str) -> bool:
        """Return whether the command line, an experiment or a feature sets a field of CHOSEN."""
        return name in self.model_fields_set

    def choosing(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with values that do not count as given."""
        return self.model_construct(self.model_fields_set - values.keys(), **{**dict(self), **values})

    def without(self, names: Iterable[str]) -> Self:
        """Return a copy in which these fields have their defaults and do not count as given."""
        return self.choosing({name: type(self).model_fields[name].default for name in names})

    def as_given(self) -> Self:
        """Return a copy in which nothing is chosen."""
        return self.without(name for name in self.CHOSEN if not self.given(name))


FEW_KEYS = 12
FOLDERS = dict.fromkeys(("store", "paths"), "The folder of the store is paths.store.")
"""Group -> the key that is usually meant where its keys do not say so."""


def keys_of(group: str, names: Sequence[str], wrong: str) -> str:
    """List the keys of a group: all, or of many the nearest three to what was given."""
    if len(names) <= FEW_KEYS:
        return f"Keys of {group}: {', '.join(names)}."
    near = sorted(names, key=lambda name: -SequenceMatcher(None, wrong, name).ratio())[:3]
    return f"Nearest keys of {group}: {', '.join(near)}; `make config` prints all of them."


OUR_WORDS = {
    "path_type": "Input should be a path",
    "dict_type": "Input should be a mapping, {{name: value}}",
    "too_short": "Input should have at least {min_length} in its list",
}
"""pydantic's type of error -> a message without Python's types."""


def _fault(group: type[Group], prefix: str, item: Mapping[str, Any]) -> Fault:
    """Turn one pydantic error into a fault with our four parts."""
    key = prefix + ".".join(str(part) for part in item["loc"])
    value, in_list = typed(item.get("input")), any(isinstance(part, int) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown(group, prefix, item["loc"])
    if item["type"] == "value_error":
        reason = str(item["ctx"]["error"])
        return Fault(f"{key} {reason}" if reason.endswith("?") else f"{key} {reason}.")
    if item["type"] in ("enum", "literal_error"):
        choices = str(item["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        hint = did_you_mean(str(value), choices.split(", "))
        return Fault(f"{key}='{value}' is not known.", f"Choose one of {choices}.", hint)
    if item["type"] == "tuple_type":
        members = value if isinstance(value, Mapping) else [] if item["input"] is None else str(value).split()
        as_list = f"[{','.join(map(str, members))}]"
        return Fault(f"{key}='{value}' is not a list.", todo=f"Write {as_list if in_list else f'{key}={as_list}'}.")
    if item["type"] == "missing":
        name = item["loc"][-1]
        return Fault(f"{key} must be given.", todo=f"Add {name}: ... to it." if in_list else f"Add {key}=...")
    if item["type"] == "model_type":
        names = _keys_at(group, item["loc"])
        what = f"{key}='{value}' is not valid: {key} is a group of settings."
        return Fault(what, FOLDERS.get(key, ""), keys_of(key, names, str(value)))
    reason = _reason(item)
    what = f"{key}='{value}' is not valid"
    if item["loc"][-1] == "[key]":
        what = f"{prefix}{'.'.join(map(str, item['loc'][:-2]))} has the key '{value}', which is not valid"
    return Fault(f"{what}: {reason[:1].lower() + reason[1:]}.")


def _unknown(group: type[Group], prefix: str, loc: tuple[Any, ...]) -> Fault:
    place, name, names = (prefix + ".".join(map(str, loc[:-1]))).rstrip("."), str(loc[-1]), _keys_at(group, loc[:-1])
    key = f"{place}.{name}".lstrip(".")
    if known := former(key):
        return known
    if "." in name:
        nested = f"{name.replace('.', ': {')}: ...{'}' * name.count('.')}"
        return Fault(f"{key} is a key with a dot in it.", todo=f"Write {nested}")
    hint = did_you_mean(name, names) or FOLDERS.get(place, "")
    others = keys_of(place, names, name) if place else "`make config` prints all groups with their keys."
    return Fault(f"{key} is not a known key.", hint, others)


def _reason(item: Mapping[str, Any]) -> str:
    known = item["type"] in OUR_WORDS
    return OUR_WORDS[item["type"]].format(**item.get("ctx", {})) if known else str(item["msg"])


def _of_fields(group: type[Group], error: ValidationError) -> list[dict[str, Any]]:
    """Return pydantic's errors, of which there is one for each kind of value where a field may have several.

    Such an error names the kind after the field, e.g. ("day", "literal['business']") and ("day", "tuple[...]", 2). If
    the value is of one kind, but has a fault inside, that is what is returned; else one error that lists the kinds.
    """
    errors: list[dict[str, Any]] = []
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    found = cast("list[dict[str, Any]]", error.errors())
    within = {each["loc"][:depth] for each in found for depth in range(len(each["loc"]))}
    for item in found:
        if item["type"] == "too_short" and item["loc"] in within:
            continue  # its members are at fault
        path, inside = _apart(group, item["loc"])
        if path == item["loc"]:
            errors.append(item)
        else:
            kinds.setdefault(path, []).append({**item, "loc": path + inside})
    for path, items in kinds.items():
        fine = [item for item in items if item["loc"] != path]
        expected = ", or ".join(_wanted(item) for item in items)
        errors += fine or [{**items[0], "loc": path, "type": "kinds", "msg": f"it should be {expected}"}]
    return errors


def _apart(group: type[Group], loc: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the path of a field, and where inside its value the fault is, without the kind between them."""
    for depth, part in enumerate(loc, 1):
        if part not in group.model_fields:
            break
        annotation = group.model_fields[part].annotation
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        if get_origin(annotation) in (Union, UnionType) and len(kinds) > 1:
            return loc[:depth], loc[depth + 1 :]
        group = group_in(annotation) or Group
    return loc, ()


def _wanted(item: Mapping[str, Any]) -> str:
    """Return the valid values: "a valid number", "greater than 0", "'auto'"."""
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"])
    reason = "Input should be a list" if item["type"] == "tuple_type" else _reason(item)
    return reason.removeprefix("Input should be ").split(", ")[0]


def _keys_at(group: type[Group], loc: tuple[Any, ...]) -> list[str]:
    """List the keys of the group, or of the mapping of options, at a path."""
    for part in (part for part in loc if isinstance(part, str)):  # the others are positions in lists
        if table := OptionTable.of(group.model_fields[part]):
            return list(table.kinds)
        group = group_in(group.model_fields[part].annotation) or group
    return list(group.model_fields)
