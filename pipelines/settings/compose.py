"""Compose overrides into a configuration: with Hydra, or as Hydra would."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.settings.base import flat
from pipelines.settings.groups import project_file
from pipelines.settings.plain import compose_plain
from pipelines.settings.project import own_presets, project_content
from pipelines.settings.root import Settings, validate


def load(overrides: Sequence[str]) -> Settings:
    """Compose conf/, the project's file and a user's overrides, and validate the result.

    Raises:
        UserError: every fault of the overrides or of the values, all at once.
    """
    return judged(compose(overrides), overrides)


def judged(raw: Mapping[str, Any], overrides: Sequence[str]) -> Settings:
    """Validate a composed configuration; a fault in a key of the project's file names the file.

    Raises:
        UserError: every fault at once: the key, what was given, what is allowed.
    """
    try:
        return validate(raw)
    except UserError as error:
        typed = {word.partition("=")[0].lstrip("+") for word in overrides}
        files = [*own_presets(overrides).items(), (project_file(), project_content())]
        origins = [(file, _beginnings(content, typed)) for file, content in files]
        raise UserError.of([_with_origin(fault, origins) for fault in error.faults]) from None


def _beginnings(content: Mapping[str, Any], typed: set[str]) -> tuple[str, ...]:
    """Return how faults begin that are due to a file's keys, without those that the command line sets."""
    return (
        *(f"{key}{end}" for key in flat(content) if key not in typed for end in "=. "),
        *(f"{key} " for key in content),
    )


def _with_origin(fault: Fault, origins: Sequence[tuple[Path | None, tuple[str, ...]]]) -> Fault:
    file = next((file for file, beginnings in origins if fault.message.startswith(beginnings)), None)
    return replace(fault, message=f"{file}: {fault.message}") if file else fault


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/, the project's file and overrides to plain dictionaries; Hydra is loaded for what is not plain.

    Raises:
        UserError: every fault of the overrides, all at once, or a fault in a file of the project.
    """
    own_presets(overrides)
    if (plain := compose_plain(overrides)) is not None:
        return plain
    from pipelines.settings.by_hydra import compose_config, to_raw

    return to_raw(compose_config(overrides))
