"""A model quantized in one piece, as ModelOpt documents it: the oracle of the path that works layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipelines.compress import CalibrationSpec, QuantSpec
from pipelines.compress.specs import Layout
from pipelines.domain.progress import SilentProgress


def quantize_whole(
    model_dir: Path,
    out_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    device: str = "cpu",
    layout: Layout = "tensorrt_llm",
) -> None:
    """Load the whole model, calibrate it, export it, and correct config.json."""
    from pipelines.compress import modelopt_door
    from pipelines.compress.loading import look_at, pick_dtype, torch_dtype
    from pipelines.compress.postprocess import correct_export
    from pipelines.compress.quiet import muted, transformers_to_log
    from pipelines.compress.simulating import simulated
    from pipelines.compress.unified import correct_unified

    source = look_at(model_dir)
    dtype = pick_dtype(source, "auto")
    with muted(), transformers_to_log():
        model = simulated(source, spec, texts, calibration, dtype, device, SilentProgress()).model
        out_dir.mkdir(parents=True, exist_ok=True)
        if layout == "hugging_face":
            modelopt_door.export_unified(model, torch_dtype(dtype), out_dir)
            correct_unified(out_dir, source.config, dtype)
        else:
            family = source.shape.family
            modelopt_door.export(model, family, torch_dtype(dtype), out_dir, tp_size=tp_size, pp_size=pp_size)
            correct_export(out_dir, source.config, spec)
