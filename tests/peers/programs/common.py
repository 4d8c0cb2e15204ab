"""Run by the peers' own Python: the arguments of a program, and the weights that a peer's linears compute with."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SOURCE, OUT, *WORDS = sys.argv[1:]
TEXTS = [
    "The quick brown fox jumps over the lazy dog and runs into the deep forest, where it sleeps until the morning.",
    "A river begins in the mountains, passes three towns, and ends in the sea after four hundred kilometres.",
] * 8


def save_weights(model: Any, weight: Callable[[Any], Any]) -> None:
    """Write OUT/dequantized.safetensors: the weight [O, I] of each linear in float32.

    Args:
        model: as the peer loads its own folder.
        weight: of a linear.
    """
    linears = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    write({name: weight(module) for name, module in linears.items()})


def write(weights: dict[str, Any]) -> None:
    """Write OUT/dequantized.safetensors."""
    assert weights
    kept = {name: weight.detach().float() for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in kept.items()}, f"{OUT}/dequantized.safetensors")


def computed(linear: Any) -> Any:
    """Return what a linear makes of the identity matrix."""
    inputs = linear.in_features if hasattr(linear, "in_features") else linear.infeatures
    return linear(torch.eye(inputs, dtype=torch.float32)).T


def flatten() -> None:
    """Move the folder that a peer made inside OUT, if it did, up to OUT."""
    if (Path(OUT) / "config.json").is_file():
        return
    (made,) = Path(OUT).iterdir()
    for file in list(made.iterdir()):
        file.rename(Path(OUT) / file.name)
    made.rmdir()
