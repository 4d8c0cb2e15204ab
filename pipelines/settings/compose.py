"""Compose overrides into a configuration: with Hydra, or as Hydra would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.domain.errors import Fault, UserError
from pipelines.settings.diagnose import KEY, diagnose, unexplained
from pipelines.settings.groups import hydra_on_conf
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
    plain = compose_plain(overrides)
    return to_raw(compose_config(overrides)) if plain is None else plain


def compose_config(overrides: Sequence[str]) -> Any:
    """Compose conf/ with a user's overrides, with Hydra.

    Args:
        overrides: Hydra overrides, e.g. ["quant=fp8", "build.max_batch_size=64"].

    Returns:
        an OmegaConf DictConfig without the `hydra` node.

    Raises:
        UserError: unknown groups, choices or keys, all at once.
    """
    for text in overrides:
        if text.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher")):
            raise UserError(
                f"{text} starts the cells of a sweep; this command has one and runs it here.",
                todo="Use it with `make sweep` or `make compare`.",
            )
    if not all(KEY.match(text) for text in overrides):
        raise UserError.of(diagnose(overrides))
    from hydra import compose as compose_by_hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with hydra_on_conf():
            return compose_by_hydra("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError):  # ValueError: a number for a name
        raise UserError.of(diagnose(overrides) or [unexplained(overrides)]) from None


def to_raw(config: Any) -> dict[str, Any]:
    """Resolve a configuration to plain dictionaries.

    Raises:
        UserError: a required value is missing, or an interpolation fails.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise UserError.of([Fault(f"{key} must be given.", todo=f"Add {key}=...") for key in missing])
        raw: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        return raw
    except OmegaConfBaseException as error:
        raise _unresolved(config, str(error.full_key or "")) from None


def _unresolved(config: Any, key: str) -> UserError:
    """Make the error for a value with `${...}` that cannot be resolved."""
    from omegaconf import OmegaConf

    value: Any = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return UserError(
        f"{key}='{value}' cannot be resolved.",
        allowed="${group.key} takes the value of another setting, ${oc.env:NAME} that of an environment variable.",
        todo="Refer to one that exists, or give the value itself.",
    )
