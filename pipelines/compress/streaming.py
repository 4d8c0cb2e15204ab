"""Quantize a model layer by layer: memory holds one layer, however many the model has.

Calibration by ModelOpt is exact this way: each of its passes runs the layers one after another, and what it does
between passes and at the end concerns one layer at a time. So the inputs of a layer in a pass are the outputs of the
layer before it in the same pass, which `HiddenStates` keeps on disk. GPTQ calibrates a layer on the outputs of the
quantized layers before it: all its passes read the same inputs, and one more pass, through the quantized layer, writes
those of the next. The files are those of an export of the whole model, byte for byte.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.checkpoint.tensors import TensorInfo
from pipelines.compress.calibration import CalibrationSet
from pipelines.compress.checkpoint_layout import CheckpointLayout, TensorPlace, copy_vocabulary
from pipelines.compress.f32_products import f32_products
from pipelines.compress.hidden_states import HiddenStates, true_name
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.progress_record import ProgressRecord
from pipelines.compress.recipes import Config, of_one_layer
from pipelines.compress.simulating import check_calibrated, seed_everything
from pipelines.compress.weight_files import EMBEDDING, TensorWriter
from pipelines.domain.families import Family
from pipelines.domain.progress import Progress


class LayerQuantizer:
    """Calibrates one layer after another and exports each by ModelOpt."""

    def __init__(
        self, source: LayerSource, family: Family, config: Config | None, data: CalibrationSet | None, folder: Path
    ) -> None:
        """Prepare; nothing is computed.

        Args:
            source: the layers.
            family: of the model.
            config: ModelOpt's configuration; None leaves the layers in 16 bit.
            data: what to calibrate on; None if `config` is.
            folder: for hidden states; it exists.
        """
        self._source, self._family, self._config = source, family, config
        self._states = HiddenStates(folder, source, data) if data is not None else None
        self._sequential = config is not None and config is not of_one_layer(config)

    def export(self, number: int, layout: CheckpointLayout, exported: Path) -> None:
        """Calibrate layer `number`, the next one, and export it as a model of one layer.

        Raises:
            UserError: a weight, an activation or a scale is not finite; names the module.
        """
        from pipelines.compress import modelopt_door

        model = self._source.load(number)
        if self._states is not None and self._config is not None:
            self._states.drop_before(number)
            if number == 0:
                self._states.begin()
            passes = self._states.passes(number, write=not self._sequential)
            with f32_products():
                model = modelopt_door.simulate(model, of_one_layer(self._config), passes)
                if self._sequential:
                    self._states.passes(number)(model)
            check_calibrated(model, lambda name: true_name(name, number))
        layout.export(model, self._family, self._source.dtype, exported)


def quantize_layers(
    quantizer: LayerQuantizer,
    source: LayerSource,
    layout: CheckpointLayout,
    out_dir: Path,
    record: ProgressRecord,
    seed: int,
    progress: Progress,
) -> None:
    """Quantize every layer that `record` does not know yet, and write the checkpoint as ModelOpt would export it.

    Raises:
        UserError: as for `LayerQuantizer.export`; a file of the model ends early; the disk has too little space.
    """
    vocab_size = source.weights.shape(EMBEDDING)[0]
    exported, left = record.folder / "layer", source.layers - record.layers
    writer = layout.reopen(out_dir) if record.layers else None
    record.announce(source.layers, progress)
    with progress.task("quantizing", left, "layers") as advance, _frozen_heap():
        for number in range(record.layers, source.layers):
            shutil.rmtree(exported, ignore_errors=True)
            seed_everything(seed)  # so that a layer does not depend on whether the run was stopped before it
            began = time.monotonic()
            quantizer.export(number, layout, exported)
            if writer is None:
                writer = layout.create(exported, out_dir, vocab_size)
                _copy(writer, layout.others(exported))
                layout.finish(exported, out_dir)
            _copy(writer, layout.layer(exported, number))
            writer.sync()
            record.notes["seconds"] = record.notes.get("seconds", 0.0) + time.monotonic() - began
            record.complete(number + 1)
            advance(1)
            gc.collect()  # ModelOpt's modules refer to each other in cycles, which would keep several layers alive
    assert writer is not None, "a model has layers"
    copy_vocabulary(writer, source.weights, source.head, source.dtype, layout, vocab_size, progress)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep what is imported by now out of garbage collection, which walks through it in 0.3 s each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _copy(writer: TensorWriter, tensors: Iterable[tuple[TensorPlace, Path, TensorInfo]]) -> None:
    for place, path, info in tensors:
        writer.copy(place.file, place.name, path, info)
