"""Overrides -> configuration, through Hydra; and, when Hydra refuses, every fault with the nearest valid word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.domain.errors import Fault, UserError, did_you_mean
from pipelines.settings.features import lookahead_draft_len
from pipelines.settings.model import BUNDLED
from pipelines.settings.paths import PROJECT_ROOT
from pipelines.settings.root import Settings, validate

CONF = PROJECT_ROOT / "conf"


def load(overrides: Sequence[str]) -> Settings:
    """Compose conf/ with a user's overrides and validate the result.

    Raises:
        UserError: every fault of the overrides or of the values, all at once.
    """
    return validate(to_raw(compose_config(overrides)))


def compose_config(overrides: Sequence[str]) -> Any:
    """Compose conf/ with a user's overrides.

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
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("bundled", lambda place: str(BUNDLED / place), replace=True)
    OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
    OmegaConf.register_new_resolver("lookahead_draft_len", lookahead_draft_len, replace=True)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError.of(diagnose(overrides) or [Fault(_first_line(error))]) from None


def to_raw(config: Any) -> dict[str, Any]:
    """Plain resolved dictionaries.

    Raises:
        UserError: a value that must be given is missing, or an interpolation fails.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise UserError.of([Fault(f"{key} must be given.", todo=f"Add {key}=...") for key in missing])
        raw: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        return raw
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None


def diagnose(overrides: Sequence[str]) -> list[Fault]:
    """Find what is wrong with each override by itself."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, faults, good, keys = OverridesParser.create(), [], [], []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            faults.append(Fault(f"'{text}' is no override: {_first_line(error)}.", "Write key=value."))
            continue
        name = override.get_key_element().lstrip("+~").split("@")[0]
        if name.startswith("hydra"):
            continue
        if (CONF / name).is_dir():
            values = _values(override)
            wrong = [fault for value in values if (fault := _choice_fault(name, value))]
            faults += wrong
            good += [f"{name}={values[0]}"] if values and not wrong else []
        elif not override.is_add():
            keys.append(name)
    known = _known_keys(good)
    return faults + [fault for key in keys if (fault := _key_fault(key, known))]


def _values(override: Any) -> list[str]:
    """What an override chooses: one word, those of a list, or none for a pattern."""
    from hydra.core.override_parser.types import ChoiceSweep

    if isinstance(override.value(), ChoiceSweep):
        return list(override.sweep_string_iterator())
    return [] if override.is_sweep_override() else [str(override.value())]


def choices(group: str) -> list[str]:
    """The options of a group, e.g. quant -> fp8, int4_awq, ..."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "base")


def groups() -> list[str]:
    """All groups of conf/ that make a deployment."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def _choice_fault(group: str, given: str) -> Fault | None:
    if given in choices(group) or (given in ("None", "null") and group == "experiment"):
        return None
    return Fault(
        f"{group}={given} is not known.",
        f"Choose one of {', '.join(choices(group))}.",
        did_you_mean(given, choices(group)),
    )


def _known_keys(overrides: Sequence[str]) -> set[str]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides=list(overrides))
    except HydraException:
        return set()
    found: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            found.add(prefix + str(key))
            child = OmegaConf.select(node, str(key), throw_on_missing=False)
            if OmegaConf.is_dict(child):
                walk(child, f"{prefix}{key}.")

    walk(config, "")
    return found


RENAMED = {"sizing.calibration": "sizing.fit"}
"""Former names of settings whose nearest word would be another thing: `calibration` is ModelOpt's text."""


def _key_fault(key: str, known: set[str]) -> Fault | None:
    if not known or key in known:
        return None
    if key in RENAMED:
        return Fault(f"'{key}' is not a known setting.", f"It is now '{RENAMED[key]}'.")
    near = did_you_mean(key, known | set(groups()))
    if not near:  # the right leaf in another group: max_batch_size -> build.max_batch_size
        near = did_you_mean(key.split(".")[-1], {k.split(".")[-1]: k for k in known})
        near = near and f"Did you mean '{next(k for k in sorted(known) if k.split('.')[-1] in near)}'?"
    return Fault(f"'{key}' is not a known setting.", near, "`make config` prints all of them.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def relative_to_cwd(path: Path) -> str:
    """A path as short as it can be shown."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
