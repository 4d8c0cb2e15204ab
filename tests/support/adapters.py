"""Hand-made LoRA adapters in peft's layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "base_model.model.model.layers"


def write_adapter(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """Write adapter_config.json and adapter_model.safetensors; tensor names start with the layer's number."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    whole = {"peft_type": "LORA", "target_modules": "all-linear", "r": 2, "lora_alpha": 4, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    named = {f"{PREFIX}.{name}.weight": np.asarray(values, np.float32) for name, values in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def two_linears() -> dict[str, Any]:
    """Return Q of layer 1 ([2, 3], [4, 2]) and down_proj of layer 0 ([2, 2], [3, 2]) with distinct values."""
    return {
        "1.self_attn.q_proj.lora_A": [[1, 2, 3], [4, 5, 6]],
        "1.self_attn.q_proj.lora_B": [[1, 0], [0, 1], [1, 1], [-1, 0.5]],
        "0.mlp.down_proj.lora_A": [[7, 8], [9, 10]],
        "0.mlp.down_proj.lora_B": [[0.25, 0], [0, 0.25], [1, 2]],
    }
