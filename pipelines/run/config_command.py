"""The commands `config`, which prints the configuration or explains a group, and `init`, which writes a project's."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from pipelines.domain.errors import Fault, UserError, refuse
from pipelines.host.files import disk_faults, write_text
from pipelines.host.screen import say, wrapped_lines
from pipelines.settings.base import at, flat, typed
from pipelines.settings.compose import compose, judged, load
from pipelines.settings.describe import about, keys_of
from pipelines.settings.groups import (
    CHOSEN_FILE,
    CONF,
    NO_FILE,
    PROJECT_FILE,
    choices,
    groups,
    project_file,
    using_project_file,
)
from pipelines.settings.plain import parse
from pipelines.settings.project import NotPlainError


def config(overrides: Sequence[str]) -> int:
    """Print the resolved configuration, or explain a group when its name comes first."""
    if overrides and "=" not in overrides[0] and not overrides[0].startswith("~"):
        sys.stdout.write(explained(overrides[0], overrides[1:]))
        return 0
    raw = compose(overrides)
    judged(raw, overrides)
    sys.stdout.write(_with_sources(raw))
    return 0


def _with_sources(raw: Mapping[str, Any]) -> str:
    """Write the configuration as YAML; a value that conf/ does not decide has a comment with what does."""
    values, project = flat(raw), flat(compose([]))
    with using_project_file(NO_FILE):
        ours = flat(compose([]))
    text = yaml.safe_dump(raw, sort_keys=False)
    lines = text.splitlines()

    def walk(node: Any, prefix: str) -> None:
        for key, inner in node.value:
            name = f"{prefix}{key.value}"
            if name not in values:
                walk(inner, f"{name}.")
            elif values[name] != project.get(name):
                lines[key.start_mark.line] += "  # command line"
            elif values[name] != ours.get(name):
                lines[key.start_mark.line] += f"  # {project_file()}"

    walk(yaml.compose(text), "")
    return "\n".join(lines) + "\n"


COMMENTED = """\
# The settings of a project, above those of the program and below the command line. They apply in this folder and in
# those below it; config=FILE names another file, config=none uses none. `trtllm-pipelines config` shows what applies.
# Presets of your own stand in folders beside this file: model/ours.yaml is model=ours, experiment/chat.yaml is
# experiment=chat. `trtllm-pipelines config GROUP` explains the keys of a group.
"""


EXAMPLE = """\
# defaults:
#   - override /quant: int4_awq
# build:
#   max_batch_size: 64
"""


def init(overrides: Sequence[str]) -> int:
    """Write a project's file with comments, and with the settings given."""
    file = Path(os.environ.get(CHOSEN_FILE) or PROJECT_FILE)
    if str(file) == NO_FILE:
        raise UserError(f"config={NO_FILE} uses no file, so none can have that name.", todo="Name another.")
    if file.exists():
        raise UserError(f"'{file}' already exists.", todo="Edit it, or name another: make init config=FILE")
    with using_project_file(NO_FILE):
        load(overrides)
    refuse(
        Fault(f"init cannot write '{word}' into the file.", todo="Leave it out, and add it to the file by hand.")
        for word in overrides
        if not _is_plain(word)
    )
    chosen, values = parse(overrides)
    content: dict[str, Any] = {"defaults": [{f"override /{group}": name} for group, name in chosen.items()]}
    if not chosen:
        content.clear()
    for key, value in values:
        *groups_above, last = key.split(".")
        reduce(lambda node, group: node.setdefault(group, {}), groups_above, content)[last] = value
    with disk_faults(f"'{file}' cannot be written", "Name another: make init config=FILE"):
        write_text(file, COMMENTED + (yaml.safe_dump(content, sort_keys=False) if content else EXAMPLE))
    say(f"Written: {file}")
    return 0


def _is_plain(word: str) -> bool:
    try:
        return bool(parse([word]))
    except NotPlainError:
        return False


def explained(group: str, overrides: Sequence[str]) -> str:
    """Each key of a group: type, allowed values, value with these overrides, and what it means."""
    raw = compose(overrides)
    judged(raw, overrides)
    lines = wrapped_lines(f"{group}: {about(group)}") if about(group) else [group]
    if group in groups():
        lines += wrapped_lines(f"Choices: {', '.join(f'{group}={choice}' for choice in choices(group))}")
    keys = keys_of(group)
    if not keys:
        lines += wrapped_lines(
            f"It has no keys of its own; each choice sets keys of other groups (see {CONF / group})."
        )
    numbers = set[str]()
    for key in keys:
        whole = key.name.rpartition(".")[0]
        if whole not in numbers and not isinstance(value := at(raw, whole), dict):
            numbers.add(whole)
            lines += ["", *wrapped_lines(f"{whole}={_shown(value)}", 4)]
            lines += wrapped_lines("    a number, or in its place a mapping with the keys below", 4)
        lines += ["", *wrapped_lines(f"{key.name}={_shown(at(raw, key.name))}", 4)]
        lines += wrapped_lines(f"    {key.kind}", 4)
        lines += wrapped_lines(f"    {key.sentence[:1].upper()}{key.sentence[1:]}", 4)
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(_shown(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(each)}" for key, each in value.items()) + "}"
    return str(typed(value))
