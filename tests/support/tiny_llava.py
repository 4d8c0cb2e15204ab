"""A small LLaVA with random weights and tiny_llama's tokenizer, and small pictures."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from tests.support.small_models import TRAINED

VISION = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
TOKENS = 16
GRIDS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
"""Of a LLaVA 1.6; as those of its folders, with tiles of 32 pixels."""


def write_llava(folder: Path, *, tiled: bool = False, language: str = "llama", **changes: Any) -> Path:
    """Write a folder in bf16; `<image>` stands for a picture. With tiles it is a LLaVA 1.6."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig.from_pretrained(TRAINED)
    image = tokenizers.Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    image.add_special_tokens(["<image>"])
    token = image.token_to_id("<image>")
    text.num_hidden_layers, text.vocab_size = 2, token + 64
    vision = transformers.CLIPVisionConfig(**VISION)
    parts: dict[str, Any] = {"vision_config": vision, "text_config": text, "image_token_index": token, **changes}
    if language == "mistral":
        kept = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
        parts["text_config"] = transformers.MistralConfig(**kept, sliding_window=None)
    model: Any
    if tiled:
        parts = {"image_grid_pinpoints": GRIDS, **parts}
        model = transformers.LlavaNextForConditionalGeneration(transformers.LlavaNextConfig(**parts))
    else:
        model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**parts))
    for name, values in model.named_parameters():  # so that what is left out shows
        if name.endswith((".bias", "_embedding", "position_embedding.weight")):
            torch.nn.init.normal_(values, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in TRAINED.glob("*token*.json"):
        shutil.copy(file, folder)
    image.save(str(folder / "tokenizer.json"))
    return folder


def whole_model(folder: Path) -> Any:
    """Return the model in Transformers, computing in float32 on the weights of the folder."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def picture(seed: int) -> np.ndarray:
    """Return a prepared picture [3, 32, 32]."""
    return np.random.default_rng(seed).standard_normal((3, 32, 32)).astype(np.float32)
