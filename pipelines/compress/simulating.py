"""Simulate a format in a whole model held in memory, as the reference for checkpoints."""

import gc
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from pipelines.compress import gptq, modelopt_door
from pipelines.compress.by_tensor import QuantizeTask, Split
from pipelines.compress.calibration import (
    CalibrationSet,
    ProgressRecord,
    broken_at,
    forward_passes,
    layer_of,
    make_batches,
    seed_everything,
)
from pipelines.compress.checkpoint_layout import CheckpointLayout, copy_vocabulary
from pipelines.compress.config import SEARCH_CAP, CalibrationSettings
from pipelines.compress.contexts import f32_products, muted
from pipelines.compress.loading import load_model, load_tokenizer
from pipelines.compress.model_folder import EMBEDDING, look_at, pick_dtype, torch_dtype, true_name
from pipelines.compress.moments import observed
from pipelines.compress.one_layer import HiddenStates, LayerSource
from pipelines.compress.recipes import Config, modelopt_config
from pipelines.compress.searching import search_mix
from pipelines.compress.specs import QuantSpec
from pipelines.compress.traced import PARTS, TracedModel
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.progress import SILENT, Progress


def fake_quantized_model(
    model_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSettings,
    progress: Progress = SILENT,
) -> torch.nn.Module:
    """Return the torch model, on the CPU, that computes what the checkpoint of `quantize` computes, by ModelOpt.

    q/k/v and gate/up share their scales as they do in a checkpoint. For int8_wo and int4_wo, whose weights are
    only quantized when the engine is built, this is the 16-bit model.

    Raises:
        UserError: as for `quantize`.
    """
    source = look_at(model_dir)
    dtype = pick_dtype(source, spec.quant.dtype)
    task = QuantizeTask(source, spec, texts, calibration, Split(), dtype, "cpu", "tensorrt_llm")
    with muted():
        model, _, _ = simulated(task, progress)
        modelopt_door.merge_fused_scales(model, source.shape.family, torch_dtype(dtype))
    return model.requires_grad_(False)  # again: calibration replaces some weights with new parameters


def simulated(task: QuantizeTask, progress: Progress) -> tuple[torch.nn.Module, CalibrationSet | None, dict[str, Any]]:
    """Load the model, insert quantizers and calibrate them; a format without quantizers leaves it unchanged.

    Returns:
        the model; what it was calibrated on, None if nothing was; and facts: the record of a `search`, or
        `expert_coverage` of the `experts` of a mixture.
    """
    config, data = prepared(task, progress)
    form, facts = FORMATS[task.spec.quant.qformat], dict[str, Any]()
    with progress.task("loading the model", None):
        model = load_model(task.source, task.dtype, task.device)
    if config is not None and data is not None and (form.sequential or form.tuning == "awq"):
        _replace_layers(model, task, config, data, progress)
    elif config is not None:
        forward = None if data is None else forward_passes(data, progress, task.device)
        with f32_products(), experts_counted(model) as counts:
            model = modelopt_door.simulate(model, config, forward)
        check_calibrated(model)
        if counts:
            facts["experts"] = expert_coverage(counts, progress)
    elif task.spec.searches and data is not None:
        model, facts["search"] = search_mix(model, task, data, progress)
        check_calibrated(model)
    return model, data, facts


def export(model: torch.nn.Module, task: QuantizeTask, out_dir: Path, *, pp_size: int) -> None:
    """Write a simulated model as ModelOpt exports it in the layout of the task."""
    dtype = torch_dtype(task.dtype)
    if task.layout == "hugging_face":
        modelopt_door.export_unified(model, dtype, out_dir)
    else:
        split = {"tp_size": task.split.tp_size, "pp_size": pp_size}
        modelopt_door.export(model, task.source.shape.family, dtype, out_dir, **split)


@contextmanager
def experts_counted(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Count the tokens that each router sends to each expert: name of the router -> int64 [E]."""
    counts: dict[str, torch.Tensor] = {}

    def count(name: str, router: Any, _: Any, result: Any) -> None:
        chosen = torch.bincount(result[2].reshape(-1).cpu(), minlength=router.num_experts)
        counts[name] = counts[name] + chosen if name in counts else chosen

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                hooks.enter_context(module.register_forward_hook(partial(count, name)))
        yield counts


NAMED_EXPERTS = 8


def expert_coverage(counts: Mapping[str, torch.Tensor], progress: Progress) -> dict[str, Any]:
    """Return the tokens that calibration sent to experts, and name those that it never reached."""
    unreached = [
        f"{name.split('.')[2]}.{expert}"
        for name, tokens in counts.items()
        for expert in (tokens == 0).nonzero().flatten().tolist()
    ]
    if unreached:
        more = f" and {len(unreached) - NAMED_EXPERTS} more" if len(unreached) > NAMED_EXPERTS else ""
        progress.note(
            f"calibration sent no token to {len(unreached)} of {sum(map(len, counts.values()))} experts (layer.expert"
            f" {', '.join(unreached[:NAMED_EXPERTS])}{more}); their inputs were not seen: raise calibration.size"
        )
    return {"tokens": {name: tokens.tolist() for name, tokens in counts.items()}, "unreached": unreached}


def _replace_layers(model: Any, task: QuantizeTask, config: Config, data: CalibrationSet, progress: Progress) -> None:
    """Put layers into a model that are quantized one after another, as those of a checkpoint are; in place."""
    layers = LayerSource(task.source, task.dtype, task.device)
    with TemporaryDirectory() as folder, progress.task("quantizing", layers.layers, "layers") as advance:
        quantizer = LayerQuantizer(layers, task, config, data, Path(folder))
        for number in range(layers.layers):
            layer = quantizer.simulated(number).model.layers[0]
            layer.self_attn.layer_idx = number
            model.model.layers[number] = layer
            advance(1)


def prepared(task: QuantizeTask, progress: Progress) -> tuple[Config | None, CalibrationSet | None]:
    """Return ModelOpt's configuration, None without quantizers or for a search, and the batches to calibrate on.

    There are none for a format whose weights are rounded by what they are alone.

    Raises:
        UserError: this ModelOpt does not support the format on this device, the texts are empty.
    """
    source, spec, calibration = task.source, task.spec, task.calibration
    seed_everything()
    quant, size = spec.quant, calibration.sequences_for(spec.quant.qformat)
    modelopt_door.check_supported(quant, task.device)
    config = modelopt_config(spec, source.shape.family, modelopt_door.preset)
    if config is None and not spec.searches:
        return None, None
    if quant.scoring_texts is not None:
        size = min(size, max(SEARCH_CAP, quant.scoring_texts))
    if task.device == "cuda":
        modelopt_door.load_kernels(quant.formats, spec.kv_cache, progress)
    if not spec.reads_texts:
        return config, None
    return config, make_batches(task.texts, load_tokenizer(source), calibration, size)


def check_calibrated(model: Any, name_of: Callable[[str], str] = str) -> Any:
    """Reject scales that are not positive and finite, and return the model.

    A group or channel of weights that is all zero (2:4 sparse models have some) has no scale of its own; it gets
    the largest scale of its layer, which is exact, because zero stays zero under any scale.

    Args:
        model: after calibration; changed in place.
        name_of: returns the name of a module in messages.

    Raises:
        UserError: a scale is not finite, or a whole layer's weights or inputs are zero; names the layer.
    """
    for name, quantizer in modelopt_door.quantizers(model):
        amax = quantizer.amax
        if not all(torch.isfinite(scale).all() for scale in (amax, quantizer.pre_quant_scale) if scale is not None):
            raise broken_at(name_of(layer_of(name)))
        if amax is None or (amax > 0).all():
            continue
        if not (amax > 0).any():
            raise UserError(
                f"The {'weights' if 'weight' in name else 'inputs'} of the layer "
                f"'{name_of(layer_of(name))}' are all zero.",
                todo="No scale can be computed for them; check the model's weights.",
            )
        quantizer.amax = torch.where(amax > 0, amax, amax.max())
    return model


# ModelOpt's simulation of a format, in float32, to be watched as `traced.py` watches a model.
#
# Shapes: O output channels, I input channels.

Array = np.ndarray[Any, Any]


class SimulatedModel(TracedModel):
    """A model with ModelOpt's quantizers, calibrated."""

    def linear(self, layer: int, part: str) -> Array:
        """Return the weight [O, I] that is multiplied: rounded, with the factors of the input channels undone."""
        module = self._module(layer, part)
        with torch.inference_mode():
            weight = module.weight_quantizer(module.weight)
        factors = self.smoothing(layer, part)
        unsmoothed: Array = weight.numpy() * (1 if factors is None else factors)
        return unsmoothed

    def smoothing(self, layer: int, part: str) -> Array | None:
        """Return the factor of each input channel [I] that AWQ or SmoothQuant found; None without."""
        factors = self._module(layer, part).input_quantizer.pre_quant_scale
        return None if factors is None else factors.detach().float().numpy()

    def largest_input(self, layer: int, part: str) -> float | None:
        """Return the largest input that the calibrated scale represents; None if inputs are not rounded."""
        return _bound(self._module(layer, part).input_quantizer)

    def largest_cached(self, layer: int, name: str) -> float | None:
        """Return the largest key ("k") or value ("v") that the KV cache's scale represents; None if it has none."""
        attention = self._model.model.layers[layer].self_attn
        return _bound(getattr(attention, f"{name}_bmm_quantizer", None))

    def _module(self, layer: int, part: str) -> Any:
        return self._model.model.layers[layer].get_submodule(PARTS[part])


def _bound(quantizer: Any) -> float | None:
    if quantizer is None or not quantizer.is_enabled or quantizer.amax is None:
        return None
    return float(quantizer.amax.max())


# Quantize a model layer by layer: memory holds one layer, however many the model has.
#
# Calibration by ModelOpt is exact this way: each of its passes runs the layers one after another, and what it does
# between passes and at the end concerns one layer at a time. So the inputs of a layer in a pass are the outputs of the
# layer before it in the same pass, which `HiddenStates` keeps on disk. GPTQ calibrates a layer on the outputs of the
# quantized layers before it: all its passes read the same inputs, and one more pass, through the quantized layer,
# writes those of the next. The files are those of an export of the whole model, byte for byte.


class LayerQuantizer:
    """Calibrates one layer after another and exports each by ModelOpt."""

    def __init__(
        self, source: LayerSource, task: QuantizeTask, config: Config | None, data: CalibrationSet | None, folder: Path
    ) -> None:
        """Prepare; nothing is computed.

        Args:
            source: the layers.
            task: the model and its formats.
            config: ModelOpt's configuration; None leaves the layers in 16 bit.
            data: what to calibrate on; None if weights are rounded by what they are alone.
            folder: for hidden states; it exists.
        """
        self._source, self._task, self._config = source, task, config
        self._states = HiddenStates(folder, source, data) if data is not None else None
        self._to_nearest: list[str] = []

    def export(self, number: int, exported: Path) -> None:
        """Calibrate layer `number`, the next one, and export it as a model of one layer.

        Raises:
            UserError: a weight, an activation or a scale is not finite; names the module.
        """
        export(self.simulated(number), self._task, exported, pp_size=1)  # split over tensor-parallel ranks alone

    def simulated(self, number: int) -> Any:
        """Return the model of layer `number`, the next one, with calibrated quantizers; errors as for `export`."""
        model = self._source.load(number)
        if self._config is not None:
            with f32_products():
                model = self._calibrated(model, number, self._config)
        return model

    def _calibrated(self, model: Any, number: int, config: Config) -> Any:
        """Return a model with calibrated quantizers, and keep the inputs of the next layer."""
        states, spec, last = self._states, self._task.spec, number + 1 == self._source.layers
        rounds_cache = spec.kv_cache is not KvFormat.AUTO
        shown = partial(true_name, number=number)
        if states is None:
            return check_calibrated(modelopt_door.simulate(model, config, None), shown)
        states.prepare(number)
        if not FORMATS[spec.quant.qformat].sequential:
            passes = states.passes(number, write=not last, cache_alone=spec.cache_alone, rounds_cache=rounds_cache)
            return check_calibrated(modelopt_door.simulate(model, config, passes), shown)
        cache = states.passes(number, write=False, cache_alone=True) if rounds_cache else None
        model = check_calibrated(modelopt_door.simulate(model, config, cache), shown)
        linears = modelopt_door.rounded_linears(model)
        with modelopt_door.unrounded(linears.values()), observed(linears, ending=True) as hessians:
            states.passes(number, write=False)(model)
        self._to_nearest = gptq.round_linears(linears, hessians, modelopt_door.group_scales)
        if not last:
            states.passes(number)(model)
        return model

    def write(self, layout: CheckpointLayout, out_dir: Path, record: ProgressRecord, progress: Progress) -> None:
        """Quantize every layer that `record` does not know yet, and write the checkpoint as ModelOpt would export it.

        Raises:
            UserError: as for `export`; a file of the model ends early; the disk has too little space.
        """
        source = self._source
        vocab_size = source.weights.shape(EMBEDDING)[0]
        exported, left = record.folder / "layer", source.layers - record.layers
        writer = layout.reopen(out_dir) if record.layers else None
        record.announce(source.layers, progress)
        with progress.task("quantizing", left, "layers") as advance, ExitStack() as after:
            gc.freeze()  # each garbage collection would traverse all imported modules, 0.3 s
            after.callback(gc.unfreeze)
            for number in range(record.layers, source.layers):
                shutil.rmtree(exported, ignore_errors=True)
                seed_everything()  # else a layer would depend on where a run was stopped
                began = time.monotonic()
                self.export(number, exported)
                for name in self._to_nearest:
                    whole = true_name(name, number=number)
                    progress.note(f"{whole} is rounded to nearest: the texts do not tell its inputs apart for GPTQ")
                if writer is None:
                    writer = layout.create(exported, out_dir, vocab_size)
                    layout.finish(exported, out_dir)
                for place, path, info in layout.layer(exported, number):
                    writer.copy(*place, path, info)
                writer.sync()
                record.notes["seconds"] = record.notes.get("seconds", 0.0) + time.monotonic() - began
                record.complete(number + 1)
                advance(1)
                gc.collect()  # ModelOpt's modules refer to each other in cycles, which would keep several layers alive
        assert writer is not None, "a model has layers"
        copy_vocabulary(writer, source.weights, source.head, source.dtype, layout, vocab_size, progress)
