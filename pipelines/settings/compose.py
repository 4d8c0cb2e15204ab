"""Compose overrides into a configuration: with Hydra, or as Hydra would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.settings.plain import compose_plain
from pipelines.settings.root import Settings, validate


def load(overrides: Sequence[str]) -> Settings:
    """Compose conf/ with a user's overrides and validate the result.

    Raises:
        UserError: every fault of the overrides or of the values, all at once.
    """
    return validate(compose(overrides))


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/ with a user's overrides to plain dictionaries; Hydra is loaded only for what is not plain.

    Raises:
        UserError: every fault of the overrides, all at once.
    """
    if (plain := compose_plain(overrides)) is not None:
        return plain
    from pipelines.settings.by_hydra import compose_config, to_raw

    return to_raw(compose_config(overrides))
