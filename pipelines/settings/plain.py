"""Compose plain overrides by Hydra's rules, without Hydra, which takes much longer to load than to do this.

Plain are `group=choice`, `group@place=choice`, and `key=value` where the value is a number, a word, a text in quotes,
true, false, null, or a list or mapping of these. All else, mistakes included, is left to Hydra: nothing is refused or
explained here, and no text means something that it does not mean to Hydra. Nothing is kept: each call reads the files
of conf/.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pipelines.settings.base import at
from pipelines.settings.features import lookahead_draft_len
from pipelines.settings.groups import CONF, config_folders
from pipelines.settings.model import BUNDLED
from pipelines.settings.project import GLOBAL, NotPlainError, is_override, load_yaml, project_content
from pipelines.settings.root import Settings

DEFAULTS = "settings"
"""In conf/config.yaml: the defaults of all keys, which the classes of the settings have."""
PROJECT = "project"
"""In conf/config.yaml: the project's own file, if there is one."""
RESOLVERS: Mapping[str, Callable[..., Any]] = {
    "bundled": lambda place: str(BUNDLED / place),
    "product": lambda *factors: math.prod(factors),
    "lookahead_draft_len": lookahead_draft_len,
}
"""What a value in conf/ can be computed with: `${product:${a.b},${c.d}}`."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEY = rf"{NAME.pattern}(?:\.{NAME.pattern})*"
OVERRIDE = re.compile(rf"({KEY}(?:@{KEY})?)=(.+)")
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)")
WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:-]*")
QUOTED = re.compile(r"""(['"])[^'"\\$]*\1""")
NOT_TEXT = ("true", "false", "null", "nan", "inf")
"""Words that are no text to Hydra, in any spelling."""
CONSTANTS = {"true": True, "false": False, "null": None}
AS_IT_IS = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./:-]*")
"""Text that needs no quotes in an override, unless it is one of `NOT_TEXT`."""
MISSING = "???"
REFERENCE = re.compile(r"\$\{([a-z_]+(?:\.[a-z_]+)+)\}")
CALL = re.compile(r"\$\{([a-z_]+):([a-z_/]+|\$\{[a-z_.]+\}(?:,\$\{[a-z_.]+\})*)\}")
"""One of `RESOLVERS` with a path, or with references to other settings."""
DEEPEST = 8
"""References that lead to references, one after the other."""


def override(key: str, text: object) -> str:
    """Return the word of a command line that sets a key to a text (a path for example), quoted if Hydra needs it."""
    value = str(text)
    if AS_IT_IS.fullmatch(value) and value.lower() not in NOT_TEXT:
        return f"{key}={value}"
    quoted = re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + end[2].replace('"', r"\""), value)
    return f'{key}="{quoted}"'


def compose_plain(overrides: Sequence[str]) -> dict[str, Any] | None:
    """Compose conf/ with overrides to dictionaries, each reference to another setting replaced by its value.

    Returns:
        what Hydra composes, in the same order; None if Hydra has to be asked.
    """
    try:
        config = unresolved(overrides)
        return {group: _resolved(value, config) for group, value in config.items()}
    except NotPlainError:
        return None


def unresolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/ with overrides, with `???` and `${...}` as they are written.

    Raises:
        NotPlainError: Hydra has to be asked.
    """
    chosen, values = parse(overrides)
    config = _Composition(chosen).compose()
    for key, value in values:
        inside, dot, name = key.rpartition(".")
        _set(at(config, inside) if dot else config, name, value)
    return config


def parse(overrides: Sequence[str]) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """Read overrides as Hydra's grammar does: the choice of each group, then keys and values in their order.

    Raises:
        NotPlainError: Hydra has to be asked.
    """
    chosen: dict[str, str] = {}
    values: list[tuple[str, Any]] = []
    for text in overrides:
        match = OVERRIDE.fullmatch(text)
        if match is None:
            raise NotPlainError
        key, value = match[1], _value(match[2])
        if not (CONF / key.partition("@")[0]).is_dir():
            values.append((key, value))
        elif value != match[2]:
            raise NotPlainError  # no word
        else:
            chosen[key] = value
    return chosen, values


def _value(text: str) -> Any:
    """Read a value as Hydra's grammar does."""
    if not text:
        raise NotPlainError
    if text[0] == "[" and text[-1] == "]":
        return [_value(each.strip(" ")) for each in _parts(text[1:-1])]
    if text[0] == "{" and text[-1] == "}":
        items = [each.partition(":") for each in _parts(text[1:-1])]
        mapping = {_key(key.strip(" ")): _value(value.strip(" ")) for key, _, value in items}
        if len(mapping) < len(items):
            raise NotPlainError
        return mapping
    return _scalar(text)


def _parts(text: str) -> list[str]:
    """Split a list or mapping at the commas that are in no list or mapping inside of it."""
    if not text:
        return []
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth or not all(part.strip(" ") for part in parts):
        raise NotPlainError
    return parts


def _key(text: str) -> Any:
    if NAME.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    if INTEGER.fullmatch(text):
        return int(text)
    raise NotPlainError


def _scalar(text: str) -> Any:
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    if text in CONSTANTS:
        return CONSTANTS[text]
    if WORD.fullmatch(text) and text.lower() not in NOT_TEXT:
        return text
    if QUOTED.fullmatch(text):
        return text[1:-1]
    raise NotPlainError


class _Composition:
    """Follow the defaults lists, from their ends as Hydra does, so that an experiment chooses for the groups above it.

    Attributes:
        choices: by group; those of the user come first, and nothing replaces them.
        unused: groups of choices that nothing was chosen for yet.
        parts: what is merged, the last first: group, or "" for the whole configuration, and content.
        folders: that have choices, conf/ first.
    """

    def __init__(self, chosen: Mapping[str, str]) -> None:
        self.choices = dict(chosen)
        self.unused = set(chosen)
        self.parts: list[tuple[str, dict[str, Any]]] = []
        self.folders = config_folders()

    def compose(self) -> dict[str, Any]:
        """Merge everything that conf/config.yaml and the choices name."""
        self._add("config", "", "")
        if self.unused:
            raise NotPlainError
        config = Settings.defaults()
        for group, content in reversed(self.parts):
            for key in reversed(group.split(".") if group else ()):
                content = {key: content}
            _merge(config, content)
        config.pop("hydra", None)
        return config

    def _add(self, name: str, folder: str, group: str) -> None:
        """Add a file, and what its defaults list names.

        Args:
            name: of the file, without its suffix.
            folder: its folder in conf/; empty for conf/ itself.
            group: whose keys it sets, unless it sets those of others.
        """
        is_global, content = (True, project_content()) if (name, folder) == (PROJECT, "") else self._read(folder, name)
        if is_global and group not in ("", folder):
            raise NotPlainError  # it would set keys of others from somewhere else
        group = "" if is_global else group
        entries = content.pop("defaults", None) or []
        if not isinstance(entries, list) or entries.count("_self_") > 1:
            raise NotPlainError
        entries = [entry for entry in entries if entry != DEFAULTS]
        if "_self_" not in entries:
            entries.append("_self_")
        for entry in entries:
            if is_override(entry):
                self._override(next(iter(entry)), next(iter(entry.values())), folder)
        for entry in reversed(entries):
            if entry == "_self_":
                self.parts.append((group, content))
            elif isinstance(entry, str) and (folder or entry == PROJECT):
                self._add(entry, folder, group)
            elif not is_override(entry):
                self._add_choice(entry, folder, is_global=is_global)

    def _override(self, key: str, value: Any, folder: str) -> None:
        """Take a choice that a defaults list makes for another group, unless there is one already."""
        group = key.removeprefix("override ")
        if folder and not group.startswith("/"):
            raise NotPlainError  # relative to the folder
        group = group.removeprefix("/")
        if not group.startswith("hydra/") and group not in self.choices:
            self.choices[group] = value
            self.unused.add(group)

    def _add_choice(self, entry: Any, folder: str, *, is_global: bool) -> None:
        """Add the choice of a group that conf/config.yaml names, or a choice sets somewhere else (`/group@place`)."""
        if not isinstance(entry, dict) or len(entry) != 1:
            raise NotPlainError
        ((key, value),) = entry.items()
        name = key.removeprefix("/")
        group, _, place = name.partition("@")
        if folder and not (key.startswith("/") and place and is_global):
            raise NotPlainError  # relative to the folder, or to the keys that it sets
        value = self.choices.get(name, value)
        self.unused.discard(name)
        if value is not None:
            self._add(value, group, place or group)

    def _read(self, folder: str, name: Any) -> tuple[bool, dict[str, Any]]:
        """Read a choice of conf/ or of the project: whether it sets keys of any group, and its content."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise NotPlainError
        places = [root / folder / f"{name}.yaml" for root in (self.folders if folder else self.folders[:1])]
        try:
            text = next(place for place in places if place.is_file()).read_text(encoding="utf-8")
        except (StopIteration, OSError):
            raise NotPlainError from None
        is_global = text.startswith(GLOBAL)
        content = load_yaml(text)
        if (not is_global and "@package" in text) or not isinstance(content, dict | None):
            raise NotPlainError
        return is_global, content or {}


def _merge(into: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    for key, value in content.items():
        there = into.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            _merge(there, value)
        elif isinstance(there, str) and "${" in there and isinstance(value, dict | list):
            raise NotPlainError  # it may be merged into the referenced value
        elif value != MISSING or key not in into:
            into[key] = deepcopy(value)  # an alias in YAML stands for a value of its own


def _set(node: Any, name: Any, value: Any) -> None:
    """Set a key that is there, or those of a mapping; no list replaces a mapping, and no mapping a list."""
    if not isinstance(node, dict) or name not in node or {type(value), type(node[name])} == {dict, list}:
        raise NotPlainError
    if isinstance(value, dict) and isinstance(node[name], dict):
        for inner, each in value.items():
            _set(node[name], inner, each)
    else:
        node[name] = value


def _resolved(value: Any, config: Mapping[str, Any], depth: int = 0) -> Any:
    """Replace each `${group.key}` and `${resolver:...}`; other expressions, and what must be given, are Hydra's."""
    if isinstance(value, dict):
        return {key: _resolved(each, config, depth) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, config, depth) for each in value]
    if not isinstance(value, str):
        return value
    if value == MISSING:
        raise NotPlainError
    if "${" not in value:
        return value
    if match := REFERENCE.fullmatch(value):
        return _referred(match[1], config, depth)
    if (match := CALL.fullmatch(value)) and match[1] in RESOLVERS:
        return _called(match[1], [_resolved(word, config, depth) for word in match[2].split(",")])
    text = REFERENCE.sub(lambda match: _as_text(_referred(match[1], config, depth)), value)
    if "$" in text or "\\" in text:
        raise NotPlainError
    return text


def _called(resolver: str, arguments: Sequence[Any]) -> Any:
    if any(isinstance(each, list) for each in arguments):
        raise NotPlainError  # a number times a list is a list to Python, and nothing to Hydra
    try:
        return RESOLVERS[resolver](*arguments)
    except (TypeError, ValueError):
        raise NotPlainError from None


def _referred(key: str, config: Mapping[str, Any], depth: int) -> Any:
    node = at(config, key, MISSING)
    if isinstance(node, Mapping) or depth == DEEPEST:
        raise NotPlainError
    return _resolved(node, config, depth + 1)


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotPlainError
    return value
