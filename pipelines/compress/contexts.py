"""Contexts that a computation runs in: with the tools' output in the log, GPU memory errors named, fast products."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

import torch
from torch.nn import functional

from pipelines.domain.errors import ContinuableError
from pipelines.host.machine import native_bf16

log = logging.getLogger("pipelines.compress.tools")
SENTENCES = 3
"""Of PyTorch's message: that memory ran out, what was asked for, and what the GPU has. Advice on PyTorch follows."""
BATCHES = "set a smaller calibration.batch_size or calibration.seq_len"
"""What lowers the memory of everything that reads calibration texts."""
_HALVES = (torch.bfloat16, torch.float16)


class _ToLog(io.TextIOBase):
    """A stream whose lines go to the log; what a log handler writes to it goes to the real stream."""

    def __init__(self, real: TextIO) -> None:
        self._real, self._line, self._is_logging = real, "", False

    def write(self, text: str) -> int:
        if self._is_logging:
            return self._real.write(text)
        *lines, self._line = (self._line + text).replace("\r", "\n").split("\n")
        self._is_logging = True
        try:
            for line in filter(str.strip, lines):
                log.debug("%s", line.rstrip())
        finally:
            self._is_logging = False
        return len(text)


@contextmanager
def muted() -> Iterator[None]:
    """Send what ModelOpt and Transformers print, warn of and draw to the log; it would garble our progress display.

    The display writes to the streams that were there when it was made.
    """
    with redirect_stdout(_ToLog(sys.stdout)), redirect_stderr(_ToLog(sys.stderr)):
        from pipelines.compress.transformers_door import logging as hf_logging

        hf_logging.disable_default_handler()
        hf_logging.enable_propagation()
        try:
            yield
        finally:
            hf_logging.disable_propagation()
            hf_logging.enable_default_handler()


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
        message = ". ".join(str(error).split(". ")[:SENTENCES]).rstrip(".")
        raise ContinuableError(
            f"The GPU has too little memory for {doing}: {message}.",
            todo=f"Free it (nvidia-smi lists what is on it), or {smaller}. The same command goes on from what is done.",
        ) from error


@contextmanager
def f32_products() -> Iterator[None]:
    """Within this context, `torch.nn.functional.linear` multiplies 16-bit CPU tensors in float32.

    Without AMX or AVX512_BF16 a bfloat16 product on a CPU runs at a quarter of float32's speed (24 against 106 GFLOP/s
    on one core of an AVX-512 machine). Both accumulate in float32, so the results differ only by the order of
    summation. Weights are widened one linear at a time; the model itself stays in 16 bit.

    The result is narrowed to the input's type again. Does nothing where the processor multiplies bfloat16 natively.
    The function is replaced for the whole process, so this must not be used in concurrent threads.
    """
    if native_bf16():
        yield
        return
    plain = functional.linear

    def wide(data: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if data.dtype not in _HALVES or data.device.type != "cpu":
            return plain(data, weight, bias)
        added = None if bias is None else bias.float()
        return plain(data.float(), weight.float(), added).to(data.dtype)

    functional.linear = wide  # type: ignore[assignment] # called by position only
    try:
        yield
    finally:
        functional.linear = plain
