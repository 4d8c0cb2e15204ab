"""Small checkpoints written by hand, so that every expected number can be worked out."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_size": 2,
    "intermediate_size": 4,
    "vocab_size": 6,
    "max_position_embeddings": 32,
    "norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "rotary_base": 10000.0,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
}

Ranks = list[Mapping[str, np.ndarray]]
Write = Callable[..., Path]


@pytest.fixture
def checkpoint_config() -> dict[str, Any]:
    """A complete config.json of one layer of width 4."""
    return dict(CONFIG)


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Write:
    """Return a function that writes config.json (with changes) and one file per rank."""

    def write(ranks: Ranks, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        for rank, tensors in enumerate(ranks):
            contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
            save_file(contiguous, tmp_path / f"rank{rank}.safetensors")
        return tmp_path

    return write
