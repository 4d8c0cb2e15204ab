"""ModelOpt's search of AWQ scales, linear by linear instead of batch by batch.

Its search quantizes the weight of a linear once for each strength (alpha) and batch, although the batch makes no
difference to that weight: 32 times for 32 texts of different lengths. Here a pass through the layer only collects the
inputs of its linears; then each linear sees its inputs in turn, and a quantized weight is kept for the next of them.
The losses of a strength are added up in the order of the batches as before, so the result is the same to the bit.

ModelOpt 0.37 and 0.47 are alike in what this relies on: while it searches, a linear has an `awq_lite` with the `loss`
of each strength, a `forward` that adds to them, and `_forward_no_awq`, whose output without quantization it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STRENGTHS_AT_ONCE = 4
"""So many quantized weights of one linear are kept. Each further round of strengths computes the plain output again."""
INPUT_BYTES = 2**28
"""The linears are searched whenever so many bytes of inputs are collected."""


@contextmanager
def linear_by_linear(layer: torch.nn.Module) -> Iterator[None]:
    """Search after the passes of this context what they would have searched; does nothing unless AWQ searches."""
    linears = [module for module in layer.modules() if _is_searched(module)]
    if not linears:
        yield
        return
    search = _Search(linears)
    try:
        yield
        search.run()
    finally:
        search.end()


def _is_searched(module: torch.nn.Module) -> bool:
    """Return whether AWQ has seen the inputs of a linear in its first pass, and searches in this one."""
    return bool(getattr(getattr(module, "awq_lite", None), "num_cache_steps", 0))


class _Search:
    """Linears whose inputs are collected."""

    def __init__(self, linears: list[Any]) -> None:
        self._own = {linear: linear.forward for linear in linears}
        self._inputs: dict[Any, list[torch.Tensor]] = {linear: [] for linear in linears}
        self._bytes: dict[int, int] = {}
        self._first = linears[0]
        for linear in linears:
            linear.forward = self._collecting(linear)

    def _collecting(self, linear: Any) -> Any:
        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if linear is self._first and sum(self._bytes.values()) > INPUT_BYTES:
                self.run()  # a batch is complete
            self._inputs[linear].append(inputs)
            self._bytes[inputs.data_ptr()] = inputs.nbytes  # q, k and v have the same
            linear.weight_quantizer.disable()
            output: torch.Tensor = linear._forward_no_awq(inputs)
            linear.weight_quantizer.enable()
            return output

        return forward

    def run(self) -> None:
        """Search with what was collected, and forget it."""
        for linear, collected in self._inputs.items():
            _search(linear, self._own[linear], collected)
            collected.clear()
        self._bytes.clear()

    def end(self) -> None:
        """Give the linears back what they had."""
        for linear, forward in self._own.items():
            linear.forward = forward


def _search(linear: Any, forward: Any, inputs: list[torch.Tensor]) -> None:
    """Let ModelOpt search with each input, for some strengths at a time."""
    losses = linear.awq_lite.loss
    strengths = list(losses)
    for start in range(0, len(strengths), STRENGTHS_AT_ONCE):
        some = {strength: losses[strength] for strength in strengths[start : start + STRENGTHS_AT_ONCE]}
        linear.awq_lite.loss = some
        with _quantized_once(linear.weight_quantizer):
            for each in inputs:
                forward(each)
        losses.update(some)
    linear.awq_lite.loss = losses


@contextmanager
def _quantized_once(quantizer: Any) -> Iterator[None]:
    """Let a quantizer of one weight compute once for each scale of the input channels, which stands for a strength."""
    plain = quantizer.forward
    known: dict[bytes, torch.Tensor] = {}

    def forward(weight: torch.Tensor) -> torch.Tensor:
        scale = quantizer.pre_quant_scale
        if scale is None:  # the plain output is computed
            return weight
        key = scale.cpu().view(torch.int8).numpy().tobytes()
        if key not in known:
            known[key] = plain(weight)
        return known[key]

    quantizer.forward = forward
    try:
        yield
    finally:
        del quantizer.forward
