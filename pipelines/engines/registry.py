"""Engine names -> what makes them, imported when used."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.engines.port import Engine

ENGINES: dict[str, tuple[str, str]] = {
    "openvino": ("pipelines.engines.openvino.engine:make_engine", "make setup"),
    "tensorrt_llm": ("pipelines.engines.tensorrt_llm.engine:make_engine", "make shell, NVIDIA's Triton container"),
}
"""Name -> ("module:factory", command that installs what it needs)."""


def runtime_version(flavour: str) -> str | None:
    """Version of what would run an engine of this flavour here, as engines record it; None when it is not here."""
    try:
        if flavour == "openvino":
            version: str = import_module("pipelines.engines.openvino.build").runtime_version()
            return version
        return metadata.version("tensorrt_llm")
    except (ModuleNotFoundError, metadata.PackageNotFoundError):
        return None


def open_engine(name: str, **options: Any) -> Engine:
    """Make the engine called `name`.

    Args:
        name: a key of `ENGINES`.
        options: given to the factory; the flavour's own names.

    Raises:
        UserError: the name is unknown, or a package it needs is not installed.
    """
    if name not in ENGINES:
        raise UserError(
            f"engine='{name}' is not known.",
            allowed=f"Choose one of {', '.join(ENGINES)}.",
            todo=did_you_mean(name, ENGINES),
        )
    target, install = ENGINES[name]
    module, _, attribute = target.partition(":")
    try:
        engine: Engine = getattr(import_module(module), attribute)(**options)
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("pipelines"):
            raise
        raise UserError(
            f"engine={name} needs the Python package '{missing.name}', which is not installed here.",
            todo=f"To install: {install}.",
        ) from None
    return engine
