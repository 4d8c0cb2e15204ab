"""Hidden states between two layers, on disk, and the passes that take them through a layer.

They are on disk because calibration with 512 sequences of 512 tokens has 2 GiB of them in an 8B model, and because a
run that was killed continues from them.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipelines.compress.awq_search import linear_by_linear
from pipelines.compress.calibration import CalibrationSet, broken_at, first_broken_layer
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.weight_files import FIRST, fill, raw
from pipelines.host.files import sync


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
