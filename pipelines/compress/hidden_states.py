"""Hidden states between two layers, on disk, and the passes that take them through a layer.

They are on disk because calibration with 512 sequences of 512 tokens has 2 GiB of them in an 8B model, and because a
run that was killed continues from them.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipelines.compress.calibration import CalibrationSet, checked
from pipelines.compress.model_folder import FIRST, fill, raw
from pipelines.compress.one_layer import LayerSource
from pipelines.host.files import sync

# ModelOpt's search of AWQ scales, linear by linear instead of batch by batch.
#
# Its search quantizes the weight of a linear once for each strength (alpha) and batch, although the batch makes no
# difference to that weight: 32 times for 32 texts of different lengths. Here a pass through the layer only collects the
# inputs of its linears; then each linear sees its inputs in turn, once for each strength. The quantized weight is kept
# for all inputs, the plain outputs for all strengths. The losses of a strength are added up in the order of the batches
# as before, so the result is the same to the bit.
#
# ModelOpt 0.37 and 0.47 are alike in what this relies on: while it searches, a linear has an `awq_lite` with the `loss`
# of each strength, a `forward` that adds to them, and `_forward_no_awq`, whose output without quantization it returns.

INPUT_BYTES = 2**28
"""The linears are searched whenever so many bytes of inputs are collected."""


@contextmanager
def linear_by_linear(layer: torch.nn.Module) -> Iterator[None]:
    """Search after the passes of this context what they would have searched; does nothing unless AWQ searches."""
    # those whose inputs AWQ has seen in its first pass, so that it searches in this one
    linears: list[Any] = [
        each for each in layer.modules() if getattr(getattr(each, "awq_lite", None), "num_cache_steps", 0)
    ]
    if not linears:
        yield
        return
    forwards = {linear: linear.forward for linear in linears}
    collected: dict[Any, list[torch.Tensor]] = {linear: [] for linear in linears}
    sizes: dict[int, int] = {}

    def search() -> None:
        for linear, inputs in collected.items():
            _search(linear, forwards[linear], inputs)
            inputs.clear()
        sizes.clear()

    def collect(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
        if linear is linears[0] and sum(sizes.values()) > INPUT_BYTES:
            search()  # a batch is complete
        collected[linear].append(inputs)
        sizes[inputs.data_ptr()] = inputs.nbytes  # q, k and v have the same
        linear.weight_quantizer.disable()
        output: torch.Tensor = linear._forward_no_awq(inputs)
        linear.weight_quantizer.enable()
        return output

    for linear in linears:
        linear.forward = partial(collect, linear)
    try:
        yield
        search()
    finally:
        for linear, forward in forwards.items():
            linear.forward = forward


def _search(linear: Any, forward: Any, inputs: list[torch.Tensor]) -> None:
    """Let ModelOpt search with each input, one strength after another."""
    losses, compute, plain = linear.awq_lite.loss, linear._forward_no_awq, dict[int, torch.Tensor]()

    def computed_once(x: torch.Tensor) -> torch.Tensor:
        if linear.weight_quantizer.is_enabled:
            quantized: torch.Tensor = compute(x)
            return quantized
        if id(x) not in plain:
            plain[id(x)] = compute(x)
        return plain[id(x)]

    linear._forward_no_awq = computed_once
    for strength in losses:
        linear.awq_lite.loss = {strength: losses[strength]}
        with _quantized_once(linear.weight_quantizer):
            for each in inputs:
                forward(each)
    linear.awq_lite.loss, linear._forward_no_awq = losses, compute
    for quantizer in (linear.input_quantizer, linear.weight_quantizer):  # left over from the last strength
        if hasattr(quantizer, "_pre_quant_scale"):
            del quantizer._pre_quant_scale


@contextmanager
def _quantized_once(quantizer: Any) -> Iterator[None]:
    """Let a quantizer of one weight compute once under a scale of the input channels, which stands for a strength."""
    plain = quantizer.forward
    quantized: list[torch.Tensor] = []

    def forward(weight: torch.Tensor) -> torch.Tensor:
        if quantizer.pre_quant_scale is None:  # the plain output is computed
            return weight
        if not quantized:
            quantized.append(plain(weight))
        return quantized[0]

    quantizer.forward = forward
    try:
        yield
    finally:
        del quantizer.forward


class _Ended(Exception):  # noqa: N818 - ends a forward pass, is not an error
    """Everything that a forward pass is for has been seen."""


@contextmanager
def _ending_after(module: torch.nn.Module) -> Iterator[None]:
    """End every forward pass behind a module."""

    def end(*_: Any) -> None:
        raise _Ended

    handle = module.register_forward_hook(end)
    try:
        yield
    finally:
        handle.remove()


class HiddenStates:
    """The inputs of one layer after another.

    A calibration may run the model several times, and its second pass may already round the KV cache; so the states of
    each pass are kept apart, as they would be in a model that is whole.
    """

    def __init__(self, folder: Path, source: LayerSource, data: CalibrationSet) -> None:
        """Use a folder that exists."""
        self._folder, self._source, self._data = folder, source, data

    def begin(self) -> None:
        """Compute the inputs of the first layer."""
        with self._path(0, 1).open("wb") as file:
            for batch in self._data.batches:
                file.write(raw(self._source.first_states(batch)))

    def passes(self, number: int, *, write: bool = True, cache_alone: bool = False) -> Callable[[Any], None]:
        """Return what ModelOpt calls to run a model of one layer, which is layer `number`, over all batches.

        Each call is the next pass. It keeps the outputs as inputs of the next layer if `write` is true. Otherwise only
        its effect on the quantizers counts, and it ends within the layer if those of the KV cache are the only ones.

        Raises:
            UserError: raised by the function if an activation is NaN or infinite; names the first module.
        """
        runs = itertools.count(1)

        def forward(model: Any) -> None:
            run, layer = next(runs), model.model.layers[0]
            with torch.no_grad(), linear_by_linear(layer):
                if write:
                    self.write(number + 1, run, self.outputs(layer, number, run))
                    return
                with _ending_after(layer.self_attn.v_bmm_quantizer) if cache_alone else nullcontext():
                    deque(self.outputs(layer, number, run), maxlen=0)

        return forward

    def outputs(self, layer: torch.nn.Module, number: int, run: int) -> Iterator[torch.Tensor]:
        """Yield the outputs of layer `number` in pass `run`; errors as for `run_layer`."""
        for hidden in self.batches(number, run):
            with suppress(_Ended):
                yield run_layer(layer, hidden, self.arguments(number, hidden), number)

    def batches(self, number: int, run: int) -> Iterator[torch.Tensor]:
        """Read the inputs of a layer in pass `run`, counted from 1: [B, T, H] each."""
        path = self._path(number, run)
        if not path.exists():  # every pass begins with the same states
            path = self._path(number, 1)
        with path.open("rb", buffering=0) as file:
            for batch in self._data.batches:
                hidden = torch.empty(*batch.shape, self._source.hidden_size, dtype=self._source.dtype)
                fill(file, raw(hidden), path, "hidden states")
                yield hidden.to(self._source.device)

    def arguments(self, number: int, hidden_bth: torch.Tensor) -> dict[str, Any]:
        """Return what layer `number` is called with besides these states."""
        return self._source.arguments(number, (hidden_bth.shape[0], hidden_bth.shape[1]))

    def write(self, number: int, run: int, batches: Iterator[torch.Tensor]) -> None:
        """Write the inputs of a layer in pass `run`, so that they survive a power failure."""
        path = self._path(number, run)
        with path.open("wb") as file:
            for hidden in batches:
                file.write(raw(hidden))
        sync(path)

    def drop_before(self, number: int) -> None:
        """Remove the states that layers before `number` needed."""
        for path in self._folder.glob("states-*"):
            if int(path.name.split("-")[1]) < number:
                path.unlink()

    def _path(self, number: int, run: int) -> Path:
        return self._folder / f"states-{number}-{run}"


def run_layer(layer: torch.nn.Module, hidden_bth: torch.Tensor, arguments: dict[str, Any], number: int) -> torch.Tensor:
    """Return the outputs of a layer, [B, T, H].

    Raises:
        UserError: an activation is NaN or infinite; names the first module.
    """

    def run() -> torch.Tensor:
        result = layer(hidden_bth, **arguments)
        states: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return states

    return checked(layer, run, lambda name: f"model.layers.{number}.{name}", f"model.layers.{number}")


def true_name(name: str, number: int) -> str:
    """Return the name in the whole model of a module of layer `number` in a model of one layer."""
    return f"model.layers.{number}.{name.removeprefix(FIRST)}" if name.startswith(FIRST) else name
