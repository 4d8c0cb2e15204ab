"""A short training of a bundled model, for the tests of recovery training."""

from pathlib import Path
from typing import Any

from pipelines.compress.texts import load_texts
from pipelines.settings.model import BUNDLED

LLAMA, GEMMA = (BUNDLED / "models" / name for name in ("tiny_llama", "tiny_gemma"))
SHORT: dict[str, Any] = {
    "steps": 4, "learning_rate": 2e-4, "seq_len": 64, "batch_size": 2, "accumulation": 1, "evaluate_every": 2,
    "patience": 9, "seed": 1, "texts": 40,
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": "attention.qkv",
    "self_attn.k_proj": "attention.qkv",
    "self_attn.v_proj": "attention.qkv",
    "self_attn.o_proj": "attention.dense",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
}
"""Linear of a Hugging Face layer -> that of a TensorRT-LLM checkpoint, where q, k and v are one."""


def texts() -> list[str]:
    """Some text."""
    return list(load_texts(BUNDLED / "corpus.jsonl", size=60))


def weights(folder: Path) -> dict[str, Any]:
    """All tensors of a Hugging Face folder."""
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
