"""Compare a checkpoint with its source model: configuration, weights, scales and norms, one by one.

A quantized model answers differently, so its answers prove nothing. What proves something is each tensor: decoded, it
must be the model's own weight but for the error that its format has at best; a scale of activations must cover what the
layer sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.diagnose.arithmetic import ROUNDED_ONCE, Suspect, explain, reversed_blocks
from eval.diagnose.linears import Part, compare_linear, figure_of, measure, scale_of
from eval.diagnose.result import ACTIVATION, LINEARS, PREQUANT, QKV, Examined, Finding, Place, StageResult
from pipelines.checkpoint.read import Checkpoint
from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import FORMATS, Activation, KvFormat
from pipelines.domain.progress import Progress
from pipelines.engines.openvino.rope import attention_factor, inverse_frequencies

if TYPE_CHECKING:
    from pipelines.compress.simulating import SimulatedModel
    from pipelines.compress.specs import QuantSpec
    from pipelines.compress.traced import TracedModel

Array = np.ndarray[Any, Any]

LARGEST_CODE: Mapping[Activation, float] = {"fp8": 448.0, "int8": 127.0, "fp4": 6 * 448.0}
LARGEST_CACHED: Mapping[KvFormat, float] = {KvFormat.FP8: 448.0, KvFormat.INT8: 127.0}
LEAST_COVER, MOST_COVER = 0.05, 12.0
"""Largest value that a scale represents, in units of the largest that was seen; calibration saw other
texts, and rare outliers decide (0.106 was measured after calibration on 16 short texts)."""
LEAST_KV = 0.12
MOST_KV: Mapping[KvFormat, float] = {KvFormat.FP8: 1e4, KvFormat.INT8: 3.0}
"""Likewise for keys and values. FP8 keeps its digits under any scale, and exporters store 1 for it; INT8 does not."""
SAME_FREQUENCIES = 1e-5
SAME_NUMBER = 1e-6
ACTS = {"gelu_pytorch_tanh": "gelu"}
"""Hugging Face's name of an activation function -> TensorRT-LLM's."""


def examine(
    checkpoint: Checkpoint,
    model: TracedModel,
    inputs: Mapping[tuple[int, str], Array],
    progress: Progress,
    *,
    rounded: bool = False,
) -> StageResult:
    """Compare a checkpoint with its model.

    Args:
        checkpoint: an open checkpoint.
        model: what it was made from.
        inputs: largest magnitude of each input channel of each linear (`TracedModel.largest_inputs`).
        progress: counts layers.
        rounded: see `DiagnosedFolders`.
    """
    examined = Examined(rounded=rounded)
    _configuration(checkpoint, model, examined)
    # with another number of heads or layers, tensors cannot be told apart
    if not examined.findings:
        try:
            _plain(checkpoint, model, "transformer.vocab_embedding", None, examined)
            with progress.task("comparing the checkpoint", model.layers, "layers") as advance:
                for layer in range(model.layers):
                    _layer(checkpoint, model, layer, inputs, examined)
                    advance(1)
            _plain(checkpoint, model, "transformer.ln_f", None, examined)
            _head(checkpoint, model, examined)
        except UserError as error:
            cause = f"the checkpoint cannot be read as its config.json says: {error.faults[0].message}"
            examined.add(None, "files", "unreadable", cause)
    return examined.result(Place.CHECKPOINT, f"{Place.ORIGINAL}: configuration and {examined.tensors} tensors")


def _configuration(checkpoint: Checkpoint, model: TracedModel, examined: Examined) -> None:
    ours, facts = checkpoint.config, model.facts()
    stated = {name: getattr(ours, name, ours.raw.get(name, 1.0)) for name in facts} | {
        "attn_bias": bool(ours.raw.get("attn_bias")),
        "mlp_bias": bool(ours.raw.get("mlp_bias")),
        "sliding_window": ours.raw.get("sliding_window"),
    }
    facts["hidden_act"] = ACTS.get(facts["hidden_act"], facts["hidden_act"])
    stated["hidden_act"] = ACTS.get(str(stated["hidden_act"]), stated["hidden_act"])
    for name, right in facts.items():
        stored: Any = stated[name]
        same = abs(stored - right) <= SAME_NUMBER * abs(right) if isinstance(right, float) else stored == right
        if not same:
            examined.add(None, f"config.json {name}", f"{stored}", f"it is {stored}, the model has {right}")
    if examined.findings:
        return
    right, stored = model.inverse_frequencies(), inverse_frequencies(checkpoint.config)
    wrong = float(np.abs(stored / right - 1).max())
    examined.saw("config.json rotary_base", wrong / SAME_FREQUENCIES)
    scale, factor = model.rotary_factor(), attention_factor(checkpoint.config)
    if abs(factor / scale - 1) > SAME_FREQUENCIES:
        cause = f"rotated queries and keys are multiplied by {factor:.5g}, in the model by {scale:.5g}"
        examined.add(None, "config.json rotary_scaling", f"{factor:.5g}", cause)
    if wrong <= SAME_FREQUENCIES:
        return
    ratio = stored / right
    if np.allclose(ratio, ratio[0]):
        name, cause = "rotary_scaling", f"all rotary angles are {1 / ratio[0]:.4g} times too small"
    elif abs(ratio[0] - 1) < SAME_FREQUENCIES and np.allclose(np.diff(np.log(ratio)), np.log(ratio[1]), atol=1e-4):
        name, cause = "rotary_base", f"rotary angles belong to another base than {checkpoint.config.rotary_base:g}"
    else:
        name, cause = "rotary_scaling", "the type or a factor of the scaling of rotary angles is not the model's"
    examined.add(None, f"config.json {name}", f"{100 * wrong:.3g} % of an angle", cause)


def _plain(checkpoint: Checkpoint, model: TracedModel, module: str, layer: int | None, examined: Examined) -> None:
    """Compare a tensor that no format quantizes: a norm, the embedding or the head."""
    name = f"{module}.weight"
    stored, right = checkpoint.tensor(name).astype(np.float32), model.other(module)
    if stored.shape != right.shape:
        examined.add(
            layer, name, f"{list(stored.shape)}", f"its shape is {list(stored.shape)}, the model's {list(right.shape)}"
        )
        return
    away = float(np.linalg.norm(stored - right)) / (float(np.linalg.norm(right)) or 1.0)
    if stored.ndim > 1:  # or the worst row
        norms = np.linalg.norm(right, axis=1)
        usual = float(np.median(norms)) * 1e-2 or 1.0
        away = max(away, float((np.linalg.norm(stored - right, axis=1) / np.maximum(norms, usual)).max()))
    examined.saw(name, away / ROUNDED_ONCE)
    if away > ROUNDED_ONCE:
        cause = (
            _norm_cause(checkpoint, model, module, stored, right) if stored.ndim == 1 else _table_cause(stored, right)
        )
        examined.add(layer, name, f"{100 * away:.3g} % off", cause)


def _norm_cause(checkpoint: Checkpoint, model: TracedModel, module: str, stored: Array, right: Array) -> str:
    offset = FAMILIES[checkpoint.config.architecture].norm_offset
    if offset and np.allclose(stored, right - offset, rtol=ROUNDED_ONCE, atol=ROUNDED_ONCE):
        return f"the norm lacks the + {offset:g} of this family"
    norms = [f"transformer.layers.{n}.{name}" for n in range(model.layers) for name in model.norms]
    for other in (*norms, "transformer.ln_f"):
        held = model.other(other)  # norms of heads are shorter
        if other != module and held.shape == stored.shape and np.allclose(stored, held, rtol=ROUNDED_ONCE):
            return f"it holds {other}"
    ratio = stored / np.where(right == 0, 1, right)
    if np.allclose(ratio, ratio.mean(), rtol=2 * ROUNDED_ONCE):
        return f"all its values are {ratio.mean():.4g} times those of the model"
    return "its values are not the model's; a smoothing factor may be folded into it that the next linears lack"


def _table_cause(stored: Array, right: Array) -> str:
    energy = float((right**2).sum()) or 1.0
    gain = float((stored * right).sum()) / energy
    if float(np.linalg.norm(stored - gain * right)) <= ROUNDED_ONCE * float(np.linalg.norm(stored)):
        return f"all its values are {gain:.4g} times those of the model"
    for ranks in (2, 4, 8):
        if len(stored) % ranks == 0 and np.allclose(reversed_blocks(stored, ranks), right, rtol=0.02, atol=1e-3):
            return f"its rows are {ranks} blocks in reverse order: the files of tensor-parallel ranks are exchanged"
    for shift in (-2, -1, 1, 2):
        if np.allclose(np.roll(stored, shift, axis=0)[4:-4], right[4:-4], rtol=0.02, atol=1e-3):
            return f"its rows are shifted by {-shift}: the vocabulary was padded in the wrong place"
    moved = np.flatnonzero(np.linalg.norm(stored - right, axis=1) > ROUNDED_ONCE * np.linalg.norm(right, axis=1))
    if len(moved) < len(stored) / 2:
        return f"{len(moved)} of its rows differ, the first is that of token {int(moved[0])}"
    return "its rows are not the model's: they are of another model, or in another order"


def _head(checkpoint: Checkpoint, model: TracedModel, examined: Examined) -> None:
    if "lm_head.weight" in checkpoint:
        if checkpoint.config.format_of("lm_head").weights.stored is None:
            _plain(checkpoint, model, "lm_head", None, examined)
        else:
            compare_linear(checkpoint, Part(model, "lm_head", None, "", model.other("lm_head")), examined)
    elif not model.tied():
        examined.add(
            None, "lm_head.weight", "missing", "the checkpoint has no head, and the model's is not its embedding"
        )


def _layer(
    checkpoint: Checkpoint, model: TracedModel, layer: int, inputs: Mapping[tuple[int, str], Array], examined: Examined
) -> None:
    path = f"transformer.layers.{layer}"
    _plain(checkpoint, model, f"{path}.input_layernorm", layer, examined)
    for norm in FAMILIES[checkpoint.config.architecture].head_norms:
        _plain(checkpoint, model, f"{path}.attention.{norm}", layer, examined)
    for module in LINEARS:
        if module == "mlp.fc":
            _plain(checkpoint, model, f"{path}.post_layernorm", layer, examined)
        before = len(examined.findings)
        parts = [f"{module}.{part}" for part in QKV] if module == "attention.qkv" else [module]
        for part in parts:
            compare_linear(
                checkpoint, Part(model, f"{path}.{module}", layer, part, model.linear(layer, part)), examined
            )
            _bias(checkpoint, model, layer, module, part, examined)
        if len(examined.findings) == before:
            _activation(checkpoint, f"{path}.{module}", layer, inputs[layer, parts[0]], examined)
    if (form := checkpoint.config.kv_format) is not KvFormat.AUTO:
        name = f"{path}.attention.kv_cache_scaling_factor"
        scale = float(checkpoint.tensor(name).astype(np.float32).reshape(-1)[0])
        largest = max(float(inputs[layer, part].max()) for part in ("k", "v"))
        ratio = scale * LARGEST_CACHED[form] / max(largest, 1e-30)
        cover(name, layer, ratio, (LEAST_KV, MOST_KV[form]), examined, "a key or value", scale=scale)


def _bias(checkpoint: Checkpoint, model: TracedModel, layer: int, module: str, part: str, examined: Examined) -> None:
    name, right = f"transformer.layers.{layer}.{module}.bias", model.bias(layer, part)
    if right is None and name not in checkpoint:
        return
    if right is None or name not in checkpoint:
        verb = "has" if name in checkpoint else "lacks"
        examined.add(
            layer, name, verb, f"the checkpoint {verb} a bias that the model {'lacks' if right is None else 'has'}"
        )
        return
    whole = Part(model, name, layer, part, right)
    values = whole.taken(checkpoint, checkpoint.tensor(name).astype(np.float32))
    away = float(np.linalg.norm(values - right)) / (float(np.linalg.norm(right)) or 1.0)
    examined.saw(name, away / ROUNDED_ONCE)
    if away > ROUNDED_ONCE:
        zero = not values.any()
        examined.add(
            layer, name, f"{100 * away:.3g} % off", "the bias was dropped" if zero else "it is not the model's bias"
        )


def _activation(checkpoint: Checkpoint, module: str, layer: int, seen: Array, examined: Examined) -> None:
    """Check that the scale of activations covers what the linear sees."""
    scale = scale_of(checkpoint, module, ACTIVATION)
    if scale is None:
        return
    prequant = scale_of(checkpoint, module, PREQUANT)
    largest = float((seen if prequant is None else seen * np.abs(prequant)).max())
    bound = LARGEST_CODE[checkpoint.config.format_of(module).activation]
    first = float(scale.reshape(-1)[0])
    ratio = first * bound / max(largest, 1e-30)
    cover(f"{module}.{ACTIVATION}", layer, ratio, (LEAST_COVER, MOST_COVER), examined, "an input", scale=first)


def cover(
    name: str,
    layer: int,
    ratio: float,
    limits: tuple[float, float],
    examined: Examined,
    what: str,
    *,
    scale: float | None = None,
) -> None:
    """Judge the largest value that a scale represents, in units of the largest that was seen."""
    least, most = limits
    examined.saw(name, max(least / ratio, ratio / most))
    if least <= ratio <= most:
        return
    missing = " (the scale is missing: it is 1)" if scale == 1 else ""
    much = f"{ratio:.3g} times the largest value that was seen"
    effect = "values are clipped" if ratio < least else "few codes are used"
    examined.add(layer, name, f"covers {ratio:.3g} x", f"the scale covers {much} of {what}, so {effect}{missing}")


# ModelOpt's simulation of the format against the model it was calibrated on: weights and scales, each by itself.
#
# A fault seen here comes from calibration; a fault in the checkpoint alone comes from the export.

Inputs = Mapping[tuple[int, str], Array]

SAME_SCALE = 0.2
"""Relative difference of a scale from that of a second calibration, which another machine may round differently."""
OTHERWISE = "Calibrate on other texts (calibration.*), or choose another format."


def examine_simulation(
    simulated: SimulatedModel, model: TracedModel, spec: QuantSpec, inputs: Inputs, progress: Progress
) -> StageResult:
    """Compare a simulation with its model.

    Args:
        simulated: ModelOpt's, calibrated.
        model: what it was made from.
        spec: its format.
        inputs: largest magnitude of each input channel of each linear (`TracedModel.largest_inputs`).
        progress: counts layers.
    """
    examined = Examined(todo=OTHERWISE)
    with progress.task("comparing ModelOpt's simulation", model.layers, "layers") as advance:
        for layer in range(model.layers):
            for module in LINEARS:
                parts = [f"{module}.{part}" for part in QKV] if module == "attention.qkv" else [module]
                for part in parts:
                    _linear(simulated, model, spec, (layer, part), inputs, examined)
            if spec.kv_cache is not KvFormat.AUTO:
                for part in ("k", "v"):
                    largest = simulated.largest_cached(layer, part)
                    # without a scale of its own, ModelOpt's cache has the scale 1
                    held = LARGEST_CACHED[spec.kv_cache] if largest is None else largest
                    ratio = held / max(float(inputs[layer, part].max()), 1e-30)
                    name, limits = f"layers.{layer}.attention.{part}", (LEAST_KV, MOST_KV[spec.kv_cache])
                    cover(name, layer, ratio, limits, examined, "a key or value")
            advance(1)
    return examined.result(Place.MODELOPT, f"{Place.ORIGINAL}: {examined.tensors} weights and scales")


def compare_scales(checkpoint: Checkpoint, simulated: SimulatedModel) -> list[Finding]:
    """Compare the scales of activations in a checkpoint with those of the simulation that it was exported from.

    Not those of AWQ: it searches factors, and a search may end elsewhere on another machine.
    """
    form, examined = FORMATS[checkpoint.config.qformat], Examined()
    if form.activation == "16bit" or form.tuning == "awq":
        return []
    for layer in range(simulated.layers):
        for module in LINEARS:
            name = f"transformer.layers.{layer}.{module}"
            scale = scale_of(checkpoint, name, ACTIVATION)
            largest = simulated.largest_input(layer, f"{module}.q" if module == "attention.qkv" else module)
            if scale is None or largest is None:
                continue
            ratio = float(scale.reshape(-1)[0]) * LARGEST_CODE[form.activation] / largest
            if abs(ratio - 1) > SAME_SCALE:
                cause = f"the scale is {ratio:.3g} times that of ModelOpt's calibration"
                examined.add(layer, f"{name}.{ACTIVATION}", f"{ratio:.3g} x", cause)
    return examined.findings


def _linear(
    simulated: SimulatedModel,
    model: TracedModel,
    spec: QuantSpec,
    at: tuple[int, str],
    inputs: Inputs,
    examined: Examined,
) -> None:
    layer, part = at
    name, form, smoothing = f"layers.{layer}.{part}", FORMATS[spec.quant.qformat], simulated.smoothing(layer, part)
    if spec.quant.int4_scales != "max":  # a scale with the least error shrinks weights, as solving them does
        form = replace(form, sequential=True)
    source, decoded = model.linear(layer, part), simulated.linear(layer, part)
    measured, expected = measure(source, decoded, smoothing, form, spec.quant.group_size)
    examined.saw(f"{name}.weight", measured.ratio)
    if measured.suspicious:
        cause = explain(Suspect(source, decoded, expected), ())
        examined.add(layer, f"{name}.weight", figure_of(measured), cause)
    largest = simulated.largest_input(layer, part)
    if largest is None:
        return
    seen = inputs[layer, part] * (1 if smoothing is None else np.abs(smoothing))
    ratio = largest / max(float(seen.max()), 1e-30)
    cover(f"{name}.{ACTIVATION}", layer, ratio, (LEAST_COVER, MOST_COVER), examined, "an input")
