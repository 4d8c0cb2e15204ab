"""Compose overrides into a configuration: with Hydra, or as Hydra would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.settings.base import flat
from pipelines.settings.groups import project_file
from pipelines.settings.plain import compose_plain, project_content
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
        content = project_content()
        own = [f"{key}{end}" for key in flat(content) if key not in typed for end in "=. "]
        own += [f"{group} " for group in content]
        raise UserError.of([_of_the_project(fault, tuple(own)) for fault in error.faults]) from None


def _of_the_project(fault: Fault, beginnings: tuple[str, ...]) -> Fault:
    if not fault.message.startswith(beginnings):
        return fault
    return replace(fault, message=f"{project_file()}: {fault.message}")


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/, the project's file and overrides to plain dictionaries; Hydra is loaded for what is not plain.

    Raises:
        UserError: every fault of the overrides, all at once.
    """
    if (plain := compose_plain(overrides)) is not None:
        return plain
    from pipelines.settings.by_hydra import compose_config, to_raw

    return to_raw(compose_config(overrides))
