"""Make a model folder 2:4 sparse layer by layer: prune, write, and count the zeros in the written files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipelines.checkpoint.tensors import read_header
from pipelines.checkpoint.tokenizer_folder import MORE_TEMPLATES
from pipelines.compress import transformers_door
from pipelines.compress.calibration import CalibrationSet, make_batches
from pipelines.compress.gpu_memory import BATCHES, gpu_memory_named
from pipelines.compress.hidden_states import HiddenStates, run_layer
from pipelines.compress.loading import load_tokenizer
from pipelines.compress.model_folder import ModelFolder, look_at, own_dtype, pick_device
from pipelines.compress.one_layer import LayerSource
from pipelines.compress.progress_record import ProgressRecord, new_files_removed, stamp, tokens_digest
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.simulating import seed_everything
from pipelines.compress.sparsegpt import LINEARS, prune_layer
from pipelines.compress.specs import CalibrationSpec, SparsitySpec
from pipelines.compress.weight_files import TensorWriter
from pipelines.domain.errors import UserError
from pipelines.domain.progress import Progress
from pipelines.host.files import MANIFEST

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"})


def run_sparsify(
    model_dir: Path,
    out_dir: Path,
    spec: SparsitySpec,
    texts: Iterable[str],
    calibration: CalibrationSpec,
    *,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """See `pipelines.compress.api.sparsify`."""
    source = look_at(model_dir)
    if source.shape.num_experts > 1:
        raise UserError(
            f"{model_dir} is a mixture of experts, which sparsity={spec.method}_2_4 does not prune.",
            todo="Use sparsity=none.",
        )
    seed_everything(calibration.seed)
    device = pick_device(device)
    with muted(), transformers_to_log():
        data = None
        layers = LayerSource(source, own_dtype(source), device)
        if spec.method == "sparsegpt":
            data = make_batches(texts, load_tokenizer(source), calibration, calibration.size)
        with new_files_removed(out_dir), gpu_memory_named("sparsifying", BATCHES):
            record = ProgressRecord(out_dir, _identity(source, spec, calibration, data, device))
            states = HiddenStates(record.folder, layers, data) if data is not None else None
            pruned = _prune_layers(source, layers, states, out_dir, record, progress)
            link_small_files(model_dir, out_dir)
            errors: dict[str, list[float]] = record.notes.get("errors", {})
            record.close()
    seen = {"sequences": data.sequences, "tokens": data.tokens} if data is not None else {"sequences": 0, "tokens": 0}
    facts: dict[str, Any] = {"method": spec.method, "device": device, "calibration": seen}
    if errors:
        facts["relative_output_error"] = {name: sum(values) / len(values) for name, values in errors.items()}
    return facts | count_zeros([out_dir / path.name for path in source.weight_files], pruned)


def _identity(
    source: ModelFolder, spec: SparsitySpec, calibration: CalibrationSpec, data: CalibrationSet | None, device: str
) -> dict[str, Any]:
    """Return everything that determines the bytes of the output."""
    return {
        "sparsify": [spec.method, asdict(calibration) if data is not None else None, device],
        "model": stamp(source),
        "tokens": tokens_digest(data),
        "tools": [torch.__version__, transformers_door.VERSION],
    }


def _prune_layers(
    source: ModelFolder,
    layers: LayerSource,
    states: HiddenStates | None,
    out_dir: Path,
    record: ProgressRecord,
    progress: Progress,
) -> set[str]:
    """Prune the layers that `record` does not know yet, and return the names of all pruned weights."""
    where = {name: path for path in source.weight_files for name in read_header(path)}
    linears = [f"{name}.weight" for name in LINEARS if f"{name}.weight" in layers.names]
    if record.layers:
        writer = TensorWriter(out_dir, [path.name for path in source.weight_files])
        record.announce(layers.layers, progress)
    else:
        writer = _copied(source, out_dir, progress)
        if states is not None:
            states.begin()
    method = "by magnitude" if states is None else "with sparsegpt"
    with progress.task(f"pruning {method}", layers.layers - record.layers, "layers") as advance:
        for number in range(record.layers, layers.layers):
            model = layers.load(number)
            if states is None:
                _prune_by_magnitude(model)
            else:
                _prune_by_sparsegpt(model.model.layers[0], states, number, record)
            for name in linears:
                full = f"model.layers.{number}.{name}"
                file, stored = where[full].name, layers.weights.dtype(full)
                weight = model.model.layers[0].get_parameter(name).detach().to("cpu", stored)
                writer.write(file, full, iter([weight]))
            writer.sync()
            record.complete(number + 1)
            advance(1)
    return {f"model.layers.{number}.{name}" for number in range(layers.layers) for name in linears}


def _copied(source: ModelFolder, out_dir: Path, progress: Progress) -> TensorWriter:
    """Copy every tensor, as the safetensors library would save it; those of linears are replaced later."""
    names = [path.name for path in source.weight_files]
    for path in source.weight_files:
        layout = {name: (info.dtype, info.shape) for name, info in read_header(path).items()}
        with safe_open(path, framework="pt") as shard:
            TensorWriter.create(out_dir, {path.name: layout}, shard.metadata())
    writer = TensorWriter(out_dir, names)
    with progress.task("copying", len(names), "files") as advance:
        for path in source.weight_files:
            for name, info in read_header(path).items():
                writer.copy(path.name, name, path, info)
            advance(1)
    return writer


def _prune_by_magnitude(model: torch.nn.Module) -> None:
    from pipelines.compress import modelopt_door

    modelopt_door.prune_by_magnitude(model, [f"*.{name}" for name in LINEARS])


def _prune_by_sparsegpt(layer: torch.nn.Module, states: HiddenStates, number: int, record: ProgressRecord) -> None:
    """Prune a layer on the outputs of the layers before it, and keep its own outputs for the next."""

    def inputs() -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        for hidden in states.batches(number, 1):
            yield hidden, states.arguments(number, hidden)

    states.drop_before(number)
    errors = record.notes.setdefault("errors", {})
    for name, error in prune_layer(layer, inputs, f"model.layers.{number}").items():
        errors.setdefault(name, []).append(error)
    with torch.no_grad():
        states.write(number + 1, 1, (run_layer(layer, *given, number) for given in inputs()))


def link_small_files(model_dir: Path, out_dir: Path) -> None:
    """Hard-link everything but the weights and an artifact's manifest into the new folder, or copy it."""
    for path in sorted([*model_dir.iterdir(), *(model_dir / MORE_TEMPLATES).glob("*.jinja")]):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name != MANIFEST:
            target = out_dir / path.relative_to(model_dir)
            target.parent.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(path.resolve(), target)
            except OSError:
                shutil.copyfile(path, target)


def count_zeros(files: list[Path], names: set[str]) -> dict[str, Any]:
    """Count zeros and check in the written files that every four neighbouring inputs have at least two.

    Raises:
        RuntimeError: a group has fewer, or a linear is missing; either is a bug in this program.
    """
    weights = zeros = found = 0
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in names & set(shard.keys()):
                tensor_oi = shard.get_tensor(name)
                zeros_in_group = (tensor_oi.reshape(-1, 4) == 0).sum(dim=1)
                if int(zeros_in_group.min()) < 2:
                    raise RuntimeError(f"'{name}' in {path} was written with a group of four that is not 2:4 sparse")
                weights, zeros, found = weights + tensor_oi.numel(), zeros + int(zeros_in_group.sum()), found + 1
    if found != len(names):
        raise RuntimeError(f"{len(names)} linears were pruned, but {found} are in the written files")
    return {
        "linears": found,
        "weights": weights,
        "zeros": zeros,
        "zero_fraction": round(zeros / weights, 6),
        "total_bytes": sum(path.stat().st_size for path in files),
    }
