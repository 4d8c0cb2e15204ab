"""Hidden states between two layers, on disk, and the passes that take them through a layer.

They are on disk because calibration with 512 sequences of 512 tokens has 2 GiB of them in an 8B model, and because a
run that was killed continues from them.

Shapes: B sequences, T tokens, H hidden size.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pipelines.compress.calibration import CalibrationSet, PassEnded, checked
from pipelines.compress.model_folder import FIRST, fill, raw
from pipelines.compress.moments import AwqSearch
from pipelines.compress.one_layer import LayerSource
from pipelines.host.files import sync


@contextmanager
def _ending_after(module: torch.nn.Module) -> Iterator[None]:
    """End every forward pass behind a module."""

    def end(_module: torch.nn.Module, _args: Any, states: torch.Tensor) -> None:
        raise PassEnded(states)

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

    def passes(
        self, number: int, *, write: bool = True, cache_alone: bool = False, rounds_cache: bool = False
    ) -> Callable[[Any], None]:
        """Return what ModelOpt calls to run a model of one layer, which is layer `number`, over all batches.

        Each call is the next pass. It keeps the outputs as inputs of the next layer if `write` is true. Otherwise only
        its effect on the quantizers counts, and it ends within the layer if those of the KV cache are the only ones.
        If they are among them (`rounds_cache`), the second pass differs from the first.

        Raises:
            UserError: raised by the function if an activation is NaN or infinite; names the first module.
        """
        runs, search = itertools.count(1), AwqSearch(rereads=rounds_cache)

        def forward(model: Any) -> None:
            run, layer = next(runs), model.model.layers[0]

            def run_pass() -> None:
                if write:
                    self.write(number + 1, run, self.outputs(layer, number, run))
                    return
                with _ending_after(layer.self_attn.v_bmm_quantizer) if cache_alone else nullcontext():
                    deque(self.outputs(layer, number, run), maxlen=0)

            with torch.no_grad():
                search.run(layer, run_pass)

        return forward

    def outputs(self, layer: torch.nn.Module, number: int, run: int) -> Iterator[torch.Tensor]:
        """Yield the outputs of layer `number` in pass `run`; errors as for `run_layer`."""
        for hidden in self.batches(number, run):
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
    """Return the outputs of a layer, [B, T, H], or the states at which a hook has ended the pass.

    Raises:
        UserError: an activation is NaN or infinite; names the first module.
    """

    def run() -> torch.Tensor:
        try:
            result = layer(hidden_bth, **arguments)
        except PassEnded as ended:
            return ended.states
        states: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return states

    return checked(layer, run, lambda name: f"model.layers.{number}.{name}", f"model.layers.{number}")


def true_name(name: str, number: int) -> str:
    """Return the name in the whole model of a module of layer `number` in a model of one layer."""
    return f"model.layers.{number}.{name.removeprefix(FIRST)}" if name.startswith(FIRST) else name
