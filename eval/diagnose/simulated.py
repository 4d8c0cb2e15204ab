"""ModelOpt's simulation of the format against the model it was calibrated on: weights and scales, each by itself.

What is wrong here was lost by the calibration; what is wrong only in the checkpoint, which comes next, by the export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.diagnose import weights
from eval.diagnose.checkpoint import LARGEST_CACHED, LARGEST_CODE, LEAST_COVER, LEAST_KV, MOST_COVER, MOST_KV, cover
from eval.diagnose.examined import ACTIVATION, LINEARS, QKV, Examined
from eval.diagnose.linears import figure_of, measure, scale_of
from eval.diagnose.result import Finding, Place, StageResult
from pipelines.checkpoint.read import Checkpoint
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.progress import Progress

if TYPE_CHECKING:
    from pipelines.compress.specs import QuantSpec
    from pipelines.compress.traced import TracedModel
    from pipelines.compress.traced_simulation import SimulatedModel

Array = np.ndarray[Any, Any]
Inputs = Mapping[tuple[int, str], Array]

SAME_SCALE = 0.2
"""Relative difference of a scale from that of a second calibration, which another machine may round differently."""
OTHERWISE = "Calibrate on other texts (calibration.*), or choose another format."


def examine_simulation(
    simulated: SimulatedModel, model: TracedModel, spec: QuantSpec, inputs: Inputs, progress: Progress
) -> StageResult:
    """Compare a simulation with its model.

    Args:
        simulated: ModelOpt's, calibrated.
        model: what it was made from.
        spec: its format.
        inputs: largest magnitude of each input channel of each linear (`TracedModel.largest_inputs`).
        progress: counts layers.
    """
    found = Examined(todo=OTHERWISE)
    with progress.task("comparing ModelOpt's simulation", model.layers, "layers") as advance:
        for layer in range(model.layers):
            for module in LINEARS:
                parts = [f"{module}.{part}" for part in QKV] if module == "attention.qkv" else [module]
                for part in parts:
                    _linear(simulated, model, spec, (layer, part), inputs, found)
            if spec.kv_cache is not KvFormat.AUTO:
                _cached(simulated, spec.kv_cache, layer, inputs, found)
            advance(1)
    return found.result(Place.MODELOPT, f"{Place.ORIGINAL}: {found.tensors} weights and scales")


def compare_scales(checkpoint: Checkpoint, simulated: SimulatedModel) -> list[Finding]:
    """Compare the scales of activations in a checkpoint with those of the simulation that it was exported from.

    Not those of AWQ: it searches factors, and a search may end elsewhere on another machine.
    """
    form, found = FORMATS[checkpoint.config.qformat], Examined()
    if form.activation == "16bit" or form.tuning == "awq":
        return []
    for layer in range(simulated.layers):
        for module in LINEARS:
            name = f"transformer.layers.{layer}.{module}"
            scale = scale_of(checkpoint, name, ACTIVATION)
            largest = simulated.largest_input(layer, f"{module}.q" if module == "attention.qkv" else module)
            if scale is None or largest is None:
                continue
            ratio = float(scale.reshape(-1)[0]) * LARGEST_CODE[form.activation] / largest
            if abs(ratio - 1) > SAME_SCALE:
                cause = f"the scale is {ratio:.3g} times that of ModelOpt's calibration"
                found.add(layer, f"{name}.{ACTIVATION}", f"{ratio:.3g} x", cause)
    return found.findings


def _linear(
    simulated: SimulatedModel,
    model: TracedModel,
    spec: QuantSpec,
    at: tuple[int, str],
    inputs: Inputs,
    found: Examined,
) -> None:
    """Compare the weight of one linear, and the scale of its input."""
    layer, part = at
    name, form, smoothing = f"layers.{layer}.{part}", FORMATS[spec.qformat], simulated.smoothing(layer, part)
    source, decoded = model.linear(layer, part), simulated.linear(layer, part)
    measured, expected = measure(source, decoded, smoothing, form, spec.group_size)
    found.saw(f"{name}.weight", measured.ratio)
    if measured.suspicious:
        cause = weights.explain(weights.Suspect(source, decoded, expected), ())
        found.add(layer, f"{name}.weight", figure_of(measured), cause)
    largest = simulated.largest_input(layer, part)
    if largest is None:
        return
    seen = inputs[layer, part] * (1 if smoothing is None else np.abs(smoothing))
    ratio = largest / max(float(seen.max()), 1e-30)
    cover(f"{name}.{ACTIVATION}", layer, ratio, (LEAST_COVER, MOST_COVER), found, "an input")


def _cached(simulated: SimulatedModel, form: KvFormat, layer: int, inputs: Inputs, found: Examined) -> None:
    for name in ("k", "v"):
        largest = simulated.largest_cached(layer, name)
        # without a scale of its own, ModelOpt's cache has the scale 1
        ratio = (LARGEST_CACHED[form] if largest is None else largest) / max(float(inputs[layer, name].max()), 1e-30)
        cover(f"layers.{layer}.attention.{name}", layer, ratio, (LEAST_KV, MOST_KV[form]), found, "a key or value")
