"""Quantize a model folder by ModelOpt: calibrate, export, correct and describe."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.unified import describe_unified
from pipelines.compress import modelopt_door, transformers_door
from pipelines.compress.by_tensor import QuantizeTask
from pipelines.compress.calibration import ProgressRecord, calibrated_on, calibration_facts, new_files_removed, stamp
from pipelines.compress.checkpoint_layout import CheckpointLayout, FolderLayout, RanksLayout
from pipelines.compress.contexts import BATCHES, gpu_memory_named, muted
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.postprocess import correct_export
from pipelines.compress.simulating import LayerQuantizer, export, prepared, simulated
from pipelines.domain.families import settled
from pipelines.domain.progress import Progress
from pipelines.domain.rotary import both_spellings


def correct_unified(folder: Path, hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Correct config.json of a unified export so that every reader computes what was quantized; return its content.

    ModelOpt saves through Transformers, and Transformers 5 writes RoPE as `rope_parameters` only. Transformers 4.57,
    which TensorRT-LLM 1.2 pins, does not read that and would silently fall back to theta 10,000. Both styles are
    therefore written, and everything but the quantization comes from the source model's own config.json.
    """
    path = folder / "config.json"
    quantization = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    config = {**hf_config, "torch_dtype": dtype, "dtype": dtype, **both_spellings(settled(hf_config))}
    config |= {"quantization_config": quantization} if quantization else {}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def quantize_by_modelopt(task: QuantizeTask, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Calibrate and export; return the facts of the checkpoint."""
    source, spec = task.source, task.spec
    with muted():
        # a search compares all linears, and Transformers stores experts under other names than it computes with
        whole = spec.searches or source.shape.num_experts > 1
        way = _whole if whole else _by_layer
        with gpu_memory_named("quantizing", BATCHES):
            facts, record = way(task, out_dir, progress)
    unified = task.layout == "hugging_face"
    if unified:
        correct_unified(out_dir, source.config, task.dtype)
    else:
        correct_export(out_dir, source.config, spec)
    if record is not None:
        record.close()
    return {
        **(describe_unified(out_dir) if unified else describe(out_dir)),
        **facts,
        "device": task.device,
        "tool": {"nvidia-modelopt": modelopt_door.VERSION},
    }


def _by_layer(task: QuantizeTask, out_dir: Path, progress: Progress) -> tuple[dict[str, Any], ProgressRecord | None]:
    """Calibrate and export one layer after another, go on where a run was stopped; return facts and the record."""
    source, spec, (tp_size, pp_size, _) = task.source, task.spec, task.split
    config, data = prepared(task, progress)
    layers = LayerSource(source, task.dtype, task.device, rows=64 * tp_size)
    files: CheckpointLayout = RanksLayout(layers.layers, tp_size, pp_size)
    if task.layout == "hugging_face":
        files = FolderLayout(layers.layers)
    formats = [spec.quant.model_dump(mode="json"), spec.kv_cache]
    identity = {
        "quantize": [*formats, tp_size, pp_size, task.dtype, task.device, task.layout],
        "model": stamp(source),
        "calibration": calibrated_on(task.calibration, data),
        "tools": [modelopt_door.VERSION, torch.__version__, transformers_door.VERSION],
    }
    with new_files_removed(out_dir):
        record = ProgressRecord(out_dir, identity)
        LayerQuantizer(layers, task, config, data, record.folder).write(files, out_dir, record, progress)
    return {"calibration": calibration_facts(data, record.notes["seconds"])}, record


def _whole(task: QuantizeTask, out_dir: Path, progress: Progress) -> tuple[dict[str, Any], ProgressRecord | None]:
    """Calibrate and export the whole model in memory; return facts, with the record of a search and of experts."""
    began = time.monotonic()
    model, data, facts = simulated(task, progress)
    out_dir.mkdir(parents=True, exist_ok=True)
    with progress.task("exporting", None):
        export(model, task, out_dir, pp_size=task.split.pp_size)
    return {"calibration": calibration_facts(data, time.monotonic() - began), **facts}, None
