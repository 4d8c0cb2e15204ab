"""Models by name, without downloading them: rows of `models.csv` beside this file, and the model of the settings."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.families import FAMILIES
from pipelines.domain.model_shape import ModelShape
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config

MODELS = Path(__file__).parent / "models.csv"
"""Dimensions of public models under the names of `ModelShape`'s fields, each row with its source."""

SAME_SHAPE = {
    "llama-3.3-70b": "llama-3.1-70b", "mistral-7b": "mistral-7b-v0.3", "mistral-7b-v0.2": "mistral-7b-v0.3",
    "qwen3-30b-a3b-2507": "qwen3-30b-a3b",
}  # fmt: skip
"""Names of models with the dimensions of another row (TensorRT-LLM's benchmarks do not use a sliding window)."""
DECORATION = re.compile(r"-(instruct|chat|it|hf|base)(?=-|$)")
"""Words that publishers add to a model's name."""


def known_model(settings: Settings) -> ModelShape:
    """Return the shape of the model to size, dense or MoE: `sizing.model`, the folder's config.json, or conf/model.

    Raises:
        UserError: the model is not known.
    """
    if settings.sizing.model is not None:
        return model_named(settings.sizing.model)
    model = settings.model
    if model.folder is not None:
        source = str(model.folder / "config.json")
        return ModelShape.from_hf_config(model_config(model.folder), source, name=model.label, buildable=False)
    if model.shape is not None:
        return model.shape.to_shape(model.label)
    raise UserError(
        f"The dimensions of {model.label} are not known before it is downloaded.",
        todo="Name a model of pipelines/predict/performance/models.csv (sizing.model=llama-3.1-8b), or one of "
        "conf/model, or give model.path.",
    )


def model_named(text: str) -> ModelShape:
    """Find a model by a name as people write it: "llama-3.3-70b", "meta-llama/Llama-3.1-8B-Instruct".

    Raises:
        UserError: it is not known; suggests the nearest name.
    """
    shapes, name = models(), _plain(text)
    shape = shapes.get(SAME_SHAPE.get(name, name)) or _on_hub().get(name)
    if shape is None:
        names = sorted([*shapes, *SAME_SHAPE])
        raise UserError(
            f"The model '{text}' is not known.", allowed=f"Known: {', '.join(names)}.", todo=did_you_mean(name, names)
        )
    return shape


def _plain(text: str) -> str:
    return DECORATION.sub("", text.strip().lower().split("/")[-1].removeprefix("meta-"))


@cache
def _on_hub() -> Mapping[str, ModelShape]:
    with MODELS.open(encoding="utf-8", newline="") as lines:
        return {_plain(row["hf_id"]): models()[row["model"]] for row in csv.DictReader(lines)}


@cache
def models() -> Mapping[str, ModelShape]:
    """Return all models of models.csv by name."""
    with MODELS.open(encoding="utf-8", newline="") as lines:
        return {row["model"]: _shape(row) for row in csv.DictReader(lines)}


def _shape(row: Mapping[str, str]) -> ModelShape:
    built = {family.name: family.architecture for family in FAMILIES.values()}
    sizes = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    defaults = {"num_experts": 1, "num_experts_per_token": 1, "sliding_window": 0, "global_every": 0}
    numbers: dict[str, Any] = {size: int(row[size]) for size in sizes}
    numbers |= {name: int(row[name] or default) for name, default in defaults.items()}
    return ModelShape(
        architecture=built.get(row["family"], ""),
        **numbers,
        tie_word_embeddings=row["tie_word_embeddings"] == "True",
        gated_mlp=row["gated_mlp"] == "True",
        norms_per_layer=4 if row["norm"].startswith("rms4") else 2,
        name=row["model"],
    )
