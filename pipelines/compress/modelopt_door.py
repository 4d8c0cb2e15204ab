"""The only module that imports ModelOpt. Import it only where it is used, because it pulls in torch."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from pipelines.checkpoint.unified import fused_with
from pipelines.compress.calibration import Forward
from pipelines.compress.config import QuantSettings, Scoring
from pipelines.compress.recipes import Config
from pipelines.domain.errors import UserError, refuse
from pipelines.domain.families import Family
from pipelines.domain.formats import FORMATS, KvFormat, QFormat, version_faults
from pipelines.domain.progress import Progress


@contextmanager
def _lightly() -> Iterator[None]:
    """Spare nearly half of the import's time.

    PyTorch leaves functions as they are that torch.compile decorates: three of them would load Inductor.
    ModelOpt's 200 YAML files are read by libyaml where PyYAML has it. Transformers comes through its own door first.
    """
    disabled, loader = os.environ.get("TORCHDYNAMO_DISABLE"), yaml.SafeLoader
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", loader)  # type: ignore[misc]
    import_module("pipelines.compress.transformers_door")
    yield
    yaml.SafeLoader = loader  # type: ignore[misc]
    del os.environ["TORCHDYNAMO_DISABLE"]
    if disabled is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = disabled


with _lightly():
    import modelopt
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq
    import modelopt.torch.sparsity as mts
    from modelopt.torch.export import (
        export_hf_checkpoint,
        export_tensorrt_llm_checkpoint,
        quant_utils,
        torch_to_tensorrt_llm_checkpoint,
    )
    from modelopt.torch.quantization import extensions
    from modelopt.torch.quantization.algorithms import QuantRecipe

VERSION: str = modelopt.__version__

SPECK = 6e-8
"""The smallest number that every 16-bit type holds."""

KL_DIV_SINCE = (0, 47)
"""First of the two versions that this project is tested with whose auto_quantize scores by divergence."""


def check_supported(quant: QuantSettings, device: str) -> None:
    """Reject what this ModelOpt does not support on this device, before anything is calibrated.

    Raises:
        UserError: this ModelOpt does not know the way to find scales, or the way to judge
            candidates (kl_div before 0.47); or the device is a CPU, and this ModelOpt has no CPU path for a format
            (NVFP4 in 0.37).
    """
    version = tuple(int(part) for part in VERSION.split(".")[:2])
    refuse(version_faults(VERSION, quant.int4_scales, quant.fp4_inputs))
    for qformat in quant.formats:
        oldest = FORMATS[qformat].modelopt_on_cpu
        if device == "cpu" and version < oldest:
            raise UserError(
                f"quant={qformat} with nvidia-modelopt {VERSION} needs a CUDA device; the device is '{device}'.",
                allowed=f"On a CPU, {qformat} needs nvidia-modelopt {oldest[0]}.{oldest[1]}.0 or newer.",
                todo="Install a newer nvidia-modelopt, or choose another format.",
            )
    if quant.scoring == "kl_div" and version < KL_DIV_SINCE:
        raise UserError(
            f"quant.scoring={quant.scoring} is not known to nvidia-modelopt {VERSION}.",
            allowed="0.47.0 or newer has it; 0.37.0 has only gradient.",
            todo="Set quant.scoring=gradient, or install a newer nvidia-modelopt.",
        )


def load_kernels(qformats: Iterable[QFormat], kv_cache: KvFormat, progress: Progress) -> None:
    """Load ModelOpt's CUDA kernels for these formats; the first call compiles them, about a minute each.

    Otherwise ModelOpt compiles them silently during the first layer. If compilation fails, it computes the same with
    PyTorch's operators.
    """
    forms = [FORMATS[qformat] for qformat in qformats]
    kernels = {
        extensions.get_cuda_ext: kv_cache is KvFormat.INT8
        or any(form.weights.integer and not form.weights.at_build for form in forms),
        extensions.get_cuda_ext_fp8: kv_cache is KvFormat.FP8 or any(form.activation == "fp8" for form in forms),
    }
    loads = [load for load, needed in kernels.items() if needed]
    if not loads:
        return
    with progress.task("loading ModelOpt's CUDA kernels, compiled once for a machine", len(loads)) as advance:
        missing = False
        for load in loads:
            missing |= load() is None
            advance(1)
    if missing:
        progress.note("ModelOpt's CUDA kernels could not be compiled here; PyTorch computes the same, slower")


def preset(name: str) -> Config:
    """Return ModelOpt's configuration of this name; the caller must copy it before changing it."""
    config: Config = getattr(mtq, name)
    return config


def simulate(model: torch.nn.Module, config: Config, forward: Forward | None) -> torch.nn.Module:
    """Insert quantizers, calibrate them with `forward`, and return the same model, now simulating the format.

    Without `forward` only weights are looked at.

    SmoothQuant would fail on a column of zeros, which pruning can leave in weights. With alpha < 1 its scale is 0, and
    ModelOpt's code for that case indexes a vector with a mask of another shape (IndexError; `model_calib.py`, 0.37 and
    0.47). Such columns hold SPECK meanwhile and are zero again afterwards, so their scale becomes small, as it would
    without the fault.
    """
    algorithm = config["algorithm"]
    smooths = isinstance(algorithm, dict) and algorithm.get("method") == "smoothquant"
    linears = [module for module in model.modules() if smooths and isinstance(module, torch.nn.Linear)]
    columns = [(module, ~module.weight.data.any(dim=0)) for module in linears]
    for module, zero in columns:
        module.weight.data[:, zero] = SPECK
    try:
        quantized: torch.nn.Module = mtq.quantize(model, config, forward)
    finally:
        for module, zero in columns:
            module.weight.data[:, zero] = 0
    return quantized


def search(
    model: torch.nn.Module,
    configs: Mapping[QFormat, Config],
    batches: Iterable[Any],
    logits: Callable[[torch.nn.Module, Any], torch.Tensor],
    loss: Callable[[torch.Tensor, Any], torch.Tensor],
    *,
    effective_bits: float,
    scoring: Scoring,
    calibration_steps: int,
    scoring_steps: int,
) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Choose a format for each linear, and return the same model, now simulating the mix, and the choices.

    A choice is JSON-serializable: names of `linears` that share a format, the format `chosen` (`none` is 16 bit), their
    number of `weights`, and `scores`, the estimated damage of each format, only comparable within one search.

    Args:
        model: the 16-bit model.
        configs: ModelOpt's configuration of each candidate.
        batches: what the model reads; iterated over once for each pass.
        logits: runs the model on a batch.
        loss: the loss of those logits, for gradients.
        effective_bits: most bits per weight on average, over the linears of the layers.
        scoring: how candidates are judged.
        calibration_steps: batches to calibrate with; those whose algorithm is AWQ take a quarter.
        scoring_steps: batches to judge candidates with.

    Raises:
        UserError: no mix has so few bits.
    """
    # 0.37 knows no other scoring, and no argument for it
    options: dict[str, Any] = {"loss_func": loss} if scoring == "gradient" else {"method": scoring}
    quantized, state = mtq.auto_quantize(
        model,
        constraints={"effective_bits": _bits_with_head(model, effective_bits)},
        quantization_formats=list(configs.values()),
        data_loader=batches,
        forward_step=logits,
        disabled_layers=[_HEAD],
        num_calib_steps=calibration_steps,
        num_score_steps=scoring_steps,
        **options,
    )
    if not state["best"]["is_satisfied"]:
        raise UserError(
            f"ModelOpt's search found no mix of {', '.join(configs)} with at most {effective_bits:g} bits per weight.",
            todo="Raise quant.effective_bits.",
        )
    names = {  # a candidate has the name of a preset, or a number
        QuantRecipe.get_auto_name_for_config(config) or f"CUSTOM_{number}": qformat
        for number, (qformat, config) in enumerate(configs.items())
    }
    return quantized, _choices(quantized, state, names | {"NONE": QFormat.NONE})


_HEAD = "*lm_head*"


def _bits_with_head(model: torch.nn.Module, effective_bits: float) -> float:
    """Return the bound that ModelOpt must be given, whose average includes the head, which stays in 16 bit."""
    linears = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    head = sum(size for name, size in linears.items() if fnmatchcase(name, _HEAD))
    layers = sum(linears.values()) - head
    return (effective_bits * layers + 16 * head) / (layers + head)


def _choices(model: torch.nn.Module, state: Any, names: Mapping[str, QFormat]) -> list[dict[str, Any]]:
    """Translate ModelOpt's record of the search."""

    def ours(recipe: Any) -> str:
        return names[str(recipe).partition("(")[0]].value

    choices = []
    for name, stats in state["candidate_stats"].items():
        first = name.removesuffix(".quant_recipe")
        parent = model.get_submodule(first.rpartition(".")[0])
        linears = [each for each in fused_with(first) if hasattr(parent, each.rpartition(".")[2])]
        if any(fnmatchcase(linear, _HEAD) for linear in linears):
            continue
        scores = {ours(recipe): float(score) for recipe, score in zip(stats["formats"], stats["scores"], strict=True)}
        weights = sum(model.get_parameter(f"{linear}.weight").numel() for linear in linears)
        chosen = ours(state["best"]["recipe"][name])
        choices.append({"linears": linears, "chosen": chosen, "weights": weights, "scores": scores})
    return choices


def quantize_kv_cache(model: torch.nn.Module, config: Config, forward: Forward) -> None:
    """Add quantizers of the KV cache to a quantized model, and calibrate them alone; in place."""
    others = [quantizer for _, quantizer in quantizers(model)]
    for quantizer in others:
        quantizer.disable()
    mtq.set_quantizer_by_cfg(model, config["quant_cfg"])
    mtq.calibrate(model, "max", forward)
    for quantizer in others:
        quantizer.enable()


def rounded_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Return the linears whose weights are rounded, by name."""
    linears: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {name: linear for name, linear in linears.items() if linear.weight_quantizer.is_enabled}


@contextmanager
def unrounded(linears: Iterable[Any]) -> Iterator[None]:
    """Let linears compute with their weights as they are."""
    for linear in linears:
        linear.weight_quantizer.disable()
    yield
    for linear in linears:
        linear.weight_quantizer.enable()


def group_scales(linear: Any) -> torch.Tensor:
    """Return the scales of the groups of a linear's weight, float32 [G, O]."""
    quantizer = linear.weight_quantizer
    scales_go: torch.Tensor = quantizer.amax.reshape(len(linear.weight), -1).t().float() / quantizer.maxbound
    return scales_go


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
    with _vocabulary_unpadded(model), _packed_by_rows():
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
    with _packed_by_rows():
        export_hf_checkpoint(model, dtype=dtype, export_dir=out_dir)


@contextmanager
def _packed_by_rows() -> Iterator[None]:
    """Pack INT4 weights row by row: ModelOpt transposes them twice, which takes most of the time of an export."""
    plain = quant_utils.pack_int4_in_uint8

    def packed(weight: torch.Tensor, scales: torch.Tensor, *size: int) -> torch.Tensor:
        rows, columns = weight.shape[-2:]
        if weight.dim() != 2 or rows % 2 or columns % scales.shape[-1]:
            return plain(weight, scales, *size)  # type: ignore[no-any-return]
        groups = weight.reshape(rows, scales.shape[-1], -1) / scales[..., None]
        codes = groups.round_().clamp_(-8, 7).to(torch.int8).reshape(rows, columns)
        return ((codes[0::2] & 15) | (codes[1::2] << 4)).view(torch.uint8)

    quant_utils.pack_int4_in_uint8 = packed
    try:
        yield
    finally:
        quant_utils.pack_int4_in_uint8 = plain


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
    if family.modelopt_type is None:
        raise UserError(
            f"ModelOpt cannot export {family.architecture} to a TensorRT-LLM checkpoint.",
            allowed="Without it: quant=none, int8_wo, int4_wo, and int4_rtn with quant.int4_scales=max.",
            todo="To diagnose another format, set diagnose.simulate=false.",
        )
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
