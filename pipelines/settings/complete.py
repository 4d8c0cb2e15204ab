"""Complete a command line: groups, choices and keys as Hydra completes them, values by the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.settings.describe import keys_of
from pipelines.settings.groups import CONF, config_folders, groups
from pipelines.settings.plain import KEY, MISSING, parse, unresolved
from pipelines.settings.project import NotPlainError

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
        return _value_of(config, word) if equals else _groups(word) + _keys(config, word)
    except NotPlainError:
        return None


def _groups(word: str) -> list[str]:
    return [each for each in (*(f"{name}=" for name in groups()), "hydra") if each.startswith(word)]


def _keys(config: Mapping[str, Any], word: str) -> list[str]:
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
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
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
