"""Linears that compute with rounded weights while their own stay whole, so that training learns to live with it."""

from __future__ import annotations

from typing import Any

import torch

from pipelines.compress.specs import ROUNDED_BITS
from pipelines.domain.formats import QFormat


class _Rounded(torch.autograd.Function):
    """Rounds as `checkpoint.weight_codes.quantize_weight_only`; gradients pass as if it did nothing."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor, bits: int) -> torch.Tensor:
        bound = 2 ** (bits - 1)
        scale = weight.abs().amax(dim=1, keepdim=True) / bound
        scaled = weight / torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = torch.copysign(torch.floor(scaled.abs() + 0.5), scaled).clamp(-bound, bound - 1)
        found: torch.Tensor = codes * scale
        return found

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a weight [O, I] rounded to so many bits, with its own scale for each output channel."""
    found: torch.Tensor = _Rounded.apply(weight, bits)  # type: ignore[no-untyped-call]
    return found


def compute_with_rounded_weights(model: torch.nn.Module, qformat: QFormat) -> None:
    """Let the linears of all layers compute with rounded weights; names and parameters stay as they are."""
    bits = ROUNDED_BITS[qformat]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
            module.forward = _forward_of(module, bits)  # type: ignore[method-assign]


def _forward_of(linear: torch.nn.Linear, bits: int) -> Any:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, rounded(linear.weight, bits), linear.bias)

    return forward
