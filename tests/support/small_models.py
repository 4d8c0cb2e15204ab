"""Small models of the families that no bundled model belongs to, made from the weights of tiny_llama.

What the other family adds, biases, is random and small, so that a step that leaves it out shows and the model still
answers. Weights that were trained keep logits apart, which random ones do not: a flipped code of a quantized activation
then decides between next tokens as rarely as it does in the bundled models.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from pipelines.settings.model import BUNDLED

MODELS = BUNDLED / "models"
TRAINED = MODELS / "tiny_llama"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "Granite",
        {"embedding_multiplier": 1.25, "residual_multiplier": 0.75, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_with_window": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("Qwen2", {"rope_scaling": YARN}),
}
"""Kind -> its classes in Transformers, and what differs from tiny_llama in its configuration."""
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def model_of(folder: Path, kind: str) -> Path:
    """Return the folder of the bundled model of a kind ("llama", "gemma", "qwen"), or write a small one."""
    bundled = MODELS / f"tiny_{kind}"
    return bundled if bundled.is_dir() else (write_random if kind in RANDOM else write_model)(folder, kind)


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a Hugging Face folder of a kind in bf16; equal for equal arguments."""
    name, own = KINDS[kind]
    trained = transformers.AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)
    written = json.loads((TRAINED / "config.json").read_text())
    shared = {key: written[key] for key in SHARED}
    config = getattr(transformers, f"{name}Config")(**{**shared, **own, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    report = model.load_state_dict(trained.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all(key.endswith(".bias") for key in report.missing_keys)
    for key in report.missing_keys:
        torch.nn.init.normal_(model.get_parameter(key), std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in TRAINED.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


SHORT = [1 + each / 16 for each in range(24)]
"""Factors of the 24 pairs that three quarters of a head of 64 channels are."""
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {"head_dim": 64, "sliding_window": 32, "query_pre_attn_scalar": 144}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},  # low, so that they decide
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 64, "sliding_window": 32, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi3_longrope": (
        "Phi3",
        {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024, "partial_rotary_factor": 0.75}
        | {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": [2 * each for each in SHORT]}},
    ),
    "phi3_without_window": ("Phi3", {"sliding_window": None}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 64, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False}},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
}
"""Families whose weights tiny_llama's do not fit."""


def write_random(folder: Path, kind: str) -> Path:
    """Write a Hugging Face folder of a kind of `RANDOM` with random weights in bf16."""
    name, own = RANDOM[kind]
    trained = json.loads((TRAINED / "config.json").read_text())
    sizes = {key: trained[key] for key in SHARED if key not in ("head_dim", "rope_theta", "rope_scaling")}
    config = getattr(transformers, f"{name}Config")(**{**sizes, "num_hidden_layers": 2, **own})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for key, weight in model.named_parameters():
        if "norm" in key:  # both w and 1 + w are whole numbers of 1/64, which bf16 holds
            weight.data += torch.randint(-16, 17, weight.shape) / 64
        if key.endswith("experts.gate_up_proj") and name == "GptOss":
            weight.data *= 16  # so that some of gate and up are clamped
        if key.endswith(("bias", "sinks")):
            torch.nn.init.normal_(weight.data, std=2 if key.endswith("sinks") else 0.25)
    model.save_pretrained(folder)
    for file in TRAINED.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


def write_untrained(folder: Path) -> Path:
    """Write a Hugging Face folder with tiny_llama's sizes and random weights: a model that can only guess."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(TRAINED)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in TRAINED.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder
