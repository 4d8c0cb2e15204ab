"""Weights as formats round them, for training that computes with what will be served.

Only formats that round a weight by what it is alone can be known before they are applied (`FormatSpec.rounds_alone`).
Each function computes in float32 what the exporter, or for weights that the engine build quantizes the build, makes of
16-bit weights; a test holds them against the checkpoints.

Shapes: O output and I input channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipelines.checkpoint.dequantize import E2M1_VALUES
from pipelines.compress.specs import RoundingSpec
from pipelines.domain.formats import (
    FORMATS,
    FP4_WEIGHTS,
    FP8_WEIGHTS,
    INT4_AT_BUILD,
    INT4_WEIGHTS,
    INT8_AT_BUILD,
    WeightKind,
)

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_LEAST = 2.0**-9
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbouring values of E2M1."""

Round = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Weights [O, I], the largest absolute weight of all linears that share a scale, and the group size -> rounded."""


class StraightThrough(torch.autograd.Function):
    """Applies a function whose gradient is taken to be 1."""

    @staticmethod
    def forward(_context: Any, weight: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what the function makes of the weight."""
        return function(weight)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on as it is."""
        return gradient, None


def rounder(rounding: RoundingSpec) -> Round:
    """Return the function that rounds as a format does."""
    return _ROUND[FORMATS[rounding.qformat].weights]


def shares_scale(rounding: RoundingSpec) -> bool:
    """Return whether q, k and v share a scale of the tensor, and gate and up."""
    return FORMATS[rounding.qformat].weights in (FP8_WEIGHTS, FP4_WEIGHTS)


def _at_build(bits: int) -> Round:
    """Round as `checkpoint.weight_codes.quantize_weight_only`; the scale is stored in the weights' type."""
    bound = 2 ** (bits - 1)

    def round_oi(weight: torch.Tensor, _largest: torch.Tensor, _group: int) -> torch.Tensor:
        values = weight.float()
        scale = values.abs().amax(dim=1, keepdim=True) / bound
        scaled = values / _not_zero(scale)
        codes = torch.copysign(torch.floor(scaled.abs() + 0.5), scaled).clamp(-bound, bound - 1)
        found: torch.Tensor = codes * scale.to(weight.dtype).float()
        return found

    return round_oi


def _int4_groups(weight: torch.Tensor, _largest: torch.Tensor, group: int) -> torch.Tensor:
    """Round as ModelOpt's `pack_int4_in_uint8`, with the scale from the largest weight of each group."""
    values = _groups(weight, group)
    scale = values.abs().amax(dim=-1, keepdim=True) / 7
    codes = (values / _not_zero(scale)).round().clamp(-8, 7)
    return (codes * scale).reshape(weight.shape)


def _fp8(weight: torch.Tensor, largest: torch.Tensor, _group: int) -> torch.Tensor:
    """Round as ModelOpt's `to_quantized_weight` for FP8, with one scale for the tensor."""
    scale = largest.float() / E4M3_MAX
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _fp4(weight: torch.Tensor, largest: torch.Tensor, group: int) -> torch.Tensor:
    """Round as ModelOpt's `NVFP4QTensor`: an E4M3 scale for each group, under a scale of the tensor."""
    values, second = _groups(weight, group), largest.float() / (E2M1_MAX * E4M3_MAX)
    wanted = values.abs().amax(dim=-1, keepdim=True) / (E2M1_MAX * second)
    wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted).clamp(E4M3_LEAST, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float() * second
    scaled = values / scale
    return (torch.copysign(_e2m1(scaled.abs()), scaled) * scale).reshape(weight.shape)


def _e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1; halfway, the one whose last bit is 0."""
    bounds = torch.tensor(E2M1_BOUNDS, device=magnitude.device)
    below, above = torch.searchsorted(bounds, magnitude), torch.searchsorted(bounds, magnitude, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return torch.tensor(E2M1_VALUES, device=magnitude.device)[code]


def _groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.float().reshape(weight.shape[0], -1, group)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


_ROUND: dict[WeightKind, Round] = {
    INT8_AT_BUILD: _at_build(8),
    INT4_AT_BUILD: _at_build(4),
    INT4_WEIGHTS: _int4_groups,
    FP8_WEIGHTS: _fp8,
    FP4_WEIGHTS: _fp4,
}
