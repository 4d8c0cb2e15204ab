"""The command `config`: the configuration as YAML, or the keys of one group explained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import yaml

from pipelines.host.screen import wrapped
from pipelines.settings.compose import compose
from pipelines.settings.describe import about, keys_of
from pipelines.settings.groups import CONF, choices, groups
from pipelines.settings.root import validate


def config(overrides: Sequence[str]) -> int:
    """Print the resolved configuration, or explain a group when its name comes first."""
    if overrides and "=" not in overrides[0] and not overrides[0].startswith("~"):
        sys.stdout.write(explained(overrides[0], overrides[1:]))
        return 0
    raw = compose(overrides)
    validate(raw)
    sys.stdout.write(yaml.safe_dump(raw, sort_keys=False))
    return 0


def explained(group: str, overrides: Sequence[str]) -> str:
    """Each key of a group: type, allowed values, value with these overrides, and what it means."""
    raw = compose(overrides)
    validate(raw)
    lines = _wrap(f"{group}: {about(group)}", 2) if about(group) else [group]
    if group in groups():
        lines += _wrap(f"Choices: {', '.join(f'{group}={choice}' for choice in choices(group))}", 2)
    keys = keys_of(group)
    if not keys:
        lines += _wrap(f"It has no keys of its own; each choice sets keys of other groups (see {CONF / group}).", 2)
    for key in keys:
        lines += ["", *_wrap(f"{key.name}={_shown(_value(raw, key.name))}", 4)]
        lines += _wrap(f"    {key.kind}", 4)
        lines += _wrap(f"    {key.sentence[:1].upper()}{key.sentence[1:]}", 4)
    return "\n".join(lines) + "\n"


def _value(raw: dict[str, Any], name: str) -> Any:
    value: Any = raw
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_shown(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(each)}" for key, each in value.items()) + "}"
    return str(value)


def _wrap(text: str, indent: int) -> list[str]:
    return wrapped(text, indent).splitlines()
