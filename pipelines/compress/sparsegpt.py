"""SparseGPT for 2:4 sparsity: zero the weights that change the outputs least, and let the others compensate.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (2023), section 3.
ModelOpt's `sparsegpt` mode (0.37 and 0.47) uses only the method's mask and drops the weight update, and it holds the
Hessians of all layers at once (20 GiB for Gemma 2B, whose MLP is 16,384 wide). This module prunes one decoder layer
at a time, each on the outputs of the layers pruned before it.

Shapes: n tokens, o output and i input channels; a tensor's name ends with its shape.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from pipelines.compress.calibration import broken_at

_BLOCK = 128  # columns per block, whose updates are applied to the rest of the matrix at once; a multiple of 4
_DAMPING = 0.01  # fraction of the mean diagonal that is added to the diagonal, as in the paper

_SHARED_INPUT = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Linear whose input is watched -> all linears that receive the same input and therefore share a Hessian."""

LINEARS = tuple(name for names in _SHARED_INPUT.values() for name in names)
"""Hugging Face names of all linears in a decoder layer of Llama and Gemma."""


Inputs = Iterable[tuple[torch.Tensor, dict[str, Any]]]


@torch.no_grad()
def prune_layer(layer: torch.nn.Module, inputs: Inputs, layer_name: str) -> dict[str, float]:
    """Prune every linear of a decoder layer in place.

    Args:
        layer: the layer.
        inputs: see `HiddenStates.inputs`; they are the outputs of the layers pruned before it.
        layer_name: for messages.

    Returns:
        For each linear, the squared error of its outputs on the inputs, relative to the squared outputs.

    Raises:
        UserError: a linear's inputs contain NaN or infinity.
    """
    hessians, errors = _hessians(layer, inputs, layer_name), {}
    for watched, names in _SHARED_INPUT.items():
        hessian = hessians.pop(watched)
        factor = inverse_factor(hessian)
        for name in names:
            weight_oi = layer.get_parameter(f"{name}.weight")
            pruned_oi = prune_2_4(weight_oi, factor)
            errors[name] = _relative_error(weight_oi, pruned_oi, hessian)
            weight_oi.copy_(pruned_oi)
    return errors


def _hessians(layer: torch.nn.Module, inputs: Inputs, layer_name: str) -> dict[str, torch.Tensor]:
    """Return X^T X, float32 [I, I], for the inputs X of each watched linear."""
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, _module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        x_ni = args[0].detach().reshape(-1, args[0].shape[-1]).float()
        if name not in sums:
            sums[name] = torch.zeros(x_ni.shape[1], x_ni.shape[1], device=x_ni.device)
        sums[name].addmm_(x_ni.T, x_ni)

    with ExitStack() as hooks:
        for name in _SHARED_INPUT:
            hooks.enter_context(layer.get_submodule(name).register_forward_hook(partial(watch, name)))
        for hidden, others in inputs:
            layer(hidden, **others)
    for name, hessian in sums.items():
        if not torch.isfinite(hessian.diagonal()).all():
            raise broken_at(f"{layer_name}.{name}")
    return sums


def inverse_factor(hessian_ii: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor U of the damped Hessian's inverse: H^-1 = U^T U.

    Row j of U holds what the paper's step at column j needs: U[j, j]^2 is the inverse's diagonal once the
    columns before j are fixed.
    """
    damped = hessian_ii.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0  # an input that is always zero: pruning its weights costs nothing
    diagonal += _DAMPING * diagonal.mean()
    # keep one matrix at a time: Gemma 2B's largest has 16,384 x 16,384 floats, 1 GiB
    matrix: torch.Tensor = torch.linalg.cholesky(damped)
    del damped, diagonal
    matrix = torch.cholesky_inverse(matrix)
    torch.linalg.cholesky(matrix, upper=True, out=matrix)
    return matrix


def prune_2_4(weight_oi: torch.Tensor, factor_ii: torch.Tensor) -> torch.Tensor:
    """Return the weights with two of every four neighbouring inputs zeroed and the others updated, in the same dtype.

    Args:
        weight_oi: a linear's weight; I is a multiple of 4.
        factor_ii: from `inverse_factor`.
    """
    work = weight_oi.detach().float().clone()
    width = work.shape[1]
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        block, factor = work[:, start:stop], factor_ii[start:stop, start:stop]
        errors = torch.zeros_like(block)
        for j in range(stop - start):
            if j % 4 == 0:
                cost = (block[:, j : j + 4] / factor.diagonal()[j : j + 4]) ** 2
                drop = torch.zeros_like(cost, dtype=torch.bool)
                drop.scatter_(1, cost.topk(2, dim=1, largest=False).indices, True)
            pruned = block[:, j].masked_fill(drop[:, j % 4], 0.0)
            errors[:, j] = (block[:, j] - pruned) / factor[j, j]
            block[:, j:] -= torch.outer(errors[:, j], factor[j, j:])
            block[:, j] = pruned
        work[:, stop:] -= errors @ factor_ii[start:stop, stop:]
    return work.to(weight_oi.dtype)


def _relative_error(before_oi: torch.Tensor, after_oi: torch.Tensor, hessian_ii: torch.Tensor) -> float:
    """Return |X (W - W')^T|^2 / |X W^T|^2, computed from the Hessian alone."""

    def energy(weight_oi: torch.Tensor) -> float:
        return float(((weight_oi @ hessian_ii) * weight_oi).sum())

    before = before_oi.detach().float()
    whole = energy(before)
    return energy(before - after_oi.float()) / whole if whole else 0.0
