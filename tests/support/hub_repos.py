"""Make small repository folders to serve: real safetensors with random numbers, written in milliseconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, *, weight_bytes: int = 200_000, shards: int = 1, **config: object) -> Path:
    """Write a model repository that also contains files that must not be downloaded.

    Args:
        folder: the folder to create.
        weight_bytes: approximate size of each safetensors file.
        shards: number of safetensors files; with more than one there is an index.
        config: entries of config.json that differ from `LLAMA`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small = {
        "config.json": LLAMA | config,
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer.json": {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        "tokenizer_config.json": {"model_max_length": 128},
    }
    for name, content in small.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.model").write_bytes(b"not really sentencepiece")
    (folder / "README.md").write_text("# tiny\n")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('never run')\n")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never loaded")
    (folder / "original").mkdir(exist_ok=True)
    (folder / "original" / "consolidated.00.pth").write_bytes(b"\x80\x04never loaded")
    _write_weights(folder, weight_bytes, shards)
    return folder


def write_dataset(folder: Path, *, file_bytes: int = 50_000) -> Path:
    """Write a data set repository: two Parquet files in subfolders, a script and a README."""
    numbers = np.random.default_rng(7)
    for name in ("test/part-0.parquet", "dev/part-0.parquet"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.bytes(file_bytes))
    (folder / "load.py").write_text("raise SystemExit('never run')\n")
    (folder / "README.md").write_text("# data\n")
    return folder


def _write_weights(folder: Path, weight_bytes: int, shards: int) -> None:
    numbers = np.random.default_rng(7)
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    )
    weight_map = {}
    for number, name in enumerate(names):
        tensor = numbers.integers(0, 2**16, weight_bytes // 2, dtype=np.uint16).view(np.int16)
        save_file({f"tensor.{number}": tensor}, folder / name)
        weight_map[f"tensor.{number}"] = name
    if shards > 1:
        index = {"metadata": {"total_size": weight_bytes * shards}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
