"""A valid TensorRT-LLM checkpoint of one narrow layer, made without a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.verify import expected_tensors

CONFIG: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 2,
    "intermediate_size": 16,
    "vocab_size": 12,
    "max_position_embeddings": 128,
    "norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "rotary_base": 10000.0,
}


def write_checkpoint(folder: Path, *, tp_size: int = 1, quant_algo: str | None = None) -> Path:
    """Write config.json and a file per rank with weights of 0.5; quant_algo may be one with floating-point weights."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1}
    quantization = {"quant_algo": quant_algo, "kv_cache_quant_algo": None}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"mapping": mapping, "quantization": quantization}))
    config = CheckpointConfig.load(folder)
    for rank in range(tp_size):
        tensors = expected_tensors(config, rank)
        halves = {name: np.full(tensor.shape, 0.5, dtype=np.float16) for name, tensor in tensors.items()}
        save_file(halves, folder / f"rank{rank}.safetensors")
    return folder
