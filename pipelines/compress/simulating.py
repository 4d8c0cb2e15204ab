"""Simulate a format in a whole model held in memory: what is compared with checkpoints, and what they share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.compress.calibration import CalibrationSet, broken_at, forward_passes, layer_of, make_batches
from pipelines.compress.f32_products import f32_products
from pipelines.compress.loading import load_model, load_tokenizer
from pipelines.compress.model_folder import ModelFolder, look_at, pick_device, pick_dtype, torch_dtype
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.recipes import Config, modelopt_config
from pipelines.compress.specs import CalibrationSpec, Dtype, QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress


@dataclass(frozen=True, slots=True)
class WholeSimulation:
    """A model that simulates its format.

    Attributes:
        model: in Transformers, calibrated.
        data: what it was calibrated on; None if nothing was.
        search: record of the search that chose the format of each linear; None without.
    """

    model: torch.nn.Module
    data: CalibrationSet | None
    search: dict[str, Any] | None = None


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
    with muted(), transformers_to_log():
        from pipelines.compress import modelopt_door

        picked = pick_dtype(source, dtype)
        model = simulated(source, spec, texts, calibration, picked, pick_device(device), progress).model
        modelopt_door.merge_fused_scales(model, source.shape.family, torch_dtype(picked))
    return model.requires_grad_(False)  # again: calibration replaces some weights with new parameters


def simulated(
    source: ModelFolder,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    dtype: str,
    device: str,
    progress: Progress,
) -> WholeSimulation:
    """Load the model, insert quantizers and calibrate them; a format without quantizers leaves it unchanged."""
    from pipelines.compress import modelopt_door

    config, data = prepared(source, spec, texts, calibration, device, progress)
    search = None
    with progress.task("loading the model", None):
        model = load_model(source, dtype, device)
    if config is not None and data is not None:
        forward = forward_passes(data, progress, device)
        with f32_products():
            model = modelopt_door.simulate(model, config, forward)
        check_calibrated(model)
    elif spec.search is not None and data is not None:
        from pipelines.compress.searching import search_mix

        model, search = search_mix(model, spec, source.shape.family, data, progress, device)
        check_calibrated(model)
    return WholeSimulation(model, data, search)


def prepared(
    source: ModelFolder,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    device: str,
    progress: Progress,
) -> tuple[Config | None, CalibrationSet | None]:
    """Return ModelOpt's configuration, None without quantizers or for a search, and the batches to calibrate on.

    Raises:
        UserError: this ModelOpt does not support the format on this device, the texts are empty.
    """
    from pipelines.compress import modelopt_door

    seed_everything(calibration.seed)
    for qformat in spec.formats:
        modelopt_door.check_format(qformat, device, spec.int4_scales, spec.fp4_inputs)
    if spec.search is not None:
        modelopt_door.check_scoring(spec.search.scoring)
    config = modelopt_config(spec, source.shape.family, modelopt_door.preset)
    if config is None and spec.search is None:
        return None, None
    most = spec.search.most_texts if spec.search else calibration.size
    size = min(most, calibration.sequences_for(spec.qformat))
    if device == "cuda":
        modelopt_door.load_kernels(spec.formats, spec.kv_cache, progress)
    return config, make_batches(texts, load_tokenizer(source), calibration, size)


def check_calibrated(model: torch.nn.Module, shown: Callable[[str], str] = str) -> None:
    """Reject scales that are not positive and finite.

    A group or channel of weights that is all zero (2:4 sparse models have some) has no scale of its own; it gets
    the largest scale of its layer, which is exact, because zero stays zero under any scale.

    Args:
        model: after calibration; changed in place.
        shown: returns the name of a module in messages.

    Raises:
        UserError: a scale is not finite, or a whole layer's weights or inputs are zero; names the layer.
    """
    from pipelines.compress import modelopt_door

    for name, quantizer in modelopt_door.quantizers(model):
        amax = quantizer.amax
        if not all(torch.isfinite(scale).all() for scale in (amax, quantizer.pre_quant_scale) if scale is not None):
            raise broken_at(shown(layer_of(name)))
        if amax is None or (amax > 0).all():
            continue
        if not (amax > 0).any():
            raise UserError(
                f"The {'weights' if 'weight' in name else 'inputs'} of the layer "
                f"'{shown(layer_of(name))}' are all zero.",
                todo="No scale can be computed for them; check the model's weights.",
            )
        quantizer.amax = torch.where(amax > 0, amax, amax.max())


def seed_everything(seed: int) -> None:
    """Seed every generator that ModelOpt or torch may draw from."""
    random.seed(seed)
    np.random.seed(seed)  # the global generator, because that is what ModelOpt draws from
    torch.manual_seed(seed)
