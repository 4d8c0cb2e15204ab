"""Hidden states between two layers, on disk, and the passes that take them through a layer.

They are on disk because calibration with 512 sequences of 512 tokens has 2 GiB of them in an 8B model, and because a
run that was killed continues from them.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines.compress.calibration import CalibrationSet, broken_at, first_broken_layer
from pipelines.compress.model_folder import FIRST, fill, raw
from pipelines.compress.one_layer import LayerSource
from pipelines.host.files import sync

# ModelOpt's search of AWQ scales, linear by linear instead of batch by batch.
#
# Its search quantizes the weight of a linear once for each strength (alpha) and batch, although the batch makes no
# difference to that weight: 32 times for 32 texts of different lengths. Here a pass through the layer only collects
# the
# inputs of its linears; then each linear sees its inputs in turn, and a quantized weight is kept for the next of
# them.
# The losses of a strength are added up in the order of the batches as before, so the result is the same to the bit.
#
# ModelOpt 0.37 and 0.47 are alike in what this relies on: while it searches, a linear has an `awq_lite` with the
# `loss`
# of each strength, a `forward` that adds to them, and `_forward_no_awq`, whose output without quantization it
# returns.

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

    def passes(self, number: int, *, write: bool = True) -> LayerPasses:
        """Return the passes through layer `number`, which write the inputs of the next layer if `write` is true."""
        return LayerPasses(self, number, write)

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


class LayerPasses:
    """What ModelOpt calls to run the model over all batches; it runs the only layer, and may keep its outputs."""

    def __init__(self, states: HiddenStates, number: int, write: bool) -> None:
        self._states, self._number, self._write, self._runs = states, number, write, 0

    def __call__(self, model: Any) -> None:
        """Take the states of the next pass through the layer.

        Raises:
            UserError: an activation is NaN or infinite; names the first module.
        """
        self._runs += 1
        layer = model.model.layers[0]
        with torch.no_grad(), linear_by_linear(layer):
            outputs = self._outputs(layer)
            if self._write:
                self._states.write(self._number + 1, self._runs, outputs)
            else:
                deque(outputs, maxlen=0)  # only its effect on the quantizers counts

    def _outputs(self, layer: torch.nn.Module) -> Iterator[torch.Tensor]:
        for hidden in self._states.batches(self._number, self._runs):
            yield run_layer(layer, hidden, self._states.arguments(self._number, hidden), self._number)


def run_layer(layer: torch.nn.Module, hidden_bth: torch.Tensor, arguments: dict[str, Any], number: int) -> torch.Tensor:
    """Return the outputs of a layer, [B, T, H].

    Raises:
        UserError: an activation is NaN or infinite; names the first module.
    """

    def again() -> torch.Tensor:
        output = layer(hidden_bth, **arguments)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    try:
        output = again()
    except AssertionError as error:  # how ModelOpt's calibrators report an activation that is not finite
        if name := first_broken_layer(layer, again):
            raise broken_at(f"model.layers.{number}.{name}") from error
        raise
    if not torch.isfinite(output).all():
        raise broken_at(f"model.layers.{number}.{first_broken_layer(layer, again) or ''}".rstrip("."))
    return output


def true_name(name: str, number: int) -> str:
    """Return the name in the whole model of a module of layer `number` in a model of one layer."""
    return f"model.layers.{number}.{name.removeprefix(FIRST)}" if name.startswith(FIRST) else name
