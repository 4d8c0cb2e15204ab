"""Choose how a model folder becomes a checkpoint: taken over as it is quantized, copied in 16 bit, or by ModelOpt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.checkpoint.declarations import quantization_of
from pipelines.checkpoint.stored_linears import undeclared_faults
from pipelines.compress.calibration import calibration_facts
from pipelines.compress.model_folder import look_at, pick_device, pick_dtype
from pipelines.compress.specs import CalibrationSpec, Dtype, Layout, QuantSpec
from pipelines.domain.errors import UserError
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
    """See `pipelines.compress.api.quantize`. Each way imports what it needs: ModelOpt and Transformers take seconds."""
    source = look_at(model_dir)
    picked, device = pick_dtype(source, dtype), pick_device(device)
    if quantization_of(source.folder, source.config) is not None:
        if layout == "hugging_face":
            raise UserError(f"{model_dir} is already quantized; the PyTorch backend's export takes models in 16 bit.")
        from pipelines.compress.importing import import_folder

        facts = import_folder(
            source, out_dir, spec, tp_size * pp_size, picked, progress,
            texts=texts, calibration=calibration, device=device,
        )  # fmt: skip
        return {**facts, "source_bytes": source.weight_bytes}
    if faults := [*undeclared_faults(str(model_dir), model_dir)]:
        raise UserError.of(faults)
    if spec.sixteen_bit and layout != "hugging_face" and source.shape.family.modelopt_type is not None:
        from pipelines.compress.sixteen_bit import write_sixteen_bit

        facts = write_sixteen_bit(source, out_dir, spec, picked, tp_size, pp_size, progress)
        facts |= {"calibration": calibration_facts(None, 0.0), "device": "cpu", "tool": {}}
    else:
        from pipelines.compress.by_modelopt import QuantizeTask, quantize_by_modelopt

        asked = QuantizeTask(source, spec, texts, calibration, tp_size, pp_size, picked, device, layout)
        facts = quantize_by_modelopt(asked, out_dir, progress)
    # the files do not name the algorithm
    return {**facts, "qformat": str(spec.qformat), "source_bytes": source.weight_bytes}
