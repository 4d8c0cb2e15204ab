"""Run by the peers' own Python: the arguments of a program, and the weights that a peer's linears compute with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SOURCE, OUT, *WORDS = sys.argv[1:]
TEXTS = [
    "The quick brown fox jumps over the lazy dog and runs into the deep forest, where it sleeps until the morning.",
    "A river begins in the mountains, passes three towns, and ends in the sea after four hundred kilometres.",
] * 8


def save_weights(model: Any, *, decompressed: bool = False) -> None:
    """Write OUT/dequantized.safetensors: the weight [O, I] of each linear in float32.

    Args:
        model: as the peer loads its own folder.
        decompressed: take the weights; else what the linears make of the identity matrix.
    """
    weights = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight = module.weight if decompressed else computed(module)
            weights[name] = weight.detach().float().contiguous()
    assert weights
    save_file(weights, f"{OUT}/dequantized.safetensors")


def computed(module: Any) -> Any:
    """Return the weight that a linear computes with."""
    inputs = module.in_features if hasattr(module, "in_features") else module.infeatures
    return module(torch.eye(inputs, dtype=torch.float32)).T


def flatten() -> None:
    """Move the folder that a peer made inside OUT up to OUT."""
    (made,) = Path(OUT).iterdir()
    for file in list(made.iterdir()):
        file.rename(Path(OUT) / file.name)
    made.rmdir()
