"""Quantize a model folder into a checkpoint folder: calibrate and export layer by layer, correct, describe."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.unified import describe_unified
from pipelines.compress.calibration import CalibrationSet
from pipelines.compress.checkpoint_layout import CheckpointLayout, FolderLayout, RanksLayout
from pipelines.compress.loading import ModelFolder, look_at, pick_dtype
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.postprocess import correct_export
from pipelines.compress.progress_record import ProgressRecord, new_files_removed
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.simulating import pick_device, prepared
from pipelines.compress.specs import CalibrationSpec, Dtype, Layout, QuantSpec
from pipelines.compress.streaming import LayerQuantizer, quantize_layers
from pipelines.compress.unified import correct_unified
from pipelines.compress.weight_files import raw
from pipelines.domain.progress import Progress


def run_quantize(
    model_dir: Path,
    out_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    tp_size: int,
    pp_size: int,
    dtype: Dtype,
    device: str,
    layout: Layout,
    progress: Progress,
) -> dict[str, Any]:
    """See `pipelines.compress.api.quantize`."""
    source = look_at(model_dir)
    picked, device = pick_dtype(source, dtype), pick_device(device)
    with muted() as quiet, transformers_to_log():
        from pipelines.compress import modelopt_door

        config, data = prepared(source, spec, texts, calibration, device)
        layers = LayerSource(source, picked, device, rows=64 * tp_size)
        unified = layout == "hugging_face"
        files: CheckpointLayout = (
            FolderLayout(layers.layers) if unified else RanksLayout(layers.layers, tp_size, pp_size)
        )
        identity = {
            "quantize": [asdict(spec), asdict(calibration), tp_size, pp_size, picked, device, layout],
            "model": _stamp(source),
            "tokens": _tokens(data),
            "tools": [modelopt_door.VERSION, torch.__version__, transformers.__version__],
        }
        with new_files_removed(out_dir):
            record = ProgressRecord(out_dir, identity)
            quantizer = LayerQuantizer(layers, source.shape.family, config, data, record.folder)
            quantize_layers(quantizer, layers, files, out_dir, record, calibration.seed, quiet.progress(progress))
    if unified:
        correct_unified(out_dir, source.config, picked)
    else:
        correct_export(out_dir, source.config, spec)
    seconds = record.notes["seconds"]
    record.close()
    return {
        **(describe_unified(out_dir) if unified else describe(out_dir)),
        "source_bytes": source.weight_bytes,
        "calibration": _calibration_facts(data, seconds),
        "device": device,
        "tool": {"nvidia-modelopt": modelopt_door.VERSION},
    }


def _stamp(source: ModelFolder) -> list[object]:
    """Return what changes when someone changes the model folder, without reading the weights."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.weight_files]
    return [source.config, files]


def _tokens(data: CalibrationSet | None) -> str:
    """Return a digest of the calibration batches."""
    digest = hashlib.sha256()
    for batch in data.batches if data is not None else ():
        digest.update(repr(tuple(batch.shape)).encode())
        digest.update(raw(batch))
    return digest.hexdigest()


def _calibration_facts(data: CalibrationSet | None, seconds: float) -> dict[str, Any]:
    if data is None:
        return {"sequences": 0, "tokens": 0, "seconds": 0.0}
    return {"sequences": data.sequences, "tokens": data.tokens, "seconds": round(seconds, 3)}
