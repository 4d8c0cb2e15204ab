"""Write the folder of a pruned model: the same files with fewer and smaller tensors, and an honest config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pipelines.checkpoint.tensors import ITEM_BYTES, TensorInfo, read_header
from pipelines.compress.loading import hf_config
from pipelines.compress.model_folder import ModelFolder
from pipelines.compress.sparsifying import link_small_files
from pipelines.compress.weight_files import TensorWriter, loaded_files
from pipelines.domain.model_shape import ModelShape
from pipelines.host.files import parse_json, write_json

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LAYER = "model.layers."

Smaller = Callable[[str, tuple[int, ...]], tuple[int, ...]]
"""Shape that a tensor of a layer has after pruning: (name without the layer's prefix, shape) -> shape."""


class PrunedFolder:
    """The weight files of a pruned model.

    Attributes:
        kept: layers that stay, by their number in the original model.
    """

    def __init__(self, source: ModelFolder, out_dir: Path, kept: list[int], smaller: Smaller) -> None:
        """Decide which tensor goes where; nothing is written."""
        self._source, self._out_dir, self.kept = source, out_dir, kept
        self._numbers = {old: new for new, old in enumerate(kept)}
        self._places: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        self._found: dict[str, tuple[Path, TensorInfo]] = {}
        for path in loaded_files(source):
            for name, info in read_header(path).items():
                if new := self._name(name):
                    shape = smaller(name.split(".", 3)[3], info.shape) if name.startswith(LAYER) else info.shape
                    self._places[name] = path.name, new, shape
                    self._found[name] = path, info

    @property
    def _files(self) -> list[str]:
        return sorted({file for file, _, _ in self._places.values()})

    def create(self) -> TensorWriter:
        """Write the headers, and copy every tensor that does not change."""
        for file in self._files:
            layout = {new: (self._found[old][1].dtype, shape) for old, (at, new, shape) in self._of(file)}
            with safe_open(self._source.folder / file, framework="pt") as shard:
                TensorWriter.create(self._out_dir, {file: layout}, shard.metadata())
        writer = self.reopen()
        for name, (file, new, shape) in self._places.items():
            path, info = self._found[name]
            if shape == info.shape:
                writer.copy(file, new, path, info)
        writer.sync()
        return writer

    def reopen(self) -> TensorWriter:
        """Continue with files that `create` made."""
        return TensorWriter(self._out_dir, self._files)

    def changed(self, layer: int) -> Iterator[tuple[str, str, str]]:
        """Yield the tensors of a layer that become smaller: (name in the original, file, new name)."""
        for name, (file, new, shape) in self._places.items():
            if name.startswith(f"{LAYER}{layer}.") and shape != self._found[name][1].shape:
                yield name, file, new

    def finish(self, shape: ModelShape) -> dict[str, Any]:
        """Write config.json and the index of several files, link the other files, and return counts as facts."""
        link_small_files(self._source.folder, self._out_dir)
        write_json(self._out_dir / CONFIG, self._config(shape), sort_keys=False)
        before = sum(prod(info.shape) for path in loaded_files(self._source) for info in read_header(path).values())
        after = sum(prod(info.shape) for file in self._files for info in read_header(self._out_dir / file).values())
        if (index := self._source.folder / INDEX).is_file():
            write_json(self._out_dir / INDEX, self._index(parse_json(index.read_text(encoding="utf-8")), after))
        return {
            "parameters_before": before,
            "parameters_after": after,
            "source_bytes": sum(path.stat().st_size for path in loaded_files(self._source)),
            "total_bytes": sum((self._out_dir / file).stat().st_size for file in self._files),
        }

    def _of(self, file: str) -> Iterator[tuple[str, tuple[str, str, tuple[int, ...]]]]:
        return ((name, place) for name, place in self._places.items() if place[0] == file)

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
        metadata["total_size"] = sum(
            prod(shape) * ITEM_BYTES[self._found[name][1].dtype] for name, (_, _, shape) in self._places.items()
        )
        if "total_parameters" in metadata:
            metadata["total_parameters"] = parameters
        return {"metadata": metadata, "weight_map": {new: file for file, new, _ in self._places.values()}}
