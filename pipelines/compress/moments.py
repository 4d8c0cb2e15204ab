"""Second moments of the inputs of linears: what GPTQ and AWQ need to know of calibration texts.

The squared error of a linear's outputs, with weights that differ by D from the true ones, is tr(D M D^T), with M the
sum of x x^T over its inputs x.

Shapes: n tokens, o output and i input channels, r the same in reverse, as GPTQ needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pipelines.compress.calibration import PassEnded

_ROWS = 1024
"""Rows of a matrix that are computed at once; of moments, what is right of their last diagonal element is left out."""


class Moments:
    """The sum of x x^T over the inputs x of some linears, in reverse.

    Attributes:
        linears: names of the linears.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        stops = [*range(_ROWS, width, _ROWS), width]
        self._parts = [torch.zeros(stop - (stop - 1) // _ROWS * _ROWS, stop, device=device) for stop in stops]
        self.linears: dict[str, None] = {}

    def add(self, inputs: torch.Tensor, *, mean: bool = False) -> None:
        """Add inputs of another batch, or their mean: [..., I]."""
        x_ni = inputs.reshape(-1, inputs.shape[-1])
        x_nr = torch.empty(x_ni.shape, device=inputs.device)
        for some_nr, some_ni in zip(torch.split(x_nr, _ROWS), torch.split(x_ni, _ROWS), strict=True):
            some_nr.copy_(some_ni.flip(1))
        for part in self._parts:
            rows, stop = part.shape
            part.addmm_(x_nr[:, stop - rows : stop].t(), x_nr[:, :stop], alpha=1 / max(1, len(x_nr)) if mean else 1)

    def error(self, weight_oi: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squared outputs of these weights, float32; summed over tokens as inputs were added."""
        weight_or, total = weight_oi.flip(1), torch.zeros((), device=weight_oi.device)
        for part in self._parts:
            rows, stop = part.shape
            product_or = weight_or[:, stop - rows : stop] @ part
            product_or[:, : stop - rows] *= 2  # what lies above the diagonal is the same
            total += product_or.mul_(weight_or[:, :stop]).sum()
        return total

    def take(self) -> torch.Tensor:
        """Return the lower triangle, float32 [I, I], above which is anything; nothing is kept."""
        width = self._parts[-1].shape[1]
        sum_rr = torch.empty(width, width, device=self._parts[-1].device)
        while self._parts:
            rows, stop = self._parts[-1].shape
            sum_rr[stop - rows : stop, :stop] = self._parts.pop()
        return sum_rr


@contextmanager
def observed(
    linears: Mapping[str, torch.nn.Module], *, mean: bool = False, ending: bool = False
) -> Iterator[list[Moments]]:
    """Collect the second moments of linears during the passes of this context: one for each input that they have.

    Args:
        linears: by name, in the order in which they run.
        mean: whether each batch counts the same, however many tokens it has.
        ending: whether a pass ends before the product of the last linear, because nobody needs it.
    """
    last = list(linears)[-1]
    of_inputs: dict[str, Moments] = {}
    current: list[tuple[torch.Tensor, Moments]] = []

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not current or current[0][0] is not args[0]:
                moments = of_inputs.setdefault(name, Moments(args[0].shape[-1], args[0].device))
                moments.add(args[0], mean=mean)
                current[:] = [(args[0], moments)]
            current[0][1].linears[name] = None
            if ending and name == last:
                raise PassEnded(args[0])

        return hook

    handles = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    collected: list[Moments] = []
    try:
        yield collected
        collected += of_inputs.values()
        assert linears.keys() == {name for each in collected for name in each.linears}, "the last one ran last"
    finally:
        for handle in handles:
            handle.remove()


# ModelOpt's search of AWQ scales, by the second moments of the inputs instead of input by input.
#
# Its search computes the outputs of a linear for each strength (alpha) and batch, and adds up their mean squared
# errors: of a batch of n inputs x, the sum of |D x|^2 / (n O), with D the difference of the weights. So one sum of
# x x^T / n tells the loss of every strength, up to the rounding of outputs to 16 bit.
#
# ModelOpt 0.37 and 0.47 are alike in what this relies on: while it calibrates, a linear has an `awq_lite`, which counts
# the batches of the first pass, and in the second one a `forward` that adds to the loss of each strength the mean
# square of what `_forward_no_awq` returns less the same without quantization. Neither pass rounds inputs or weights.


class AwqSearch:
    """The passes of a calibration through a model; those in which AWQ searches are replaced, others just run."""

    def __init__(self, *, rereads: bool) -> None:
        """Prepare.

        Args:
            rereads: whether the second pass has other inputs than the first one, because it rounds the KV cache.
        """
        self._rereads, self._moments = rereads, list[Moments]()

    def run(self, model: torch.nn.Module, run_pass: Callable[[], None]) -> None:
        """Run a pass if its inputs or outputs are needed, and search if it is the second one of AWQ."""
        linears: dict[str, Any] = {name: each for name, each in model.named_modules() if hasattr(each, "awq_lite")}
        searches = any(linear.awq_lite.num_cache_steps for linear in linears.values())
        if not linears or (self._rereads and not searches):
            run_pass()
            return
        if self._rereads or not searches:
            with _searching_nothing(linears if searches else {}), observed(linears, mean=True) as self._moments:
                run_pass()
        while searches and self._moments:
            moments = self._moments.pop()
            for name in moments.linears:
                _search(linears[name], moments)


@contextmanager
def _searching_nothing(linears: Mapping[str, Any]) -> Iterator[None]:
    """Let linears compute as they are while AWQ would search."""
    forwards = {name: linear.forward for name, linear in linears.items()}

    def forward(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
        linear.weight_quantizer.disable()
        output: torch.Tensor = linear._forward_no_awq(inputs)
        linear.weight_quantizer.enable()
        return output

    for linear in linears.values():
        linear.forward = partial(forward, linear)
    try:
        yield
    finally:
        for name, linear in linears.items():
            linear.forward = forwards[name]


def _search(linear: Any, moments: Moments) -> None:
    """Let ModelOpt search with one number for the outputs: the root of their mean squared error."""
    compute, weight_oi = linear._forward_no_awq, linear.weight

    def root(_: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(1, device=weight_oi.device)
        if not linear.weight_quantizer.is_enabled:
            return loss
        factor_i, used_oi = linear.input_quantizer.pre_quant_scale, linear.weight_quantizer(weight_oi)
        for used, weight in zip(torch.split(used_oi, _ROWS), torch.split(weight_oi, _ROWS), strict=True):
            loss += moments.error(used.float().mul_(factor_i).sub_(weight))
        return torch.sqrt(loss.div_(len(weight_oi)).clamp_(min=0))

    linear._forward_no_awq = root
    linear.forward(weight_oi)
    linear._forward_no_awq = compute
    for quantizer in (linear.input_quantizer, linear.weight_quantizer):  # left over from the last strength
        if hasattr(quantizer, "_pre_quant_scale"):
            del quantizer._pre_quant_scale
