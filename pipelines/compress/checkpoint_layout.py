"""Layout of a checkpoint: file and name of each tensor, and which part of it a rank has.

ModelOpt exports a model of one layer (`pipelines.compress.one_layer`) as it exports any model. All layers have the same
shapes, so this export of the first one says what the files of the whole model contain. `RankFiles` takes whole tensors
instead.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.read import split_axis
from pipelines.checkpoint.tensors import TensorInfo, TensorSpec, read_header
from pipelines.checkpoint.verify import expected_tensors
from pipelines.compress.model_folder import EMBEDDING, FIRST, HEAD, ModelWeights, TensorWriter, true_name
from pipelines.domain.families import FAMILIES
from pipelines.domain.progress import Progress

_SHARD_BYTES = 10 * 10**9  # ModelOpt's default
_LAYERS = "transformer.layers."
_COPIED = {"transformer.vocab_embedding.weight": EMBEDDING, "lm_head.weight": HEAD}


class TensorPlace(NamedTuple):
    """A tensor in one of the files of a checkpoint."""

    file: str
    name: str


Copies = Iterator[tuple[TensorPlace, Path, TensorInfo]]
Rows = tuple[TensorPlace, str, int, int]
"""Tensor of the checkpoint, the one of the model folder whose rows it holds, EMBEDDING or HEAD, first row and end."""


@dataclass(frozen=True, slots=True)
class RanksLayout:
    """TensorRT-LLM's: rank{pp_rank * tp_size + tp_rank}.safetensors and config.json."""

    layers: int
    tp_size: int
    pp_size: int

    def create(self, exported: Path, out_dir: Path, vocab_size: int) -> TensorWriter:
        """Create all files of the checkpoint, with headers and room, from the export of the first layer."""
        files: dict[str, dict[str, TensorSpec]] = {name: {} for name in self._names()}
        for tp_rank in range(self.tp_size):
            for name, info in read_header(exported / self._file(0, tp_rank)).items():
                shape = info.shape
                if name in _COPIED:
                    shape = (math.ceil(vocab_size / self.tp_size), *shape[1:])
                for number in range(self.layers if name.startswith(_LAYERS) else 1):
                    place = self.place(tp_rank, _renumbered(name, number))
                    files[place.file][place.name] = TensorSpec(info.dtype, shape)
        return TensorWriter.create(out_dir, files)

    def reopen(self, out_dir: Path) -> TensorWriter:
        """Open files that a killed run has created."""
        return TensorWriter(out_dir, self._names())

    def layer(self, exported: Path, number: int) -> Copies:
        """Yield where each tensor of the exported layer goes, and where it is now.

        With the first layer go the tensors outside of layers that an export of one layer contains as they are.
        """
        for tp_rank in range(self.tp_size):
            file = exported / self._file(0, tp_rank)
            for name, info in read_header(file).items():
                if name.startswith(_LAYERS) or (number == 0 and name not in _COPIED):
                    yield self.place(tp_rank, _renumbered(name, number)), file, info

    def copied(self, writer: TensorWriter, vocab_size: int) -> Iterator[Rows]:
        """Yield the tensors that are copied from the model folder, split over tensor-parallel ranks."""
        rows = math.ceil(vocab_size / self.tp_size)
        for tp_rank in range(self.tp_size):
            start = min(tp_rank * rows, vocab_size)
            for name, source in _COPIED.items():
                place = self.place(tp_rank, name)
                if place.name in writer.names(place.file):
                    yield place, source, start, min(start + rows, vocab_size)

    def finish(self, exported: Path, out_dir: Path) -> None:
        """Write the files without tensors."""
        config: dict[str, Any] = json.loads((exported / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = self.layers
        config["rank"] = self.tp_size * self.pp_size - 1  # the exporter writes that of the last rank
        config["mapping"] |= {"pp_size": self.pp_size, "world_size": self.tp_size * self.pp_size}
        (out_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def _names(self) -> list[str]:
        return [f"rank{rank}.safetensors" for rank in range(self.tp_size * self.pp_size)]

    def place(self, tp_rank: int, name: str) -> TensorPlace:
        """Return where a tensor-parallel rank has a tensor, by its name in a checkpoint of one rank."""
        if not name.startswith(_LAYERS):
            return TensorPlace(self._file(0 if _COPIED.get(name) == EMBEDDING else self.pp_size - 1, tp_rank), name)
        stage, local = divmod(int(name.split(".", 3)[2]), self.layers // self.pp_size)
        return TensorPlace(self._file(stage, tp_rank), _renumbered(name, local))

    def _file(self, stage: int, tp_rank: int) -> str:
        return f"rank{stage * self.tp_size + tp_rank}.safetensors"


def _renumbered(name: str, number: int) -> str:
    """Return the name of the same tensor in another layer; names outside of layers stay."""
    return f"{_LAYERS}{number}.{name.split('.', 3)[3]}" if name.startswith(_LAYERS) else name


_OF_EXPERTS = ("mlp.fc.weight", "mlp.proj.weight")  # and their scales


class RankFiles:
    """The files of all ranks, for tensors that are known as a checkpoint of one rank has them."""

    def __init__(self, config: CheckpointConfig, out_dir: Path, *, begun: bool = False) -> None:
        """Create the files, with headers and room; or open those that a killed run has created."""
        self._config = config
        self.layout = RanksLayout(config.num_hidden_layers, config.tp_size, config.pp_size)
        if begun:
            self.writer = self.layout.reopen(out_dir)
            return
        ranks = {f"rank{rank}.safetensors": expected_tensors(config, rank) for rank in range(config.world_size)}
        self.writer = TensorWriter.create(out_dir, ranks)

    def write(self, name: str, whole: torch.Tensor) -> None:
        """Write each rank's part of a tensor, neither of the embedding nor of the head."""
        for tp_rank in range(self._config.tp_size):
            place = self.layout.place(tp_rank, name)
            self.writer.write(*place, iter([self._part(name.split(".", 3)[-1], whole, tp_rank)]))

    def _part(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a tensor-parallel rank's part of a tensor, by its name within the layer.

        With more ranks than key and value heads, neighbouring ranks have the same head.
        """
        config, parts = self._config, self._config.tp_size
        of_experts = config.experts is not None and name.startswith(_OF_EXPERTS) and whole.dim() > 1
        if of_experts:
            number, rank = rank % config.moe_ep_size, rank // config.moe_ep_size
            whole, parts = whole.chunk(config.moe_ep_size)[number], parts // config.moe_ep_size
        is_scale = of_experts and whole.dim() == 2  # [E, 1], one of each expert
        if parts == 1 or is_scale or (axis := split_axis(name, tuple(whole.shape))) is None:
            return whole
        if name.startswith("attention.qkv."):
            heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
            width = len(whole) // sum(heads)  # of a head, or half of it where two outputs share a byte
            each = zip(torch.split(whole, [count * width for count in heads]), heads, strict=True)
            return torch.cat([rows.chunk(n := min(count, parts))[rank * n // parts] for rows, count in each])
        joined = of_experts or FAMILIES[config.architecture].fused_linears  # up and gate
        halves = whole.chunk(2 if joined and name.startswith("mlp.fc") else 1, axis)
        return torch.cat([half.chunk(parts, axis)[rank] for half in halves], axis)


class FolderLayout:
    """ModelOpt's unified Hugging Face checkpoint: one file, or shards with an index."""

    _FILE = "model.safetensors"
    _INDEX = "model.safetensors.index.json"

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._shards: dict[str, str] = {}

    def create(self, exported: Path, out_dir: Path, vocab_size: int) -> TensorWriter:
        """See `RanksLayout.create`."""
        tensors: dict[str, TensorSpec] = {}
        for name, info in read_header(exported / self._FILE).items():
            if name.startswith(FIRST):
                tensors |= {true_name(name, number): info.spec for number in range(self._layers)}
            else:
                copied = name in (EMBEDDING, HEAD)
                tensors[name] = TensorSpec(info.dtype, (vocab_size, *info.shape[1:])) if copied else info.spec
        files = _shards(tensors)
        self._shards = {name: file for file, names in files.items() for name in names}
        writer = TensorWriter.create(
            out_dir, {file: {name: tensors[name] for name in names} for file, names in files.items()}, {"format": "pt"}
        )
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._shards.items()))}
            (out_dir / self._INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return writer

    def reopen(self, out_dir: Path) -> TensorWriter:
        """See `RanksLayout.reopen`."""
        files = [path.name for path in sorted(out_dir.glob("*.safetensors"))]
        self._shards = {name: file for file in files for name in read_header(out_dir / file)}
        return TensorWriter(out_dir, files)

    def layer(self, exported: Path, number: int) -> Copies:
        """See `RanksLayout.layer`."""
        for name, info in read_header(exported / self._FILE).items():
            if name.startswith(FIRST) or (number == 0 and name not in (EMBEDDING, HEAD)):
                yield self._place(true_name(name, number)), exported / self._FILE, info

    def copied(self, writer: TensorWriter, vocab_size: int) -> Iterator[Rows]:
        """See `RanksLayout.copied`."""
        for name in (EMBEDDING, HEAD):
            if name in self._shards:
                yield self._place(name), name, 0, vocab_size

    def finish(self, exported: Path, out_dir: Path) -> None:
        """See `RanksLayout.finish`."""
        for path in sorted(exported.iterdir()):
            if path.name not in (self._FILE, self._INDEX):
                (out_dir / path.name).write_bytes(path.read_bytes())

    def _place(self, name: str) -> TensorPlace:
        return TensorPlace(self._shards[name], name)


CheckpointLayout = RanksLayout | FolderLayout


def _shards(tensors: Mapping[str, TensorSpec], most: int = _SHARD_BYTES) -> dict[str, list[str]]:
    """Distribute tensors over files of at most `most` bytes, in the order of the model, under Transformers' names."""

    def order(name: str) -> tuple[int, int, str]:  # embedding, layers by number, norm, head
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            return 1, int(parts[2]), name
        return (0 if name == EMBEDDING else 2), 0, name

    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=order):
        if shards[-1] and size + tensors[name].nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}.safetensors": names for n, names in enumerate(shards, 1)}


def copy_vocabulary(
    writer: TensorWriter,
    weights: ModelWeights,
    head: str,
    dtype: torch.dtype,
    layout: CheckpointLayout,
    vocab_size: int,
    progress: Progress,
) -> None:
    """Copy embedding and output head in pieces; a rank whose rows end early has zeros after them."""
    tensors = list(layout.copied(writer, vocab_size))
    with progress.task("copying embedding and head", len(tensors), "tensors") as advance:
        for place, source, start, stop in tensors:
            writer.write(*place, weights.chunks(head if source == HEAD else EMBEDDING, dtype, start, stop))
            advance(1)
    writer.sync()
