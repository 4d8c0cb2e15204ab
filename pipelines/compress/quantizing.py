"""Choose how a model folder becomes a checkpoint: taken over as it is quantized, tensor by tensor, or by ModelOpt."""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.checkpoint.declarations import quantization_of
from pipelines.checkpoint.stored_linears import sixteen_bit_faults
from pipelines.compress.by_tensor import QuantizeTask, Split, write_by_tensor
from pipelines.compress.config import CalibrationSettings
from pipelines.compress.importing import import_folder
from pipelines.compress.model_folder import look_at, pick_device, pick_dtype
from pipelines.compress.specs import Layout, QuantSpec
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.progress import SILENT, Progress


def quantize(
    model_dir: Path,
    out_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSettings,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    moe_ep_size: int = 1,
    device: str = "auto",
    layout: Layout = "tensorrt_llm",
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Calibrate a Hugging Face model and write a TensorRT-LLM checkpoint.

    The same inputs produce the same bytes. `out_dir` is created and receives config.json and one
    rank{r}.safetensors per rank (r = pp_rank * tp_size + tp_rank); after an error it may contain only some of them.

    Args:
        model_dir: plain Hugging Face folder: config.json, tokenizer, *.safetensors.
        out_dir: where to write; nothing outside it is touched.
        spec: format of weights, activations and KV cache.
        texts: calibration texts; only as many as needed are read, and none for formats without calibration.
        calibration: how many texts to use and how to cut them.
        tp_size: tensor-parallel ranks of the engine that will be built.
        pp_size: pipeline stages of the engine that will be built.
        moe_ep_size: parts of the tensor-parallel ranks between which the experts of a mixture are divided.
        device: "cpu", "cuda", or "auto" (CUDA if available). CPU and CUDA round differently.
        layout: "hugging_face" writes ModelOpt's unified checkpoint instead, which has one part and no tokenizer.
        progress: shows calibration batch by batch.

    Returns:
        JSON-serializable facts: those of `pipelines.checkpoint.describe` (`unified` for Hugging Face's layout), and
        the keys `calibration`, `source_bytes`, `tool`.

    Raises:
        UserError: the model, the format or the split is not supported, the texts are empty, or a value of a layer is
            not finite.
    """
    source, split = look_at(model_dir), Split(tp_size, pp_size, moe_ep_size)
    picked, device = pick_dtype(source, spec.quant.dtype), pick_device(device)
    task = QuantizeTask(source, spec, texts, calibration, split, picked, device, layout)
    if quantization_of(source.folder, source.config) is not None:
        if layout == "hugging_face":
            raise UserError(f"{model_dir} is already quantized; the PyTorch backend's export takes models in 16 bit.")
        return {**import_folder(task, out_dir, progress), "source_bytes": source.weight_bytes}
    refuse(sixteen_bit_faults(str(model_dir), model_dir, source.config))
    family = source.shape.family
    exported = family.modelopt_type is not None or family.by_tensor
    if spec.by_tensor and layout != "hugging_face" and exported:
        facts = write_by_tensor(task, out_dir, progress)
    else:
        facts = _by_modelopt(task, out_dir, progress)
    # the files do not name the algorithm
    return {**facts, "qformat": str(spec.quant.qformat), "source_bytes": source.weight_bytes}


def _by_modelopt(task: QuantizeTask, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Quantize with ModelOpt; it exports mixtures in Hugging Face's layout alone, so these are converted from it."""
    from pipelines.compress.by_modelopt import quantize_by_modelopt

    if not task.source.shape.family.experts or task.layout == "hugging_face":
        return quantize_by_modelopt(task, out_dir, progress)
    unified = out_dir / "hugging_face"
    facts = quantize_by_modelopt(replace(task, layout="hugging_face", split=Split()), unified, progress)
    taken = import_folder(replace(task, source=look_at(unified), texts=()), out_dir, progress)
    shutil.rmtree(unified)
    return {**facts, **taken, **{name: facts[name] for name in ("calibration", "tool")}}
