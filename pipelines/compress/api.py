"""What the rest of the project calls. Everything heavy is imported inside, so importing this costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compress.specs import CalibrationSpec, Dtype, Layout, QuantSpec, SparsitySpec
from pipelines.domain.progress import Progress, SilentProgress

if TYPE_CHECKING:
    import torch

Facts = dict[str, Any]


def quantize(
    model_dir: Path,
    out_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    dtype: Dtype = "auto",
    device: str = "auto",
    layout: Layout = "tensorrt_llm",
    progress: Progress | None = None,
) -> Facts:
    """Calibrate a Hugging Face model and write a TensorRT-LLM checkpoint.

    The same inputs give the same bytes. `out_dir` is created and gets config.json and one
    rank{r}.safetensors per rank (r = pp_rank * tp_size + tp_rank); after an error it may hold a part of it.

    Args:
        model_dir: plain Hugging Face folder: config.json, tokenizer, *.safetensors.
        out_dir: where to write; nothing outside it is touched.
        spec: format of weights, activations and KV cache.
        texts: calibration texts, read only as far as needed, and not at all by formats without calibration.
        calibration: how many, how long.
        tp_size: tensor-parallel ranks of the engine to come.
        pp_size: pipeline stages of the engine to come.
        dtype: type of what stays unquantized; "auto" is the model's own, bfloat16 for a float32 model.
        device: "cpu", "cuda", or "auto": CUDA when there is one. The two round differently.
        layout: "hugging_face" writes ModelOpt's unified Hugging Face checkpoint instead, which is not split over ranks
            and has no tokenizer.
        progress: shows calibration batch by batch.

    Returns:
        JSON-able facts: see `pipelines.checkpoint.describe` (`unified` for Hugging Face's layout), and keys
        `calibration`, `source_bytes`, `tool`.

    Raises:
        UserError: the model, the format or the split cannot work, the texts are empty, or a value is
            not finite (the layer is named).
    """
    from pipelines.compress.quantizing import run_quantize

    return run_quantize(
        model_dir,
        out_dir,
        spec,
        texts,
        calibration,
        tp_size=tp_size,
        pp_size=pp_size,
        dtype=dtype,
        device=device,
        layout=layout,
        progress=progress or SilentProgress(),
    )


def fake_quantized_model(
    model_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> torch.nn.Module:
    """Return the torch model that computes what the checkpoint of `quantize` computes, simulated by ModelOpt.

    q/k/v and gate/up share their scales as they do in a checkpoint. For int8_wo and int4_wo, which the
    engine build quantizes, the model is the 16-bit one.

    Raises:
        UserError: as `quantize`.
    """
    from pipelines.compress.quantizing import run_simulate

    return run_simulate(
        model_dir, spec, texts, calibration, dtype=dtype, device=device, progress=progress or SilentProgress()
    )


def sparsify(
    model_dir: Path,
    out_dir: Path,
    spec: SparsitySpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Facts:
    """Make a Hugging Face model 2:4 sparse along the input dimension of every layer's linears.

    Embeddings, norms and the output head stay dense. The zeros are counted again in the written files.

    Args:
        model_dir: plain Hugging Face folder.
        out_dir: gets a complete Hugging Face folder; small files are hard-linked where possible.
        spec: the method.
        texts: calibration texts; the method "magnitude" does not read them.
        calibration: how many, how long.
        device: "cpu", "cuda" or "auto".
        progress: shows calibration and layers.

    Returns:
        JSON-able facts: linears made sparse, weights and zeros in them as counted in the written files,
        bytes, and for sparsegpt the error left in the outputs of each kind of linear.

    Raises:
        UserError: an input dimension is not a multiple of 4, the texts are empty, a value is not finite.
    """
    from pipelines.compress.sparsifying import run_sparsify

    return run_sparsify(
        model_dir, out_dir, spec, texts, calibration, device=device, progress=progress or SilentProgress()
    )
