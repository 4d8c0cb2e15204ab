"""Calibrate the KV cache of a quantized folder whose weights are taken over.

Nothing but the cache is quantized: its scales are observed on the weights that the checkpoint holds, decoded. That is
exact where activations are not rounded, apart from the decoded weights being rounded to 16 bit.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pipelines.checkpoint.config_json import KV_SCALE
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.tensors import TensorFile
from pipelines.checkpoint.unified import linear_shapes
from pipelines.compress.by_tensor import LINEARS, QuantizeTask, Split
from pipelines.compress.calibration import CalibrationSet, seed_everything
from pipelines.compress.config import QuantSettings
from pipelines.compress.contexts import muted
from pipelines.compress.model_folder import ModelFolder, ModelWeights
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.simulating import LayerQuantizer, prepared
from pipelines.compress.specs import QuantSpec
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import PARTIAL, Progress


class DecodedWeights(ModelWeights):
    """The tensors of a model folder, with the linears of a checkpoint instead of those of its layers."""

    def __init__(self, source: ModelFolder, checkpoint: Checkpoint) -> None:
        """Compute which rows of which linear of the checkpoint, of one rank, each linear of the folder is."""
        super().__init__(source)
        self._checkpoint = checkpoint
        shapes = linear_shapes(source.shape)
        self._rows: dict[str, tuple[str, int, tuple[int, int]]] = {}
        for layer in range(source.shape.num_hidden_layers):
            for module, names in LINEARS.items():
                start = 0
                for name in names:
                    weight = f"model.layers.{layer}.{name}.weight"
                    self._rows[weight] = f"transformer.layers.{layer}.{module}", start, shapes[name]
                    start += shapes[name][0]

    def __contains__(self, name: str) -> bool:
        return name in self._rows or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._rows[name][2] if name in self._rows else super().shape(name)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Reject a folder without one of these tensors, or with one of another shape; see `ModelWeights.require`."""
        super().require({name: shape for name, shape in shapes.items() if name not in self._rows})

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a whole tensor; errors as for `ModelWeights.tensor`."""
        if name not in self._rows:
            return super().tensor(name, dtype)
        module, start, (rows, _) = self._rows[name]
        weight, smoothing = dequantize(self._checkpoint, module), f"{module}.prequant_scaling_factor"
        if smoothing in self._checkpoint:
            weight = weight * self._checkpoint.tensor(smoothing).astype("float32")
        return torch.from_numpy(weight[start : start + rows].copy()).to(dtype)


def calibrated_scales(
    task: QuantizeTask, out_dir: Path, progress: Progress
) -> tuple[dict[str, torch.Tensor], CalibrationSet | None]:
    """Return the scales of the KV cache under their names in the checkpoint, and what they were calibrated on.

    Args:
        task: the quantized folder, and what to calibrate the cache on.
        out_dir: the checkpoint, with all weights; hidden states are in it meanwhile.
        progress: shows the layers.
    """
    cache = replace(task, spec=QuantSpec(QuantSettings(qformat=QFormat.NONE), task.spec.kv_cache), split=Split())
    scales, folder = {}, out_dir / PARTIAL
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir()
    try:
        with muted():
            config, data = prepared(cache, progress)
            weights = DecodedWeights(task.source, Checkpoint(out_dir))
            layers = LayerSource(task.source, task.dtype, task.device, weights=weights)
            quantizer = LayerQuantizer(layers, cache, config, data, folder)
            exported = folder / "layer"
            with progress.task("calibrating the KV cache", layers.layers, "layers") as advance:
                for number in range(layers.layers):
                    seed_everything()
                    quantizer.export(number, exported)
                    file = TensorFile(exported / "rank0.safetensors")
                    for name in file:
                        if name.endswith(KV_SCALE):
                            ours = name.replace("layers.0.", f"layers.{number}.", 1)
                            scales[ours] = torch.from_numpy(file[name].copy())
                    shutil.rmtree(exported)
                    advance(1)
    finally:
        shutil.rmtree(folder)
    return scales, data
