"""GPTQ of one decoder layer: round its weights column by column, and let the columns that follow compensate.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022). The weights
are those of ModelOpt's `gptq` (0.47), which rounds the whole matrix again for each of its columns and has a Hessian for
each linear; here a column is rounded alone, and linears with the same input share what depends on it.

Shapes: n tokens, o output and i input channels; a tensor's name ends with its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Rounding = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns a column of a weight, float32 [O], as the format holds it; the second argument is its number."""

_ROWS = 1024
"""Rows of a Hessian that are computed at once; what is right of their last diagonal element is left out."""


class Hessian:
    """The mean of 2 x x^T over the inputs x of some linears.

    Attributes:
        mean_ii: its lower triangle, float32 [I, I]; the rest is undefined.
        linears: names of the linears.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        """Begin with no inputs."""
        self.mean_ii = torch.zeros(width, width, device=device)
        self.linears: dict[str, None] = {}
        self._tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Take inputs of another batch into the mean: [..., I]."""
        x_ni = inputs.reshape(-1, inputs.shape[-1]).float()
        self.mean_ii *= self._tokens / (self._tokens + len(x_ni))
        self._tokens += len(x_ni)
        x_in = (math.sqrt(2 / self._tokens) * x_ni).t()
        for start in range(0, len(x_in), _ROWS):
            stop = min(start + _ROWS, len(x_in))
            self.mean_ii[start:stop, :stop] += x_in[start:stop] @ x_in[:stop].t()


@contextmanager
def observed(linears: Mapping[str, torch.nn.Module]) -> Iterator[list[Hessian]]:
    """Collect the Hessians of linears during the passes of this context: one for each input that they have."""
    hessians: dict[str, Hessian] = {}
    current: list[tuple[torch.Tensor, Hessian]] = []

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not current or current[0][0] is not args[0]:
                hessian = hessians.setdefault(name, Hessian(args[0].shape[-1], args[0].device))
                hessian.add(args[0])
                current[:] = [(args[0], hessian)]
            current[0][1].linears[name] = None

        return hook

    handles = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    collected: list[Hessian] = []
    try:
        yield collected
        collected += hessians.values()
    finally:
        for handle in handles:
            handle.remove()


def round_linears(
    linears: Mapping[str, torch.nn.Module],
    hessians: list[Hessian],
    rounding: Callable[[torch.nn.Module], Rounding],
    *,
    block: int,
    damp: float,
) -> None:
    """Replace the weights of linears by rounded ones.

    Args:
        linears: by name.
        hessians: from `observed`; emptied, because one of them can be larger than the layer.
        rounding: returns how the columns of a linear's weight are rounded.
        block: columns that are solved at once.
        damp: share of the Hessian's mean diagonal that is added to it.
    """
    while hessians:
        hessian_ii, names = hessians[-1].mean_ii, hessians.pop().linears
        groups: dict[bytes, list[torch.nn.Module]] = {}  # by the columns whose weights are all zero: mostly one group
        for name in names:
            unused_i = linears[name].get_parameter("weight").eq(0).all(dim=0)
            groups.setdefault(unused_i.cpu().numpy().tobytes(), []).append(linears[name])
        while groups:
            _, alike = groups.popitem()
            unused_i = alike[0].get_parameter("weight").eq(0).all(dim=0)
            factor_ii = inverse_factor(hessian_ii.clone() if groups else hessian_ii, unused_i, damp)
            for linear in alike:
                weight = linear.get_parameter("weight")
                weight.data = rounded(weight.data, factor_ii, rounding(linear), block)


def inverse_factor(hessian_ii: torch.Tensor, unused_i: torch.Tensor, damp: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse, computed in its memory.

    Args:
        hessian_ii: its lower triangle is read; overwritten.
        unused_i: columns whose weights are all zero, which must not influence others.
        damp: see `round_linears`.

    Returns:
        the factor; the identity, as in ModelOpt, if the Hessian is not positive definite.
    """
    hessian_ii[unused_i, :] = 0
    hessian_ii[:, unused_i] = 0
    diagonal = hessian_ii.diagonal()
    diagonal[unused_i] = 1
    diagonal += damp * torch.mean(diagonal.clone())
    try:
        matrix: torch.Tensor = torch.linalg.cholesky(hessian_ii)
        torch.cholesky_inverse(matrix, out=hessian_ii)
        torch.linalg.cholesky(hessian_ii, upper=True, out=matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return torch.eye(len(hessian_ii), device=hessian_ii.device)
    return matrix


def rounded(weight_oi: torch.Tensor, factor_ii: torch.Tensor, rounding: Rounding, block: int) -> torch.Tensor:
    """Return the rounded weights, in the same type.

    Args:
        weight_oi: a linear's weight.
        factor_ii: from `inverse_factor`.
        rounding: of its columns.
        block: columns that are solved at once.
    """
    work, width = weight_oi.float(), weight_oi.shape[1]
    for start in range(0, width, block):
        stop = min(start + block, width)
        columns, factor = work[:, start:stop].clone(), factor_ii[start:stop, start:stop]
        errors = torch.empty_like(columns)
        for j in range(stop - start):
            values = work[:, start + j] = rounding(columns[:, j], start + j)
            errors[:, j] = (columns[:, j] - values) / factor[j, j]
            columns[:, j:].addr_(errors[:, j], factor[j, j:], alpha=-1)
        work[:, stop:].addmm_(errors, factor_ii[start:stop, stop:], alpha=-1)
    return work.to(weight_oi.dtype)
