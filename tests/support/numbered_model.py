"""A Llama of two narrow layers whose weights are drawn without torch, so that every processor gets the same bytes.

It is in float16, whose activations differ eight times less between processors than those of bfloat16.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipelines.settings.model import BUNDLED

TOKENIZER = BUNDLED / "models" / "tiny_llama"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1920,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def write_numbered_model(folder: Path) -> Path:
    """Write a Hugging Face folder with the tokenizer of tiny_llama."""
    draw = np.random.default_rng(11)
    tensors = {
        "model.embed_tokens.weight": draw.standard_normal((1920, 64)),
        "lm_head.weight": draw.standard_normal((1920, 64)) / 4,
        "model.norm.weight": 1 + draw.standard_normal(64) / 8,
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, shape in LINEARS.items():
            tensors[f"{prefix}.{name}.weight"] = draw.standard_normal(shape) / 4
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + draw.standard_normal(64) / 8
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    narrow = {name: values.astype(np.float16) for name, values in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    for file in TOKENIZER.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder
