"""Apply the vendor's advice for speed to every unset option.

The advice of an engine is a function of the settings, the model and the GPU, so that it is worked out anew for every
engine of a plan: the one that is asked for, its 16-bit baseline, a draft model. Plan, sizing and simulator tune here,
and so speak of the same engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.domain.formats import rules_out_reuse
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import EngineDescription, load_function
from pipelines.settings.base import ChoosingGroup
from pipelines.settings.root import Settings


@dataclass(frozen=True, slots=True)
class TunedCase:
    """The inputs that advice depends on.

    Attributes:
        settings: the configuration, without anything that was chosen before.
        gpu: the GPU, as far as it is known.
    """

    settings: Settings
    shape: ModelShape | None
    gpu: HardwareSettings


@dataclass(frozen=True, slots=True)
class Recommended:
    """One setting that is chosen: for speed, or because its default gives way to another setting.

    Attributes:
        group: of the settings, e.g. "build".
        name: of the setting in its group.
        value: in place of the default.
        source: of the advice; empty where another setting is the reason.
    """

    group: str
    name: str
    value: str | float
    reason: str
    source: str = ""

    def given(self, settings: Settings) -> bool:
        """Return whether the user gives the setting, so that the advice has no say."""
        group: ChoosingGroup = getattr(settings, self.group)
        return group.given(self.name)

    @property
    def word(self) -> str:
        """The setting as it is typed: "build.gemm_plugin=auto"."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.group}.{self.name}={value}"

    @property
    def line(self) -> str:
        """The setting, its reason and the source."""
        return f"{self.word}: {self.reason}" + (f" ({self.source})" if self.source else "")


def advice(
    settings: Settings, engine: EngineDescription, shape: ModelShape | None, gpu: HardwareSettings
) -> tuple[Recommended, ...]:
    """List the options set for speed: none with tuning=plain, for an engine without advice, or with your own value."""
    if settings.tuning.name == "plain" or not engine.recommends:
        return ()
    recommended: tuple[Recommended, ...] = load_function(engine.recommends)(TunedCase(_as_given(settings), shape, gpu))
    return tuple(each for each in recommended if not each.given(settings))


def adjusted(settings: Settings, engine: EngineDescription, shape: ModelShape | None) -> tuple[Recommended, ...]:
    """List the defaults that conflicts with the other settings, whatever the tuning is; nothing that is given.

    Args:
        settings: the configuration, with all advice.
        engine: that it is built for; an engine that is not built has limits and a KV cache of its own.
        shape: of the model, where known.
    """
    build, kv_cache = settings.build, settings.kv_cache
    adjustments: list[Recommended] = []
    if not engine.writes_engine:
        return ()
    longest = build.max_seq_len or (shape.max_position_embeddings if shape else None)
    default = type(build).model_fields["max_input_len"].default
    if longest is not None and longest < default and not build.given("max_input_len"):
        why = f"build.max_seq_len={longest}" if build.max_seq_len else f"the model's longest sequence of {longest}"
        adjustments.append(Recommended("build", "max_input_len", longest, f"no prompt is longer than {why}"))
    if rules_out_reuse(kv_cache.dtype, settings.quant.qformat) and not kv_cache.given("enable_block_reuse"):
        reason = f"TensorRT-LLM does not reuse blocks with kv_cache={kv_cache.dtype} and quant={settings.quant.qformat}"
        adjustments.append(Recommended("kv_cache", "enable_block_reuse", False, reason))
    return tuple(adjustments)


def tuned(settings: Settings, engine: EngineDescription, shape: ModelShape | None, gpu: HardwareSettings) -> Settings:
    """Return the settings with all advice and what gives way to it, none of which counts as given.

    See `advice` for the arguments.
    """
    settings = _chosen(_as_given(settings), advice(settings, engine, shape, gpu))
    return _chosen(settings, adjusted(settings, engine, shape))


def _chosen(settings: Settings, values: Sequence[Recommended]) -> Settings:
    """Return the settings with values that do not count as given."""
    for each in values:
        group: ChoosingGroup = getattr(settings, each.group)
        settings = settings.model_copy(update={each.group: group.choosing({each.name: each.value})})
    return settings


def _as_given(settings: Settings) -> Settings:
    groups = {name: group.as_given() for name, group in settings if isinstance(group, ChoosingGroup)}
    return settings.model_copy(update=groups)
