"""Say it clearly when a GPU has no memory left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipelines.domain.errors import ContinuableError

SENTENCES = 3
"""Of PyTorch's message: that memory ran out, what was asked for, and what the GPU has. Advice on PyTorch follows."""
BATCHES = "set a smaller calibration.batch_size or calibration.seq_len"
"""What lowers the memory of everything that reads calibration texts."""


@contextmanager
def gpu_memory_named(doing: str, smaller: str) -> Iterator[None]:
    """Turn PyTorch's error into one that says what to do.

    Args:
        doing: what takes the memory ("quantizing").
        smaller: settings that lower it.

    Raises:
        ContinuableError: the GPU's memory ran out within the context.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = ". ".join(str(error).split(". ")[:SENTENCES]).rstrip(".")
        raise ContinuableError(
            f"The GPU has too little memory for {doing}: {said}.",
            todo=f"Free it (nvidia-smi lists what is on it), or {smaller}. The same command goes on from what is done.",
        ) from error
