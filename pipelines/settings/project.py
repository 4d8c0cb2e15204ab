"""The files of a project: pipelines.yaml, and presets in the folders beside it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipelines.domain.errors import UserError, did_you_mean, shown, yaml_fault
from pipelines.settings.groups import CONF, choices, groups, project_file

GLOBAL = "# @package _global_\n"
"""Begins a choice that sets keys of other groups."""


class NotPlainError(Exception):
    """Hydra has to be asked."""


def project_content() -> dict[str, Any]:
    """Read the project's own file; empty if there is none.

    Raises:
        UserError: it is no YAML, or not a mapping of groups.
    """
    if (file := project_file()) is None:
        return {}
    content = _mapping(file)
    for group, name in _choices_of(file, content):
        if group == "experiment":
            raise UserError(
                f"'{file}': experiment={name} stands above this file, so the file cannot choose it.",
                todo="Give it on the command line, or write its keys here.",
            )
    if wrong := [key for key, value in content.items() if (CONF / str(key)).is_dir() and isinstance(value, str)]:
        raise UserError(
            f"'{file}': {wrong[0]}={content[wrong[0]]} chooses for a group.",
            todo=f"Write it under `defaults:` as `- override /{wrong[0]}: {content[wrong[0]]}`.",
        )
    return content


def own_presets(overrides: Sequence[str]) -> dict[Path, dict[str, Any]]:
    """Read the project's own presets that the overrides or its file choose.

    Returns:
        file -> its keys, with their groups.

    Raises:
        UserError: one is no YAML or no mapping, lacks its first line, or chooses what is not there.
    """
    if (file := project_file()) is None:
        return {}
    chosen = [*_choices_of(file, project_content()), *(word.lstrip("+").partition("=")[::2] for word in overrides)]
    presets = {}
    for group, name in [(group.partition("@")[0], name) for group, name in chosen]:
        preset = file.parent / group / f"{name}.yaml"
        if group in groups() and preset.is_file() and not (CONF / group / preset.name).is_file():
            content, text = _mapping(preset), preset.read_text(encoding="utf-8")
            if not text.startswith(GLOBAL) and (GLOBAL.strip() in text or group == "experiment"):
                raise UserError(
                    f"'{preset}' sets keys of any group, but does not begin so.",
                    todo=f"Make its first line: {GLOBAL.strip()}",
                )
            _choices_of(preset, content, group)
            presets[preset] = content if text.startswith(GLOBAL) else {group: content}
    return presets


def _choices_of(file: Path, content: Mapping[str, Any], own: str = "") -> list[tuple[str, str]]:
    """Return group and name of what the defaults list of a file chooses; `own` is the group of a preset.

    A choice that does not exist, or that Hydra would look for elsewhere, is refused.
    """
    chosen = list[tuple[str, str]]()
    entries = content.get("defaults") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not (isinstance(entry, dict) or own or entry == "_self_") or entries is entry:
            raise UserError(
                f"'{file}': `defaults` has {shown(entry)}, which chooses for no group.",
                todo="Write a list of `- override /quant: int4_awq`.",
            )
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else (own and f"/{own}", entry)
        place, group = str(group), str(group).removeprefix("override ").removeprefix("/")
        names = choices(group.partition("@")[0])
        if group == "hydra/launcher":
            names = ["basic", "joblib", *names]  # Hydra's own and its package's
        if name not in (*names, "_self_", "base"):
            raise UserError(
                f"'{file}': {group}={name} is not known.",
                allowed=f"Choose one of {', '.join(names)}." if names else f"Groups: {', '.join(groups())}.",
                todo=did_you_mean(str(name), names),
            )
        if own and isinstance(entry, dict) and not (place.startswith("override /") or "@" in place):
            raise UserError(
                f"'{file}': '{place}: {name}' does not choose for the group {group}.",
                todo=f"Write `- override /{group}: {name}`.",
            )
        if str(place).startswith("override ") and group in dict(chosen):  # of which Hydra takes the first
            raise UserError(f"'{file}': `defaults` chooses for {group} twice.", todo="Keep one of the lines.")
        chosen.append((group, str(name)))
    return chosen


def is_override(entry: Any) -> bool:
    """Return whether an entry of a defaults list chooses for a group that is already chosen for."""
    return isinstance(entry, dict) and len(entry) == 1 and str(next(iter(entry))).startswith("override ")


def _mapping(file: Path) -> dict[str, Any]:
    """Read a file of the project's: a mapping, empty if nothing stands in it."""
    try:
        content = load_yaml(file.read_text(encoding="utf-8"))
    except (NotPlainError, OSError, UnicodeDecodeError) as error:
        reason = error.__cause__ or error.__context__ or error
        raise UserError(f"'{file}' cannot be read: {yaml_fault(reason)}.") from None
    if not isinstance(content, dict | None):
        raise UserError(f"'{file}' is {shown(content)}, not a mapping of groups.", todo="See make init.")
    return content or {}


def load_yaml(text: str) -> Any:
    """Parse YAML as OmegaConf does, with the C parser where there is one.

    Raises:
        NotPlainError: it is not valid.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError):
        raise NotPlainError from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """OmegaConf's YAML: numbers such as 1e-5, dates as text, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a mapping that has a key twice."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for key, _ in node.value if keys.count(key.value) > 1]:
            raise NotPlainError(f"it has '{twice[-1].value}' twice, again in line {twice[-1].start_mark.line + 1}")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
