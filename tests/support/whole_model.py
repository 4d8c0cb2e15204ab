"""A model quantized or sparsified in one piece: the oracle of the paths that work layer by layer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.compress.config import CalibrationSettings, SparsitySettings
from pipelines.compress.specs import Layout, QuantSpec
from pipelines.domain.formats import FORMATS
from pipelines.domain.progress import SilentProgress

if TYPE_CHECKING:
    from pipelines.compress.by_tensor import QuantizeTask


def assert_same_files(one: Path, other: Path) -> None:
    """Byte for byte; where this project wrote config.json itself, the same entries but for the name of the producer."""
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for path in one.iterdir():
        ours, theirs = (folder / path.name for folder in (one, other))
        if path.name == "config.json" and ours.read_bytes() != theirs.read_bytes():
            copied, exported = (json.loads(each.read_text()) for each in (ours, theirs))
            assert copied.pop("producer")["name"] == "trtllm-pipelines"
            assert exported.pop("producer")["name"] == "modelopt"
            assert copied == exported
        else:
            assert ours.read_bytes() == theirs.read_bytes(), path.name


def quantize_whole(
    model_dir: Path,
    out_dir: Path,
    spec: QuantSpec,
    texts: Iterable[str],
    calibration: CalibrationSettings,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    device: str = "auto",
    layout: Layout = "tensorrt_llm",
) -> None:
    """Load the whole model, calibrate it where `quantize` would, export it, and correct config.json."""
    from pipelines.compress import modelopt_door
    from pipelines.compress.by_modelopt import correct_unified
    from pipelines.compress.by_tensor import QuantizeTask, Split
    from pipelines.compress.contexts import muted
    from pipelines.compress.model_folder import look_at, pick_device, pick_dtype, torch_dtype
    from pipelines.compress.postprocess import correct_export
    from pipelines.compress.simulating import simulated

    source = look_at(model_dir)
    dtype = pick_dtype(source, "auto")
    with muted():
        task = QuantizeTask(source, spec, texts, calibration, Split(), dtype, pick_device(device), layout)
        awq = FORMATS[spec.quant.qformat].tuning == "awq"
        model = _awq(task) if awq else simulated(task, SilentProgress())[0]
        out_dir.mkdir(parents=True, exist_ok=True)
        if layout == "hugging_face":
            modelopt_door.export_unified(model, torch_dtype(dtype), out_dir)
            correct_unified(out_dir, source.config, dtype)
        else:
            family = source.shape.family
            modelopt_door.export(model, family, torch_dtype(dtype), out_dir, tp_size=tp_size, pp_size=pp_size)
            correct_export(out_dir, source.config, spec)


def _awq(task: QuantizeTask) -> Any:
    """Let AWQ search all layers after the same two passes; the product has one layer at a time."""
    from pipelines.compress import modelopt_door
    from pipelines.compress.calibration import forward_passes
    from pipelines.compress.contexts import f32_products
    from pipelines.compress.loading import load_model
    from pipelines.compress.moments import AwqSearch
    from pipelines.compress.simulating import prepared

    config, data = prepared(task, SilentProgress())
    assert data is not None
    passes, search = forward_passes(data, SilentProgress(), task.device), AwqSearch(rereads=True)

    def forward(model: Any) -> None:
        search.run(model, lambda: passes(model))

    with f32_products():
        return modelopt_door.simulate(load_model(task.source, task.dtype, task.device), config, forward)


def sparsify_whole(
    model_dir: Path, out: Path, spec: SparsitySettings, texts: Iterable[str], calibration: CalibrationSettings
) -> None:
    """Load the whole model, prune all of its layers, and write one file by the safetensors library."""
    import torch
    from safetensors.torch import load_file, save_file

    from pipelines.compress import modelopt_door
    from pipelines.compress.calibration import make_batches, seed_everything
    from pipelines.compress.loading import load_model, load_tokenizer
    from pipelines.compress.model_folder import look_at, own_dtype, pick_device
    from pipelines.compress.sparsegpt import LINEARS, prune_layer

    source = look_at(model_dir)
    seed_everything()
    device = pick_device("auto")
    model: Any = load_model(source, own_dtype(source), device)
    if spec.method == "magnitude":
        modelopt_door.prune_by_magnitude(model, [f"*.{name}" for name in LINEARS])
    else:
        data = make_batches(texts, load_tokenizer(source), calibration, calibration.size)
        for number, layer in enumerate(model.model.layers):
            given = list(
                _inputs(model, number, [batch.to(device) for batch in data.batches])
            )  # before the layer is watched
            prune_layer(layer, given, f"model.layers.{number}")
    pruned = dict(model.named_parameters())
    tensors = load_file(model_dir / "model.safetensors")
    for name in tensors:
        if "_proj" in name:
            tensors[name] = pruned[name].detach().to("cpu", tensors[name].dtype).contiguous()
    with torch.no_grad():
        save_file(tensors, out, metadata={"format": "pt"})


def _inputs(model: Any, number: int, batches: Iterable[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run the model, its earlier layers pruned, and yield what a layer is called with."""
    import torch

    for batch in batches:
        seen: list[tuple[Any, dict[str, Any]]] = []

        def see(_module: Any, args: Any, kwargs: dict[str, Any], seen: list[Any] = seen) -> None:
            others = dict(kwargs)
            seen.append((args[0] if args else others.pop("hidden_states"), others))

        handle = model.model.layers[number].register_forward_pre_hook(see, with_kwargs=True)
        with torch.no_grad():
            model(input_ids=batch, use_cache=False)
        handle.remove()
        yield seen[0]
