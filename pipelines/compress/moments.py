"""Second moments of the inputs of linears: what GPTQ and AWQ need to know of calibration texts.

The squared error of a linear's outputs, with weights that differ by D from the true ones, is tr(D M D^T), with M the
sum of x x^T over its inputs x.

Shapes: n tokens, o output and i input channels.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from pipelines.compress.calibration import PassEnded
from pipelines.host.machine import trim_heap

_ROWS = 1024
"""Rows of a matrix that are computed at once; of moments, what is right of their last diagonal element is left out."""
_FEW = 256
"""Rows of moments that a weight is multiplied by at once."""
_LARGE = 2**24
"""Bytes of inputs after which freed memory is returned: blocks of this size leave holes that no larger one fits in."""
_AT_ONCE = 2**21
"""Elements of a weight whose rounding is compared at once: more do not stay in the processor's cache."""
_SAMPLES, _ROWS_AT_LEAST, _AT_LEAST = 16, 64, 2**18
"""Samples of a linear's outputs in which strengths of AWQ are compared; the fewest outputs and elements of one."""
_SURE = 5.0
"""Standard errors by which a strength must be worse than the best one to be given up before the last sample."""


class Moments:
    """The sum of x x^T over the inputs x of some linears."""

    def __init__(self, width: int, device: torch.device, *, means: bool = False) -> None:
        """Begin with no inputs.

        Args:
            width: input channels.
            device: of the inputs.
            means: whether to add the mean of each batch, so that it counts the same however many tokens it has. Few
                inputs are then kept as they are: errors of outputs cost less than by the sum.
        """
        self._width, self._device, self._means = width, device, means
        self._parts: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self.linears: dict[str, None] = {}

    def add(self, inputs: torch.Tensor) -> None:
        """Add inputs of another batch: [..., I]."""
        x_ni = inputs.reshape(-1, self._width)
        kept = self._means and not self._parts and sum(map(len, [*self._inputs, x_ni])) <= self._width // 2
        if not kept:
            self._sum()  # before there is a copy of the others
        if x_ni.nbytes >= _LARGE:
            trim_heap()
        self._inputs.append(x_ni.to(self._device, torch.float32, copy=True))
        if not kept:
            self._sum()

    def _sum(self) -> None:
        if not self._parts:
            stops = [*range(_ROWS, self._width, _ROWS), self._width]
            sizes = [(stop - (stop - 1) // _ROWS * _ROWS, stop) for stop in stops]
            self._parts = [torch.zeros(size, device=self._device) for size in sizes]
        for x_ni in self._inputs:
            for part in self._parts:
                rows, stop = part.shape
                part.addmm_(x_ni[:, stop - rows : stop].t(), x_ni[:, :stop], alpha=self._share(x_ni))
        self._inputs.clear()

    def _share(self, x_ni: torch.Tensor) -> float:
        return 1 / max(1, len(x_ni)) if self._means else 1

    def errors(self, weight_oi: torch.Tensor) -> torch.Tensor:
        """Return the sums of the squares of each output of these weights, float32 [O]; of means."""
        total_o = torch.zeros(len(weight_oi), device=self._device)
        for x_ni in self._inputs:
            total_o += (weight_oi @ x_ni.t()).square_().sum(dim=1).mul_(self._share(x_ni))
        for part in self._parts:
            first = part.shape[1] - len(part)
            for rows_ii in torch.split(part, _FEW):
                left_ii, square_ii = rows_ii[:, :first], rows_ii[:, first : first + len(rows_ii)]
                some_oi = weight_oi[:, first : first + len(rows_ii)]
                # what lies above the diagonal is the same as what lies below it
                product_oi = torch.addmm(some_oi @ square_ii.t(), weight_oi[:, :first], left_ii.t(), alpha=2)
                total_o += product_oi.mul_(some_oi).sum(dim=1)
                first += len(rows_ii)
        return total_o

    def take(self) -> torch.Tensor:
        """Return the lower triangle, float32 [I, I], above which is anything; nothing is kept."""
        sum_ii = torch.empty(self._width, self._width, device=self._device)
        while self._parts:
            rows, stop = self._parts[-1].shape
            sum_ii[stop - rows : stop, :stop] = self._parts.pop()
        return sum_ii


@contextmanager
def observed(
    linears: Mapping[str, torch.nn.Module], *, means: bool = False, ending: bool = False
) -> Iterator[list[Moments]]:
    """Collect the second moments of linears during the passes of this context: one for each input that they have.

    Args:
        linears: by name, in the order in which they run.
        means: see `Moments`.
        ending: whether a pass ends before the product of the last linear, because nobody needs it.
    """
    last = list(linears)[-1]
    of_inputs: dict[str, Moments] = {}
    current: list[tuple[torch.Tensor, Moments]] = []

    def watch(name: str, _module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not current or current[0][0] is not args[0]:
            moments = of_inputs.setdefault(name, Moments(args[0].shape[-1], args[0].device, means=means))
            moments.add(args[0])
            current[:] = [(args[0], moments)]
        current[0][1].linears[name] = None
        if ending and name == last:
            raise PassEnded(args[0])

    collected: list[Moments] = []
    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_pre_hook(partial(watch, name)))
        yield collected
        collected += of_inputs.values()
        assert linears.keys() == {name for each in collected for name in each.linears}, "the last one ran last"


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
            with _searching_nothing(linears if searches else {}), observed(linears, means=True) as self._moments:
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
    """Give ModelOpt the loss of the best strength, and infinity for those that are worse."""
    scales, copies = _scales(linear), dict[int, Any]()
    outputs = len(linear.weight)

    def losses(strength: int, rows_s: torch.Tensor) -> torch.Tensor:
        weight_si, (weight_scale_i, input_scale_i) = linear.weight[rows_s], scales[strength]
        if len(rows_s) not in copies:  # a quantizer is bound to the first shape that it sees
            copies[len(rows_s)] = copy.deepcopy(linear.weight_quantizer)
        quantizer = copies[len(rows_s)]
        quantizer.pre_quant_scale = weight_scale_i
        return moments.errors(quantizer(weight_si).float().mul_(input_scale_i).sub_(weight_si))

    if scales:
        # each sample has large rows and small ones, whose losses are as different
        order_o = torch.linalg.vector_norm(linear.weight, dim=1, dtype=torch.float32).argsort(descending=True)
        fewer = min(_SAMPLES, outputs // _ROWS_AT_LEAST, linear.weight.numel() // _AT_LEAST)
        samples = max(1, math.ceil(linear.weight.numel() / _AT_ONCE), fewer)
        best, least = least_mean(len(scales), [order_o[first::samples] for first in range(samples)], losses)
        for strength, alpha in enumerate(linear.awq_lite.loss):
            linear.awq_lite.loss[alpha] += least if strength == best else math.inf


def least_mean(
    means: int, samples: Sequence[torch.Tensor], values: Callable[[int, torch.Tensor], torch.Tensor]
) -> tuple[int, float]:
    """Return which of some means is the least, and its value as far as it was needed; of equal ones the first.

    Means are compared in one sample after another. One that is larger than the least by more than `_SURE` standard
    errors of their difference is given up, and the last one left needs no more samples. All samples together have no
    standard error.

    Args:
        means: their number, 1 or more.
        samples: indices of values, all different.
        values: returns those of mean number `number` at some indices, [S].
    """
    total, left = sum(map(len, samples)), {number: torch.empty(0, dtype=torch.float64) for number in range(means)}
    best = 0
    for sample_s in samples:
        left = {number: torch.cat([seen, values(number, sample_s).double().cpu()]) for number, seen in left.items()}
        best = min(left, key=lambda number: float(left[number].sum()))

        def worse(number: int, least: torch.Tensor = left[best], seen: dict[int, torch.Tensor] = left) -> bool:
            more = seen[number] - least
            error = more.std() * math.sqrt((1 - len(more) / total) / len(more))
            return bool(more.mean() > _SURE * error)

        left = {number: each for number, each in left.items() if not worse(number)}
        if len(left) == 1:
            break
    return best, float(left[best].mean())


def _scales(linear: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let ModelOpt search among equal outputs; return the scales of weights and inputs that it gives each strength.

    There are none if it does not search, because scales of the linear are not numbers.
    """
    compute, scales = linear._forward_no_awq, list[tuple[torch.Tensor, torch.Tensor]]()

    def record(_: torch.Tensor) -> torch.Tensor:
        quantizers = (linear.weight_quantizer, linear.input_quantizer)
        if quantizers[0].is_enabled:
            weight_scale, input_scale = (each.pre_quant_scale.clone() for each in quantizers)
            scales.append((weight_scale, input_scale))
        return torch.zeros(1, device=linear.weight.device)

    linear._forward_no_awq = record
    linear.forward(linear.weight)
    linear._forward_no_awq = compute
    for quantizer in (linear.input_quantizer, linear.weight_quantizer):  # left over from the last strength
        if hasattr(quantizer, "_pre_quant_scale"):
            del quantizer._pre_quant_scale
    return scales
