"""Compute matrix products of 16-bit tensors in float32 where the processor has no 16-bit arithmetic.

Without AMX or AVX512_BF16 a bfloat16 product on a CPU runs at a quarter of float32's speed (24 against 106 GFLOP/s on
one core of an AVX-512 machine). Both accumulate in float32, so the results differ only by the order of summation.
Weights are widened one linear at a time; the model itself stays in 16 bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from pipelines.host.machine import native_bf16

_HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def f32_products() -> Iterator[None]:
    """Within this context, `torch.nn.functional.linear` multiplies 16-bit CPU tensors in float32.

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
