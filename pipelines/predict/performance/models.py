"""The model that the settings name, as performance model and memory model know it, without downloading it."""

from __future__ import annotations

from pipelines.domain.errors import UserError
from pipelines.predict.performance.specs import ModelSpec, model_named
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config


def known_model(settings: Settings) -> ModelSpec:
    """Sizes of a model, dense or a mixture of experts: `sizing.model`, else the folder's config.json, else conf/model.

    Raises:
        UserError: they are not known.
    """
    if settings.sizing.model is not None:
        return model_named(settings.sizing.model)
    model = settings.model
    if model.folder is not None:
        return ModelSpec.from_config(model_config(model.folder), model.label)
    if model.shape is not None:
        return ModelSpec.from_shape(model.shape.to_shape(), model.label)
    raise UserError(
        f"The sizes of {model.label} are not known before it is downloaded.",
        todo="Name a model of pipelines/predict/performance/models.csv (sizing.model=llama-3.1-8b), or one of "
        "conf/model, or give model.path.",
    )
