"""The language model of multimodal folders, without pictures: the CPU engine computes what Transformers does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pipelines.compress.quantizing import quantize
from pipelines.domain.formats import QFormat
from pipelines.domain.language_model import LANGUAGES, language_config
from pipelines.domain.progress import SilentProgress
from pipelines.engines.openvino.engine import OpenVinoEngine
from pipelines.engines.openvino.runtime import OpenVinoOptions
from pipelines.stages.llava import take_language_model
from tests.contract.engines.conftest import CALIBRATION, LIMITS, relative_error, widen
from tests.support.scored_logits import scored_logits
from tests.support.small_models import TRAINED
from tests.support.specs import quant_spec

SIZES = {
    "vocab_size": 1800, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
QWEN_SEES = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
SEES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0,
    "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Queries grow from position 128, beyond which engines are refused."""
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"head_dim": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {"vision_config": SEES, "mm_tokens_per_image": 1, "image_token_index": 1799},
    ),
    "Mistral3": (
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        {"vision_config": {"model_type": "pixtral", **SEES}, "image_token_index": 1799},
    ),
    "Mistral3 with ministral3": (
        {"model_type": "ministral3", "head_dim": 32, "rope_parameters": MINISTRAL},
        {"vision_config": {"model_type": "pixtral", **SEES}, "image_token_index": 1799},
    ),
    "InternVL": (
        {"model_type": "qwen3", "head_dim": 32},
        {"vision_config": SEES | {"image_size": [28, 28], "patch_size": [14, 14]}, "image_token_id": 1799},
    ),
    "Qwen2VL": ({"rope_parameters": AXES}, {"vision_config": {"depth": 1, "embed_dim": 64, "num_heads": 4}}),
    "Qwen2_5_VL": ({"rope_parameters": AXES}, {"vision_config": QWEN_SEES}),
    "Qwen3VL": (
        {"head_dim": 16, "rope_parameters": AXES | {"mrope_interleaved": True}},
        {"vision_config": QWEN_SEES | {"deepstack_visual_indexes": [0]}, "tie_word_embeddings": True},
    ),
}
"""Model -> its text_config beside `SIZES`, and what else its class is given."""
IDS = [2, *range(100, 140)]


def write_whole(folder: Path, name: str) -> Path:
    """Write a small random model of a class with an encoder, as Transformers saves it."""
    text, other = WHOLE[name]
    kind, text = name.partition(" ")[0], {**SIZES, **text}
    config = getattr(transformers, f"{kind}Config")(text_config=text, **other)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).to(torch.bfloat16).save_pretrained(folder)
    for file in TRAINED.glob("*token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def as_published(folder: Path) -> None:
    """Name tensors and lay out config.json as the hub's Qwen2-VL and Qwen2.5-VL do."""
    path = folder / "model.safetensors"
    renamed = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in load_file(path).items()
    }
    save_file(renamed, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    (folder / "config.json").write_text(json.dumps({**text, "rope_theta": 1e6, **config}))


@pytest.mark.parametrize("name", WHOLE)
def test_logits_without_pictures_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    whole = write_whole(tmp_path / "whole", name)
    kind = name.partition(" ")[0]
    model = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(whole, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    if name.startswith("Qwen2"):
        as_published(whole)
    (tmp_path / "language").mkdir()
    facts = take_language_model(whole, tmp_path / "language")
    assert facts["left_bytes"] > 0
    quantize(tmp_path / "language", tmp_path / "checkpoint", quant_spec(QFormat.NONE), [], CALIBRATION)
    wide = widen(tmp_path / "checkpoint", tmp_path / "wide")
    limits = replace(LIMITS, max_seq_len=512, max_input_len=128)
    OpenVinoEngine().build(wide, limits, tmp_path / "engine", SilentProgress())
    with OpenVinoEngine(OpenVinoOptions(inference_precision="f32", num_threads=1)).open(tmp_path / "engine") as session:
        assert relative_error(scored_logits(session, IDS), expected) <= 1e-4


@pytest.mark.parametrize("architecture", LANGUAGES)
def test_sizes_that_are_left_out_are_those_of_transformers(architecture: str) -> None:
    """A folder that states nothing of its language model is read with the defaults of its class."""
    config_class = getattr(transformers, architecture.removesuffix("ForConditionalGeneration") + "Config")
    for kind, (_, defaults) in LANGUAGES[architecture].items():
        nested = f"{kind}_text" if kind in ("qwen2_vl", "qwen2_5_vl") else kind
        stated = {"model_type": nested} if "Qwen" not in architecture else {}
        known = config_class(text_config=stated).text_config.to_dict()
        known["rope_theta"] = (known.get("rope_parameters") or {}).get("rope_theta")
        assert {key: known[key] for key in defaults} == dict(defaults)
        read = language_config({"architectures": [architecture], "text_config": {"model_type": nested}}, "config.json")
        assert read.items() >= defaults.items()
