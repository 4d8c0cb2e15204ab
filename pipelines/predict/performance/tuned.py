"""Tune a configuration for the GPU that is sized or simulated, as the plan tunes it."""

from __future__ import annotations

from pipelines.domain.formats import UNIFORM, KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.config import HardwareSettings
from pipelines.engines.registry import TENSORRT_LLM, with_setting
from pipelines.engines.tuning import tuned
from pipelines.settings.root import Settings


def tuned_for(settings: Settings, model: ModelShape, hardware: HardwareSettings) -> Settings:
    """Return the settings with the advice for their engine; engine=auto is TensorRT-LLM on a GPU."""
    return tuned(settings, with_setting(settings.engine.name) or TENSORRT_LLM, model, hardware)


def tuned_kv_formats(settings: Settings, model: ModelShape, hardware: HardwareSettings) -> dict[QFormat, KvFormat]:
    """Return the KV-cache format that an engine of each weight format has."""
    found = {}
    for qformat in UNIFORM:
        quant = settings.quant.model_copy(update={"qformat": qformat})
        found[qformat] = tuned_for(settings.model_copy(update={"quant": quant}), model, hardware).kv_cache.dtype
    return found
