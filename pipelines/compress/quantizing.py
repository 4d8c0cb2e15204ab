"""Quantize a model folder into a checkpoint folder: load, calibrate, check, export, correct."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.unified import describe_unified
from pipelines.compress.calibration import CalibrationSet, broken_at, forward_passes, layer_of, make_batches
from pipelines.compress.f32_products import f32_products
from pipelines.compress.loading import ModelFolder, load_model, load_tokenizer, look_at, pick_dtype, torch_dtype
from pipelines.compress.postprocess import correct_export
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.recipes import modelopt_config
from pipelines.compress.specs import CalibrationSpec, Dtype, Layout, QuantSpec
from pipelines.compress.unified import correct_unified
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress


@dataclass(slots=True)
class _Simulated:
    """A model that simulates its format, and how it was calibrated."""

    model: torch.nn.Module
    source: ModelFolder
    dtype: str
    device: str
    data: CalibrationSet | None
    seconds: float
    search: dict[str, Any] | None = None


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
    with muted() as quiet, transformers_to_log():
        from pipelines.compress import modelopt_door

        loud = quiet.progress(progress)
        done = _simulate(source, spec, texts, calibration, dtype, device, loud)
        out_dir.mkdir(parents=True, exist_ok=True)
        with loud.task("exporting", None):
            if layout == "hugging_face":
                modelopt_door.export_unified(done.model, torch_dtype(done.dtype), out_dir)
            else:
                modelopt_door.export(
                    done.model,
                    source.shape.family,
                    torch_dtype(done.dtype),
                    out_dir,
                    tp_size=tp_size,
                    pp_size=pp_size,
                )
    if layout == "hugging_face":
        correct_unified(out_dir, source.config, done.dtype)
    else:
        correct_export(out_dir, source.config, spec)
    return {
        **(describe_unified(out_dir) if layout == "hugging_face" else describe(out_dir)),
        "source_bytes": source.weight_bytes,
        "calibration": _calibration_facts(done),
        **({"search": done.search} if done.search else {}),
        "device": done.device,
        "tool": {"nvidia-modelopt": modelopt_door.VERSION},
    }


def run_simulate(
    model_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    dtype: Dtype,
    device: str,
    progress: Progress,
) -> torch.nn.Module:
    """See `pipelines.compress.api.fake_quantized_model`."""
    source = look_at(model_dir)
    with muted() as quiet, transformers_to_log():
        from pipelines.compress import modelopt_door

        done = _simulate(source, spec, texts, calibration, dtype, device, quiet.progress(progress))
        modelopt_door.merge_fused_scales(done.model, source.shape.family, torch_dtype(done.dtype))
    return done.model.requires_grad_(False)  # again: calibration replaces some weights with new parameters


def _simulate(
    source: ModelFolder,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    dtype: Dtype,
    device: str,
    progress: Progress,
) -> _Simulated:
    """Load the model, insert quantizers and calibrate them; a format without quantizers leaves it unchanged."""
    from pipelines.compress import modelopt_door

    seed_everything(calibration.seed)
    device = pick_device(device)
    for qformat in spec.formats:
        modelopt_door.check_format(qformat, device)
    if spec.search is not None:
        modelopt_door.check_scoring(spec.search.scoring)
    config = modelopt_config(spec, source.shape.family, modelopt_door.preset)
    data = search = None
    if config is not None or spec.search is not None:
        most = spec.search.most_texts if spec.search else calibration.size
        size = min(most, calibration.sequences_for(spec.qformat))
        data = make_batches(texts, load_tokenizer(source), calibration, size)
    picked = pick_dtype(source, dtype)
    with progress.task("loading the model", None):
        model = load_model(source, picked, device)
    begin = time.monotonic()
    if config is not None and data is not None:
        forward = forward_passes(data, progress, device)
        with f32_products():
            model = modelopt_door.simulate(model, config, forward)
        _check_calibrated(model)
    elif spec.search is not None and data is not None:
        from pipelines.compress.searching import search_mix

        model, search = search_mix(model, spec, source.shape.family, data, progress, device)
        _check_calibrated(model)
    return _Simulated(model, source, picked, device, data, time.monotonic() - begin, search)


def _check_calibrated(model: torch.nn.Module) -> None:
    """Reject scales that are not positive and finite.

    A group or channel of weights that is all zero (2:4 sparse models have some) has no scale of its own; it gets
    the largest scale of its layer, which is exact, because zero stays zero under any scale.

    Raises:
        UserError: a scale is not finite, or a whole layer's weights or inputs are zero; names the layer.
    """
    from pipelines.compress import modelopt_door

    for name, quantizer in modelopt_door.quantizers(model):
        amax = quantizer.amax
        if not all(torch.isfinite(scale).all() for scale in (amax, quantizer.pre_quant_scale) if scale is not None):
            raise broken_at(layer_of(name))
        if amax is None or (amax > 0).all():
            continue
        if not (amax > 0).any():
            raise UserError(
                f"The {'weights' if 'weight' in name else 'inputs'} of the layer '{layer_of(name)}' are all zero.",
                todo="No scale can be computed for them; check the model's weights.",
            )
        quantizer.amax = torch.where(amax > 0, amax, amax.max())


def pick_device(wanted: str) -> str:
    """Return "cuda" or "cpu"; "auto" selects CUDA if it is available.

    Raises:
        UserError: CUDA was requested but is not available, or the name is unknown.
    """
    has_cuda = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"device='{wanted}' is not known.", allowed="Choose one of auto, cpu, cuda.")
    if wanted == "cuda" and not has_cuda:
        raise UserError("device='cuda' is not available: this machine has no CUDA device.", todo="Set device=cpu.")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def seed_everything(seed: int) -> None:
    """Seed every generator that ModelOpt or torch may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # the global generator, because that is what ModelOpt draws from
    torch.manual_seed(seed)


def _calibration_facts(done: _Simulated) -> dict[str, Any]:
    if done.data is None:
        return {"sequences": 0, "tokens": 0, "seconds": 0.0}
    return {"sequences": done.data.sequences, "tokens": done.data.tokens, "seconds": round(done.seconds, 3)}
