"""The only module that imports ModelOpt. Import it only where it is used, because it pulls in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.opt as mto
import modelopt.torch.quantization as mtq
import modelopt.torch.sparsity as mts
import torch
from modelopt.torch.export import (
    export_hf_checkpoint,
    export_tensorrt_llm_checkpoint,
    torch_to_tensorrt_llm_checkpoint,
)

from pipelines.compress.recipes import Config
from pipelines.domain.errors import UserError
from pipelines.domain.families import Family
from pipelines.domain.formats import FORMATS, QFormat

VERSION: str = modelopt.__version__

SPECK = 6e-8
"""The smallest number that every 16-bit type holds."""

Forward = Callable[[torch.nn.Module], None]


def check_format(qformat: QFormat, device: str) -> None:
    """Reject a format that this ModelOpt does not support on this device, before anything is calibrated.

    Raises:
        UserError: the device is a CPU, and this ModelOpt has no CPU path for the format (NVFP4 in 0.37).
    """
    oldest = FORMATS[qformat].modelopt_on_cpu
    if device == "cpu" and _version_tuple() < oldest:
        raise UserError(
            f"quant={qformat} with nvidia-modelopt {VERSION} needs a CUDA device; the device is '{device}'.",
            allowed=f"On a CPU, {qformat} needs nvidia-modelopt {oldest[0]}.{oldest[1]}.0 or newer.",
            todo="Install a newer nvidia-modelopt, or choose another format.",
        )


def _version_tuple() -> tuple[int, ...]:
    return tuple(int(part) for part in VERSION.split(".")[:2])


def preset(name: str) -> Config:
    """Return ModelOpt's configuration of this name; the caller must copy it before changing it."""
    config: Config = getattr(mtq, name)
    return config


def simulate(model: torch.nn.Module, config: Config, forward: Forward) -> torch.nn.Module:
    """Insert quantizers, calibrate them with `forward`, and return the same model, now simulating the format."""
    with _columns_not_all_zero(model, config):
        quantized: torch.nn.Module = mtq.quantize(model, config, forward)
    return quantized


@contextmanager
def _columns_not_all_zero(model: torch.nn.Module, config: Config) -> Iterator[None]:
    """Keep SmoothQuant from failing on weights with a column of zeros, which pruning can leave.

    With alpha < 1 the scale of such a column is 0, and ModelOpt's code for that case indexes a vector with a mask of
    another shape (IndexError; `model_calib.py`, 0.37 and 0.47). The columns hold SPECK meanwhile and are zero again
    afterwards, so their scale becomes small, as it would without the fault.
    """
    algorithm = config["algorithm"]
    smooths = isinstance(algorithm, dict) and algorithm.get("method") == "smoothquant"
    columns = list(_zero_columns(model)) if smooths else []
    for module, zero in columns:
        module.weight.data[:, zero] = SPECK
    try:
        yield
    finally:
        for module, zero in columns:
            module.weight.data[:, zero] = 0


def _zero_columns(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
    """Yield every linear with columns [I] that are all zero."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            zero = ~module.weight.data.any(dim=0)
            if zero.any():
                yield module, zero


def quantizers(model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield (name, quantizer) for every enabled quantizer of the model."""
    for name, module in model.named_modules():
        if isinstance(module, mtq.nn.TensorQuantizer) and module.is_enabled:
            yield name, module


def export(
    model: torch.nn.Module, family: Family, dtype: torch.dtype, out_dir: Path, *, tp_size: int, pp_size: int
) -> None:
    """Write config.json and rank{r}.safetensors, r = pp_rank * tp_size + tp_rank, exactly as ModelOpt exports them.

    The vocabulary is not padded, but config.json may state a larger size.
    """
    with _vocabulary_unpadded(model):
        export_tensorrt_llm_checkpoint(
            model,
            _decoder(family),
            dtype,
            out_dir,
            inference_tensor_parallel=tp_size,
            inference_pipeline_parallel=pp_size,
        )


def export_unified(model: torch.nn.Module, dtype: torch.dtype, out_dir: Path) -> None:
    """Write a Hugging Face folder whose linears are quantized, and hf_quant_config.json; no tokenizer."""
    export_hf_checkpoint(model, dtype=dtype, export_dir=out_dir)


def merge_fused_scales(model: torch.nn.Module, family: Family, dtype: torch.dtype) -> None:
    """Give q/k/v and gate/up the common scales that an export gives them; changes `model` in place.

    An export fuses those linears and makes them share scales. In a model that was calibrated but never exported,
    each still has its own scale, so the model would not compute what the checkpoint computes.
    """
    with _vocabulary_unpadded(model):
        ranks = torch_to_tensorrt_llm_checkpoint(
            model, _decoder(family), dtype, inference_tensor_parallel=1, inference_pipeline_parallel=1
        )
        for _ in ranks:
            pass


def _decoder(family: Family) -> str:
    """Return ModelOpt's name for the decoder.

    Raises:
        UserError: ModelOpt does not export this family.
    """
    if family.modelopt_type is None:
        raise UserError(f"ModelOpt cannot export {family.architecture} to a TensorRT-LLM checkpoint.")
    return family.modelopt_type


@contextmanager
def _vocabulary_unpadded(model: Any) -> Iterator[None]:
    """Keep the AWQ export from padding the vocabulary to a multiple of 64.

    Only an output head quantized with AWQ needs the padding, and ours never is. Padding fails with a tied head
    (AttributeError), and its zero rows win every greedy step in which all real logits are negative.
    The exporter decides by the size in the configuration, so that size is temporarily rounded up.
    """
    size = model.config.vocab_size
    model.config.vocab_size = -(-size // 64) * 64
    try:
        yield
    finally:
        model.config.vocab_size = size


def prune_by_magnitude(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Zero the two smallest of every four neighbouring inputs in the linears whose names match; in place, permanently.

    Args:
        model: the model to prune; it keeps no ModelOpt state afterwards.
        patterns: module names as `fnmatch` patterns; every other linear is left alone.
    """
    rules: dict[str, Any] = {"*": None} | {pattern: {} for pattern in patterns}
    mts.sparsify(model, [("sparse_magnitude", {"nn.Linear": rules, "nn.Conv2d": {"*": None}})])
    mts.export(model)
    mto.ModeloptStateManager.remove_state(model)
