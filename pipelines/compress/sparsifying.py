"""Make a model folder 2:4 sparse: prune, rewrite the shards, and count the zeros in the written files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipelines.compress.calibration import make_batches
from pipelines.compress.loading import load_model, load_tokenizer, look_at, own_dtype
from pipelines.compress.quiet import muted, transformers_to_log
from pipelines.compress.simulating import pick_device, seed_everything
from pipelines.compress.sparsegpt import LINEARS, prune_model
from pipelines.compress.specs import CalibrationSpec, SparsitySpec
from pipelines.domain.progress import Progress

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"})
_SPARSE_NAMES = tuple(f".{name}.weight" for name in LINEARS)


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
    seed_everything(calibration.seed)
    device = pick_device(device)
    facts: dict[str, Any] = {"method": spec.method, "device": device, "calibration": {"sequences": 0, "tokens": 0}}
    with muted() as quiet, transformers_to_log():
        loud = quiet.progress(progress)
        with loud.task("loading the model", None):
            model = load_model(source, own_dtype(source), device)
        if spec.method == "sparsegpt":
            data = make_batches(texts, load_tokenizer(source), calibration, calibration.size)
            facts["calibration"] = {"sequences": data.sequences, "tokens": data.tokens}
            facts["relative_output_error"] = prune_model(model, data, loud, device)
        else:
            _prune_by_magnitude(model, loud)
        out_dir.mkdir(parents=True, exist_ok=True)
        _link_small_files(model_dir, out_dir)
        weights = {name: weight for name, weight in model.named_parameters() if name.endswith(_SPARSE_NAMES)}
        with loud.task("writing", len(source.weight_files), "files") as advance:
            for path in source.weight_files:
                _rewrite(path, out_dir / path.name, weights)
                advance(1)
    return facts | _count_zeros([out_dir / path.name for path in source.weight_files], set(weights))


def _prune_by_magnitude(model: torch.nn.Module, progress: Progress) -> None:
    from pipelines.compress import modelopt_door

    with progress.task("pruning by magnitude", None):
        modelopt_door.prune_by_magnitude(model, [f"*.{name}" for name in LINEARS])


def _link_small_files(model_dir: Path, out_dir: Path) -> None:
    """Hard-link everything but the weights into the new folder, or copy it to another file system."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES:
            target = out_dir / path.name
            target.unlink(missing_ok=True)
            try:
                os.link(path.resolve(), target)
            except OSError:
                shutil.copyfile(path, target)


def _rewrite(old: Path, new: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a shard with the pruned weights in place of the old ones; all other tensors stay byte-identical."""
    with safe_open(old, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - not a dict
        metadata = shard.metadata()
    for name in tensors.keys() & weights.keys():
        tensors[name] = weights[name].detach().to("cpu", tensors[name].dtype).contiguous()
    save_file(tensors, new, metadata=metadata)


def _count_zeros(files: list[Path], names: set[str]) -> dict[str, Any]:
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
