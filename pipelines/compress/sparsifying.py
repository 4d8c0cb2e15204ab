"""Make a model folder 2:4 sparse layer by layer: prune, write, and count the zeros in the written files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipelines.checkpoint.tensors import TensorInfo, TensorSpec, read_header, weight_files
from pipelines.checkpoint.tokenizer_folder import MORE_TEMPLATES
from pipelines.compress import transformers_door
from pipelines.compress.calibration import (
    ProgressRecord,
    calibrated_on,
    make_batches,
    new_files_removed,
    seed_everything,
    stamp,
)
from pipelines.compress.config import CalibrationSettings, SparsitySettings
from pipelines.compress.contexts import BATCHES, gpu_memory_named, muted
from pipelines.compress.loading import hf_config, load_tokenizer
from pipelines.compress.model_folder import ModelFolder, TensorWriter, look_at, own_dtype, pick_device
from pipelines.compress.one_layer import HiddenStates, LayerSource
from pipelines.compress.sparsegpt import LINEARS, prune_layer
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import SILENT, Progress
from pipelines.host.files import MANIFEST, link_or_copy, parse_json, write_json

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"})


def sparsify(
    model_dir: Path,
    out_dir: Path,
    sparsity: SparsitySettings,
    texts: Iterable[str],
    calibration: CalibrationSettings,
    *,
    device: str = "auto",
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Make a Hugging Face model 2:4 sparse along the input dimension of every layer's linears.

    Embeddings, norms and the output head stay dense. After writing, the zeros are counted again in the files.

    Args:
        model_dir: plain Hugging Face folder.
        out_dir: receives a complete Hugging Face folder; small files are hard-linked where possible.
        sparsity: the method.
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
    source, device = look_at(model_dir), pick_device(device)
    if source.shape.num_experts > 1:
        raise UserError(
            f"{model_dir} is a mixture of experts, which sparsity={sparsity.method}_2_4 does not prune.",
            todo="Use sparsity=none.",
        )
    seed_everything()
    with muted():
        layers, observes = LayerSource(source, own_dtype(source), device), sparsity.method == "sparsegpt"
        data = make_batches(texts, load_tokenizer(source), calibration, calibration.size) if observes else None
        with new_files_removed(out_dir), gpu_memory_named("sparsifying", BATCHES):
            identity = {
                "sparsify": [sparsity.method, device],
                "model": stamp(source),
                "calibration": None if data is None else calibrated_on(calibration, data),
                "tools": [torch.__version__, transformers_door.VERSION],
            }
            record = ProgressRecord(out_dir, identity)
            states = HiddenStates(record.folder, layers, data) if data is not None else None
            folder = PrunedFolder(source, out_dir, [*range(layers.layers)])
            pruned = _prune_layers(folder, layers, states, record, progress)
            link_small_files(model_dir, out_dir)
            errors: dict[str, list[float]] = record.notes.get("errors", {})
            record.close()
    seen = {"sequences": data.sequences, "tokens": data.tokens} if data is not None else {"sequences": 0, "tokens": 0}
    facts: dict[str, Any] = {"method": sparsity.method, "device": device, "calibration": seen}
    if errors:
        facts["relative_output_error"] = {name: sum(values) / len(values) for name, values in errors.items()}
    return facts | count_zeros([out_dir / path.name for path in weight_files(model_dir)], pruned)


def _prune_layers(
    folder: "PrunedFolder", layers: LayerSource, states: HiddenStates | None, record: ProgressRecord, progress: Progress
) -> set[str]:
    """Prune the layers that `record` does not know yet, and return the names of all pruned weights."""
    linears = [f"{name}.weight" for name in LINEARS if f"{name}.weight" in layers.names]
    pruned = {f"{LAYER}{number}.{name}" for number in range(layers.layers) for name in linears}
    writer = folder.reopen() if record.layers else folder.create(pruned)
    record.announce(layers.layers, progress)
    method = "by magnitude" if states is None else "with sparsegpt"
    with progress.task(f"pruning {method}", layers.layers - record.layers, "layers") as advance:
        for number in range(record.layers, layers.layers):
            model = layers.load(number)
            layer = model.model.layers[0]
            if states is None:
                from pipelines.compress import modelopt_door

                modelopt_door.prune_by_magnitude(model, [f"*.{name}" for name in LINEARS])
            else:
                states.prepare(number)
                errors = record.notes.setdefault("errors", {})
                for name, error in prune_layer(layer, states.inputs(number, 1), f"model.layers.{number}").items():
                    errors.setdefault(name, []).append(error)
                if number + 1 < layers.layers:  # input of the next layer
                    with torch.no_grad():
                        states.write(number + 1, 1, states.outputs(layer, number, 1))
            for name in linears:
                full = f"{LAYER}{number}.{name}"
                weight = layer.get_parameter(name).detach().to("cpu", layers.weights.dtype(full))
                writer.write(folder.file(full), full, iter([weight]))
            writer.sync()
            record.complete(number + 1)
            advance(1)
    return pruned


def link_small_files(model_dir: Path, out_dir: Path) -> None:
    """Hard-link everything but the weights and an artifact's manifest into the new folder, or copy it."""
    for path in sorted([*model_dir.iterdir(), *(model_dir / MORE_TEMPLATES).glob("*.jinja")]):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name != MANIFEST:
            link_or_copy(path, out_dir / path.relative_to(model_dir))


def count_zeros(files: list[Path], names: set[str]) -> dict[str, Any]:
    """Count zeros and check in the written files that every four neighbouring inputs have at least two.

    Raises:
        RuntimeError: a group has fewer, or a linear is missing; either is a bug in this program.
    """
    weights = zeros = linears = 0
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in names & set(shard.keys()):
                tensor_oi = shard.get_tensor(name)
                zeros_in_group = (tensor_oi.reshape(-1, 4) == 0).sum(dim=1)
                if int(zeros_in_group.min()) < 2:
                    raise RuntimeError(f"'{name}' in {path} was written with a group of four that is not 2:4 sparse")
                weights, zeros, linears = weights + tensor_oi.numel(), zeros + int(zeros_in_group.sum()), linears + 1
    if linears != len(names):
        raise RuntimeError(f"{len(names)} linears were pruned, but {linears} are in the written files")
    return {
        "linears": linears,
        "weights": weights,
        "zeros": zeros,
        "zero_fraction": round(zeros / weights, 6),
        "total_bytes": sum(path.stat().st_size for path in files),
    }


# Write the folder of a pruned model: the same files with fewer and smaller tensors, and an honest config.json.

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LAYER = "model.layers."

Smaller = Callable[[str, tuple[int, ...]], tuple[int, ...]]
"""Shape that a tensor of a layer has after pruning: (name without the layer's prefix, shape) -> shape."""


class PrunedFolder:
    """The weight files of a pruned model.

    Attributes:
        kept: layers that stay, by their number in the original model.
    """

    def __init__(
        self, source: ModelFolder, out_dir: Path, layers: list[int], smaller: Smaller = lambda _name, was: was
    ) -> None:
        """Decide which tensor goes where; nothing is written."""
        self._source, self._out_dir, self.kept = source, out_dir, layers
        self._numbers = {old: new for new, old in enumerate(layers)}
        self._places: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self._stored: dict[str, tuple[Path, TensorInfo]] = {}
        for path in weight_files(source.folder):
            for name, info in read_header(path).items():
                if new := self._name(name):
                    shape = smaller(name.split(".", 3)[3], info.shape) if name.startswith(LAYER) else info.shape
                    self._places[name] = path.name, new, shape
                    self._stored[name] = path, info

    @property
    def _files(self) -> list[str]:
        return sorted({file for file, _, _ in self._places.values()})

    def file(self, name: str) -> str:
        """Return the file of a tensor, by its name in the original model."""
        return self._places[name][0]

    def create(self, pruned: Set[str] = frozenset()) -> TensorWriter:
        """Write the headers, and copy every tensor that neither becomes smaller nor is one of `pruned`."""
        for file in self._files:
            tensors = ((old, new, shape) for old, (at, new, shape) in self._places.items() if at == file)
            layout = {new: TensorSpec(self._stored[old][1].dtype, shape) for old, new, shape in tensors}
            with safe_open(self._source.folder / file, framework="pt") as shard:
                TensorWriter.create(self._out_dir, {file: layout}, shard.metadata())
        writer = self.reopen()
        for name, (file, new, shape) in self._places.items():
            path, info = self._stored[name]
            if shape == info.shape and name not in pruned:
                writer.copy(file, new, path, info)
        writer.sync()
        return writer

    def reopen(self) -> TensorWriter:
        """Continue with files that `create` made."""
        return TensorWriter(self._out_dir, self._files)

    def changed(self, layer: int) -> Iterator[tuple[str, str, str]]:
        """Yield the tensors of a layer that become smaller: (name in the original, file, new name)."""
        for name, (file, new, shape) in self._places.items():
            if name.startswith(f"{LAYER}{layer}.") and shape != self._stored[name][1].shape:
                yield name, file, new

    def finish(self, shape: ModelShape) -> dict[str, Any]:
        """Write config.json and the index of several files, link the other files, and return counts as facts."""
        link_small_files(self._source.folder, self._out_dir)
        write_json(self._out_dir / CONFIG, self._config(shape), sort_keys=False)
        before = sum(
            prod(info.shape) for path in weight_files(self._source.folder) for info in read_header(path).values()
        )
        after = sum(prod(info.shape) for file in self._files for info in read_header(self._out_dir / file).values())
        if (index := self._source.folder / INDEX).is_file():
            write_json(self._out_dir / INDEX, self._index(parse_json(index.read_text(encoding="utf-8")), after))
        return {
            "parameters_before": before,
            "parameters_after": after,
            "source_bytes": sum(path.stat().st_size for path in weight_files(self._source.folder)),
            "total_bytes": sum((self._out_dir / file).stat().st_size for file in self._files),
        }

    def _name(self, name: str) -> str | None:
        """Return the name of a tensor in the pruned model; None if its layer is dropped."""
        if not name.startswith(LAYER):
            return name
        number, rest = name.removeprefix(LAYER).split(".", 1)
        new = self._numbers.get(int(number))
        return None if new is None else f"{LAYER}{new}.{rest}"

    def _config(self, shape: ModelShape) -> dict[str, Any]:
        config = self._source.config | {
            "num_hidden_layers": shape.num_hidden_layers,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,  # no longer hidden_size / num_attention_heads
        }
        kinds = getattr(hf_config(self._source), "layer_types", None)
        if kinds and len(self.kept) < len(kinds):
            config["layer_types"] = [kinds[number] for number in self.kept]
        return config

    def _index(self, index: Mapping[str, Any], parameters: int) -> dict[str, Any]:
        metadata = dict(index.get("metadata") or {})
        specs = (TensorSpec(self._stored[name][1].dtype, shape) for name, (_, _, shape) in self._places.items())
        metadata["total_size"] = sum(spec.nbytes for spec in specs)
        if "total_parameters" in metadata:
            metadata["total_parameters"] = parameters
        return {"metadata": metadata, "weight_map": {new: file for file, new, _ in self._places.values()}}
