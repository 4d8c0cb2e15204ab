"""Public functions of the package. They import heavy libraries when called, so importing this module is cheap."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compress.pruning_spec import PruningSpec
from pipelines.compress.specs import CalibrationSpec, Dtype, Layout, QuantSpec, RecoverySpec, SparsitySpec
from pipelines.domain.progress import Progress, SilentProgress

if TYPE_CHECKING:
    import torch

    from pipelines.checkpoint.read import Checkpoint
    from pipelines.compress.loading import ReferenceModel
    from pipelines.compress.traced import TracedModel

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
        dtype: type of the unquantized tensors; "auto" is the model's own, or bfloat16 for a float32 model.
        device: "cpu", "cuda", or "auto" (CUDA if available). CPU and CUDA round differently.
        layout: "hugging_face" writes ModelOpt's unified Hugging Face checkpoint instead, which is not split over ranks
            and has no tokenizer.
        progress: shows calibration batch by batch.

    Returns:
        JSON-serializable facts: those of `pipelines.checkpoint.describe` (`unified` for Hugging Face's layout), and
        the keys `calibration`, `source_bytes`, `tool`.

    Raises:
        UserError: the model, the format or the split is not supported, the texts are empty, or a value is
            not finite (the message names the layer).
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

    q/k/v and gate/up share their scales as they do in a checkpoint. For int8_wo and int4_wo, whose weights are
    only quantized when the engine is built, this is the 16-bit model.

    Raises:
        UserError: as for `quantize`.
    """
    from pipelines.compress.simulating import run_simulate

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

    Embeddings, norms and the output head stay dense. After writing, the zeros are counted again in the files.

    Args:
        model_dir: plain Hugging Face folder.
        out_dir: receives a complete Hugging Face folder; small files are hard-linked where possible.
        spec: the method.
        texts: calibration texts; the method "magnitude" does not read them.
        calibration: how many texts to use and how to cut them.
        device: "cpu", "cuda" or "auto".
        progress: shows calibration and layers.

    Returns:
        JSON-serializable facts: the number of pruned linears, their weights and zeros as counted in the written
        files, bytes, and for sparsegpt the remaining output error of each kind of linear.

    Raises:
        UserError: an input dimension is not a multiple of 4, the texts are empty, a value is not finite.
    """
    from pipelines.compress.sparsifying import run_sparsify

    return run_sparsify(
        model_dir, out_dir, spec, texts, calibration, device=device, progress=progress or SilentProgress()
    )


def prune_model(
    model_dir: Path,
    out_dir: Path,
    spec: PruningSpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Facts:
    """Remove MLP channels, attention heads or layers of a Hugging Face model.

    A stopped run goes on from the last complete layer, or from the last layer that was dropped.

    Args:
        model_dir: plain Hugging Face folder.
        out_dir: receives a complete Hugging Face folder whose config.json has the smaller sizes; files that do not
            change are hard-linked where possible.
        spec: the method and the sizes.
        texts: on which importance is observed.
        calibration: how many texts to use and how to cut them.
        device: "cpu", "cuda" or "auto".
        progress: shows layers.

    Returns:
        JSON-serializable facts: sizes, parameters and bytes before and after; for width the heads that stay and the
        share of importance that stays in each layer; for depth the dropped layers in order, and the loss after each.

    Raises:
        UserError: the model cannot be pruned to these sizes, the texts are empty, a value is not finite.
    """
    from pipelines.compress.pruning import run_prune

    return run_prune(model_dir, out_dir, spec, texts, calibration, device=device, progress=progress or SilentProgress())


def recover(
    model_dir: Path,
    teacher_dir: Path | None,
    out_dir: Path,
    spec: RecoverySpec,
    texts: Iterable[str],
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Facts:
    """Train a compressed Hugging Face model to win back what was lost.

    A stopped run goes on from the last look at texts that are not trained on. Of several processes, none is left when
    this returns.

    Args:
        model_dir: plain Hugging Face folder.
        teacher_dir: folder of the model to learn from; None trains on the texts.
        out_dir: receives a complete Hugging Face folder with files and types as before.
        spec: how to train.
        texts: to train on.
        device: "cpu", "cuda" or "auto".
        progress: shows steps.

    Returns:
        JSON-serializable facts: steps, losses before, during and after, tokens, bytes, and for a sparse model the
        zeros as counted in the written files.

    Raises:
        UserError: the texts are too short, the teacher has another tokenizer, or the model cannot be trained with low
            rank as it is asked for.
        ContinuableError: the loss is not finite, or one of several processes ended early.
    """
    from pipelines.compress.training_processes import run_recover

    return run_recover(
        model_dir, teacher_dir, out_dir, spec, texts, device=device, progress=progress or SilentProgress()
    )


def reference_model(model_dir: Path, device: str = "auto") -> ReferenceModel:
    """Load a Hugging Face model to be scored by Transformers itself, in float32.

    Raises:
        UserError: the folder is not a readable model, or the device does not exist.
    """
    from pipelines.compress.loading import ReferenceModel

    return ReferenceModel(model_dir, device)


def trace_model(model_dir: Path, dtype: str = "float32") -> TracedModel:
    """Load a Hugging Face model to be watched, on the CPU.

    Args:
        model_dir: plain Hugging Face folder.
        dtype: "float32", or a type of 16 bit to which every result is rounded.

    Raises:
        UserError: the folder is not a readable model.
    """
    from pipelines.compress.traced import original

    return original(model_dir, dtype)


def trace_checkpoint(model_dir: Path, checkpoint: Checkpoint) -> TracedModel:
    """Make the float32 model that a checkpoint describes: weights decoded, inputs and KV cache rounded.

    Args:
        model_dir: Hugging Face folder of the model; only what a checkpoint does not state is read from it.
        checkpoint: an open checkpoint.

    Raises:
        UserError: the checkpoint lacks a tensor.
    """
    from pipelines.compress.traced import decoded

    return decoded(model_dir, checkpoint)
