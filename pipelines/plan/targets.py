"""Targets: how far a command goes, and what each target includes."""

from __future__ import annotations

from typing import Literal

from eval.spec import LARGE, known_questions
from pipelines.engines.registry import EngineDescription, with_setting
from pipelines.settings.root import Settings

Target = Literal["build", "evaluate", "repository", "serve", "benchmark", "fidelity", "diagnose", "all"]
EVALUATED: tuple[Target, ...] = ("evaluate", "all")
SERVED: tuple[Target, ...] = ("repository", "serve", "benchmark", "all")
STARTED: tuple[Target, ...] = ("serve", "benchmark", "all")
MEASURED: tuple[Target, ...] = ("benchmark", "all")
COMPARED: tuple[Target, ...] = ("fidelity", "all")
"""Targets that evaluate, write a repository, run a server, measure, and compare predictions with the 16-bit model's."""


def is_elsewhere(settings: Settings, target: Target) -> bool:
    """Return whether a server running elsewhere is measured or asked, so that nothing is built."""
    urls = {"benchmark": settings.benchmark.url, "evaluate": settings.eval.url}
    return urls.get(target) is not None


def compares_server(settings: Settings, target: Target) -> bool:
    """Return whether predictions of a server running elsewhere are compared; only the 16-bit model is built then."""
    return target == "fidelity" and settings.eval.url is not None


def asks(settings: Settings, target: Target) -> bool:
    """Return whether questions are asked; a model that is not bundled may have none."""
    return target in EVALUATED and not settings.eval.is_auto


def is_unasked(settings: Settings, target: Target) -> bool:
    """Return whether a loss was to be judged, and there are no questions."""
    return target in EVALUATED and settings.eval.is_auto and has_baseline(settings, target)


def has_baseline(settings: Settings, target: Target) -> bool:
    """Return whether the 16-bit model is built, and evaluated where the target evaluates, beside the compressed one."""
    if is_elsewhere(settings, target):
        return False
    wanted = settings.fidelity.reference_path is None if target == "fidelity" else settings.eval.baseline == "build"
    return target in (*EVALUATED, *COMPARED) and wanted and settings.baseline().variant != settings.variant


def is_sequential(settings: Settings, target: Target) -> bool:
    """Return whether both models are asked in turns, and asking stops as soon as the verdict is known."""
    wanted = settings.eval
    if not asks(settings, target) or not has_baseline(settings, target):
        return False
    large = (known_questions(wanted.task, wanted.limit) or 0) >= LARGE or wanted.max_questions is not None
    return large if wanted.sequential is None else wanted.sequential


def compares(settings: Settings, target: Target) -> bool:
    """Return whether a target compares predictions, if the engine can and the 16-bit model is built."""
    return target in COMPARED or (target == "evaluate" and settings.eval.fidelity)


def has_fidelity(settings: Settings, target: Target, engine: EngineDescription) -> bool:
    """Return whether predictions are compared with the 16-bit model's; within `all`, where that is built anyway."""
    reference = has_baseline(settings, target) or settings.fidelity.reference_path is not None
    return compares(settings, target) and engine.gives_logits and reference


def has_reference(settings: Settings, target: Target) -> bool:
    """Return whether the model is also evaluated in Transformers, to compare the engine with it."""
    return asks(settings, target) and settings.eval.baseline == "hugging_face"


def farthest(settings: Settings) -> Target:
    """Return how far a configuration can go: not every engine can be served or evaluated here."""
    engine = with_setting(settings.engine.name)
    if engine is None or (engine.evaluates and engine.server):
        return "all"
    if engine.server:
        return "benchmark"
    return "evaluate" if engine.evaluates else "build"
