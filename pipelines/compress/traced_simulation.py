"""ModelOpt's simulation of a format, in float32, to be watched as `traced.py` watches a model.

Shapes: O output channels, I input channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.compress.simulating import run_simulate
from pipelines.compress.specs import CalibrationSpec, Dtype, QuantSpec
from pipelines.compress.traced import PARTS, TracedModel
from pipelines.domain.progress import Progress

Array = np.ndarray[Any, Any]


class SimulatedModel(TracedModel):
    """A model with ModelOpt's quantizers, calibrated."""

    def linear(self, layer: int, part: str) -> Array:
        """Return the weight [O, I] that is multiplied: rounded, with the factors of the input channels undone."""
        module = self._module(layer, part)
        with torch.inference_mode():
            weight = module.weight_quantizer(module.weight)
        factors = self.smoothing(layer, part)
        found: Array = weight.numpy() * (1 if factors is None else factors)
        return found

    def smoothing(self, layer: int, part: str) -> Array | None:
        """Return the factor of each input channel [I] that AWQ or SmoothQuant found; None without."""
        factors = self._module(layer, part).input_quantizer.pre_quant_scale
        return None if factors is None else factors.detach().float().numpy()

    def largest_input(self, layer: int, part: str) -> float | None:
        """Return the largest input that the calibrated scale represents; None if inputs are not rounded."""
        return _bound(self._module(layer, part).input_quantizer)

    def largest_cached(self, layer: int, name: str) -> float | None:
        """Return the largest key ("k") or value ("v") that the KV cache's scale represents; None if it has none."""
        attention = self._model.model.layers[layer].self_attn
        return _bound(getattr(attention, f"{name}_bmm_quantizer", None))

    def _module(self, layer: int, part: str) -> Any:
        return self._model.model.layers[layer].get_submodule(PARTS[part])


def simulated(
    model_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    dtype: Dtype,
    progress: Progress,
) -> SimulatedModel:
    """Calibrate as `quantize` does, in the same type, and go on in float32.

    Raises:
        UserError: as for `pipelines.compress.api.quantize`.
    """
    model = run_simulate(model_dir, spec, texts, calibration, dtype=dtype, device="cpu", progress=progress)
    return SimulatedModel(model.float())


def _bound(quantizer: Any) -> float | None:
    if quantizer is None or not quantizer.is_enabled or quantizer.amax is None:
        return None
    return float(quantizer.amax.max())
