"""How far a command goes: its target, and which targets have what."""

from __future__ import annotations

from typing import Literal

from pipelines.engines.registry import with_setting
from pipelines.settings.root import Settings

Target = Literal["build", "evaluate", "repository", "serve", "benchmark", "all"]
EVALUATED: tuple[Target, ...] = ("evaluate", "all")
SERVED: tuple[Target, ...] = ("repository", "serve", "benchmark", "all")
STARTED: tuple[Target, ...] = ("serve", "benchmark", "all")
MEASURED: tuple[Target, ...] = ("benchmark", "all")
"""Targets with an accuracy, with a repository, with a running server, and with a measurement."""


def is_elsewhere(settings: Settings, target: Target) -> bool:
    """Whether a server that runs elsewhere is measured, so that nothing is built."""
    return target == "benchmark" and settings.benchmark.url is not None


def farthest(settings: Settings) -> Target:
    """How far a configuration can go: not every engine is served, or can be asked for its accuracy from here."""
    engine = with_setting(settings.engine.name)
    if engine is None or (engine.evaluates and engine.server):
        return "all"
    if engine.server:
        return "benchmark"
    return "evaluate" if engine.evaluates else "build"
