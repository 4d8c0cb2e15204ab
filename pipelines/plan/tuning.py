"""Tune the engines of a plan, and say what is set without being asked for."""

from __future__ import annotations

from pipelines.domain.model_shape import ModelShape
from pipelines.engines.description import EngineDescription
from pipelines.engines.tuning import Recommended, adjusted, advice, tuned
from pipelines.host.machine import Machine
from pipelines.predict.performance.hardware import resolved
from pipelines.settings.root import Settings


def tune(settings: Settings, engine: EngineDescription, shape: ModelShape | None, machine: Machine) -> Settings:
    """Return the settings with the advice for this engine on the GPU that is named or found."""
    return tuned(settings, engine, shape, resolved(settings.hardware, machine))


def tuning_notes(
    settings: Settings, engine: EngineDescription, shape: ModelShape | None, machine: Machine, *, baseline: bool
) -> tuple[str, ...]:
    """Return a line for each default that gives way to another setting, and for each setting that the tuning chooses.

    The latter also for the baseline, where that differs.

    Args:
        settings: the configuration.
        engine: the chosen engine.
        shape: of the model, where known.
        machine: facts of this machine.
        baseline: whether the 16-bit baseline is built as well.
    """
    changed = tuple(each.line for each in adjusted(settings, engine, shape))
    if not engine.recommends:
        return changed
    if settings.tuning.name == "plain":
        return (*changed, "tuning=plain: nothing is set for speed; tuning=recommended does")

    def advised(wanted: Settings, sizes: ModelShape | None) -> tuple[Recommended, ...]:
        return advice(wanted, engine, sizes, resolved(settings.hardware, machine))

    own = advised(settings, shape)
    lines = [f"tuning: {each.line}" for each in own]
    if baseline:
        base = advised(settings.baseline(), shape.unpruned if shape else None)
        lines += [f"tuning of the 16-bit baseline: {each.line}" for each in base if each not in own]
        lacks = [each.word for each in own if each not in base]
        lines += [f"tuning of the 16-bit baseline: without {', '.join(lacks)}"] if lacks else []
    return (*changed, *lines)
