"""Set what an engine's vendor advises for speed, wherever nobody gives another value.

The advice of an engine is a function of the settings, the model and the GPU, so that it is worked out anew for every
engine of a plan: the one that is asked for, its 16-bit baseline, a draft model. Plan, sizing and simulator tune here,
and so speak of the same engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.model_shape import ModelShape
from pipelines.engines.description import EngineDescription, load_function
from pipelines.settings.base import ChoosingGroup
from pipelines.settings.engine import HardwareSettings
from pipelines.settings.root import Settings


@dataclass(frozen=True, slots=True)
class TunedCase:
    """What advice depends on.

    Attributes:
        settings: the configuration, without anything that was chosen before.
        shape: of the model, where known.
        gpu: the GPU, as far as it is known.
    """

    settings: Settings
    shape: ModelShape | None
    gpu: HardwareSettings


@dataclass(frozen=True, slots=True)
class Recommended:
    """One setting for speed.

    Attributes:
        group: of the settings, e.g. "build".
        name: of the setting in its group.
        value: to be set.
        reason: its effect, with a published measurement where there is one.
        source: public document that advises it.
    """

    group: str
    name: str
    value: str | float
    reason: str
    source: str

    def given(self, settings: Settings) -> bool:
        """Return whether the user gives the setting, so that the advice has no say."""
        group: ChoosingGroup = getattr(settings, self.group)
        return group.given(self.name)

    @property
    def word(self) -> str:
        """The setting as it is typed: "build.gemm_plugin=auto"."""
        return f"{self.group}.{self.name}={self.value}"

    @property
    def line(self) -> str:
        """The setting, its reason and the source."""
        return f"{self.word}: {self.reason} ({self.source})"


def advice(
    settings: Settings, engine: EngineDescription, shape: ModelShape | None, gpu: HardwareSettings
) -> tuple[Recommended, ...]:
    """List what is set for speed: nothing with tuning=plain, for an engine without advice, or where a value is given.

    Args:
        settings: the configuration.
        engine: that it is built for.
        shape: of the model, where known.
        gpu: the GPU, as far as it is known.
    """
    if settings.tuning.name == "plain" or not engine.recommends:
        return ()
    found: tuple[Recommended, ...] = load_function(engine.recommends)(TunedCase(_as_given(settings), shape, gpu))
    return tuple(each for each in found if not each.given(settings))


def tuned(settings: Settings, engine: EngineDescription, shape: ModelShape | None, gpu: HardwareSettings) -> Settings:
    """Return the settings with all advice, which does not count as given; see `advice` for the arguments."""
    found, settings = advice(settings, engine, shape, gpu), _as_given(settings)
    for each in found:
        group: ChoosingGroup = getattr(settings, each.group)
        settings = settings.model_copy(update={each.group: group.choosing({each.name: each.value})})
    return settings


def _as_given(settings: Settings) -> Settings:
    """Return the settings without anything that was chosen before."""
    groups = {name: group.as_given() for name, group in settings if isinstance(group, ChoosingGroup)}
    return settings.model_copy(update=groups)
