"""Models by name, without downloading them: rows of `models.csv` beside this file, and the model of the settings."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.checkpoint.declarations import kind_faults, quantization_of
from pipelines.checkpoint.given import WITH_ACTIVATIONS, given_format
from pipelines.domain.errors import Fault, UserError, did_you_mean
from pipelines.domain.families import BUILT, FAMILIES, SIZED
from pipelines.domain.formats import BY_QUANT_ALGO, QFormat, stored_as
from pipelines.domain.mixture_layers import Latent
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import LLM_API, TENSORRT_LLM, EngineDescription, with_setting
from pipelines.settings.root import Settings
from pipelines.store.sources import model_config

MODELS = Path(__file__).parent / "models.csv"
"""Dimensions of public models under the names of `ModelShape`'s fields, each row with its source."""

SAME_SHAPE = {
    "llama-3.3-70b": "llama-3.1-70b", "mistral-7b": "mistral-7b-v0.3", "mistral-7b-v0.2": "mistral-7b-v0.3",
    "qwen3-30b-a3b-2507": "qwen3-30b-a3b", "qwen3-235b-a22b-2507": "qwen3-235b-a22b", "deepseek-r1-0528": "deepseek-r1",
    "deepseek-v3-0324": "deepseek-v3", "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
}  # fmt: skip
"""Names of models with the dimensions of another row (TensorRT-LLM's benchmarks do not use a sliding window)."""
DECORATION = re.compile(r"-(instruct|chat|it|hf|base)(?=-|$)")
"""Words that publishers add to a model's name."""


def known_model(settings: Settings) -> ModelShape:
    """Return the shape of the model to size, dense or MoE: `sizing.model`, config.json of folder or Hub, or conf/model.

    Raises:
        UserError: the model is not known, or the Hub does not give its config.json.
    """
    if settings.sizing.model is not None:
        return model_named(settings.sizing.model)
    model = settings.model
    if model.folder is not None:
        return _in_folder(model.folder, model.label, str(model.folder))
    if model.shape is not None:
        return model.shape.to_shape(model.label)
    other = "Or name a model that is known here (sizing.model=llama-3.1-8b), or one of conf/model, or give model.path."
    if find_spec("huggingface_hub") is None:
        raise UserError(f"The sizes of {model.label} are on the Hub, and huggingface_hub is not installed.", todo=other)
    from pipelines.hub import HubSource, stated  # takes a third of a second

    try:
        folder, _ = stated(HubSource(str(model.hub_id), model.revision or "main"))
        return _in_folder(folder, model.label, str(model.hub_id))
    except UserError as error:
        raise UserError.of(
            [*error.faults, Fault(f"So the sizes of {model.label} are not known.", todo=other)]
        ) from None


def _in_folder(folder: Path, name: str, place: str) -> ModelShape:
    """Return the shape of a model from its folder; with what the folder holds, if it is quantized or not built here.

    `place` is where its owner knows it.
    """
    config = model_config(folder)
    shape = ModelShape.from_hf_config(config, f"config.json of {place}", name=name, buildable=False)
    family = None if shape.architecture else SIZED[config["architectures"][0]]
    block = quantization_of(folder, config)
    if family is None or not family.layers:
        return shape if block is None else replace(shape, published={_given_form(block): place})
    form, kept = "none", {}
    if block is not None:
        form = _form_of(block)
        kept = {form: "blocks" if block.get("weight_block_size") else _kept_in_16_bit(block, shape)}
    return replace(shape, published={form: place} if family.llm_api else {}, in_16_bit=kept)


def _given_form(block: Mapping[str, Any]) -> str:
    """Return the value of `quant` that imports a folder, or the format that it declares and why none does."""
    form = _form_of(block)
    fault = next(kind_faults("several formats" if form == QFormat.AUTO else form, block), None)
    return str(given_format(block).qformat) if fault is None else fault.message.removesuffix(".")


def _form_of(block: Mapping[str, Any]) -> str:
    """Return the format that a folder declares: one of `quant`, or the method's own name where none is like it."""
    method, algorithm = str(block.get("quant_method")), str(block.get("quant_algo"))
    if method == "modelopt":
        return str(
            stored_as(algorithm, bool(block.get("pre_quant_scale"))) if algorithm in BY_QUANT_ALGO else algorithm
        )
    packing = str(block.get("format")) if method == "compressed-tensors" else method
    return str(WITH_ACTIVATIONS.get(packing, method))


def _kept_in_16_bit(block: Mapping[str, Any], shape: ModelShape) -> str:
    """Return what of attention is left out of the quantization, as `ModelShape.in_16_bit`: judged by a middle layer."""
    lists = (block.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert"))
    globs = [_glob(str(each)) for names in lists if isinstance(names, list) for each in names]

    def left_out(linear: str) -> bool:
        name = f"model.layers.{shape.num_hidden_layers // 2}.self_attn.{linear}"
        return any(fnmatchcase(place, glob) for glob in globs for place in (name, f"language_model.{name}"))

    queries = "q_b_proj" if shape.latent is not None and shape.latent.query_rank else "q_proj"
    if not left_out(queries):
        return ""
    return "attention" if left_out("o_proj") else "q_kv"


def _glob(pattern: str) -> str:
    """Return a regular expression ("re:..."), which only has to match the beginning, as a pattern of a shell."""
    if not pattern.startswith("re:"):
        return pattern
    return pattern[3:].replace(".*", "*").replace("\\.", ".").strip("^$") + "*"


def engine_of(settings: Settings, model: ModelShape) -> EngineDescription:
    """Return the engine to size: the one that is named, the LLM API for what only it runs, else TensorRT-LLM 1.2."""
    if model.published and not model.architecture:
        return LLM_API  # trtllm-build of 1.2 knows none of these, and no rule knows them
    named = with_setting(settings.engine.name)
    if named is not None and named.needs_gpu:
        return named
    only_there = model.architecture in FAMILIES and model.architecture not in BUILT
    return LLM_API if only_there and "llm_api" in model.family.features else TENSORRT_LLM


def has_attention_dp(settings: Settings, model: ModelShape) -> bool:
    """Return whether the LLM API is asked to serve a mixture with attention data parallelism."""
    options = {**settings.llm_api.of_file, **settings.llm_api.extra}
    asked = options.get("enable_attention_dp") is True and model.num_experts > 1
    return asked and engine_of(settings, model) is LLM_API


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


def plain_name(text: str) -> str:
    """Return what names of a model have in common: "llama318b" of llama_3_1_8b and meta-llama/Llama-3.1-8B."""
    return re.sub(r"[^a-z0-9]", "", _plain(text.replace("_", "-")))


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
    defaults = {
        "num_experts": 1, "num_experts_per_token": 1, "shared_size": 0, "dense_layers": 0, "dense_size": 0,
        "sliding_window": 0, "global_every": 0,
    }  # fmt: skip
    folders = [folder.split(":") for folder in row["published"].split()]
    numbers: dict[str, Any] = {size: int(row[size]) for size in sizes}
    numbers |= {name: int(row[name] or default) for name, default in defaults.items()}
    return ModelShape(
        architecture=built.get(row["family"], ""),
        **numbers,
        tie_word_embeddings=row["tie_word_embeddings"] == "True",
        gated_mlp=row["gated_mlp"] == "True",
        chunked=row["chunked"] == "True",
        latent=Latent(*map(int, row["latent"].split())) if row["latent"] else None,
        norms_per_layer=4 if row["norm"].startswith("rms4") else 2,
        mxfp4=row["mxfp4"] == "True",
        published={form: folder for form, folder, *_ in folders},
        in_16_bit={form: kept[0] for form, _, *kept in folders if kept},
        name=row["model"],
    )
