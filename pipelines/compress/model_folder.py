"""A model folder: what it holds; reading its tensors one by one, and writing safetensors files tensor by tensor.

Files are read and written, not mapped: a mapped page counts as this process's memory as long as the kernel keeps it.
Format: see `pipelines.checkpoint.tensors`.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from pipelines.checkpoint.tensors import ITEM_BYTES, TensorInfo, TensorSpec, read_header, stored_tensors
from pipelines.compress.config import Dtype
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import show_bytes
from pipelines.host.files import json_object, sync

# A Hugging Face folder before it is loaded: its configuration, its files, and the types of its weights.

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXPORTED = ("bfloat16", "float16")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type named "bfloat16", "float16" or "float32"."""
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk, inspected but not loaded."""

    folder: Path
    config: dict[str, Any]
    shape: ModelShape
    weight_files: tuple[Path, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files on disk."""
        return sum(path.stat().st_size for path in self.weight_files)


def look_at(folder: Path) -> ModelFolder:
    """Read config.json and check every safetensors header against its file's size.

    Raises:
        UserError: no such folder, no config.json, an unknown architecture, no safetensors, a damaged file.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(
            f"{folder} has no config.json; it is not a Hugging Face model folder.",
            allowed="A model folder contains config.json, tokenizer files and *.safetensors.",
        )
    config = json_object(config_path, todo="Download the model again.")
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise UserError(
            f"{folder} contains no *.safetensors file.",
            allowed="Weights are read from safetensors only; pickled .bin and .pt files are not opened.",
            todo="Convert the model with save_pretrained(..., safe_serialization=True).",
        )
    for path in files:
        read_header(path)
    return ModelFolder(folder, config, ModelShape.from_hf_config(config, str(config_path)), files)


def pick_dtype(source: ModelFolder, dtype: Dtype) -> str:
    """Return "bfloat16" or "float16": the requested one, or the model's own.

    A float32 model becomes bfloat16: its range is that of float32, while float16 overflows in Gemma.
    """
    if dtype != "auto":
        return dtype
    own = own_dtype(source)
    return own if own in _EXPORTED else "bfloat16"


def own_dtype(source: ModelFolder) -> str:
    """Return the type of the model's weights; float32 if its configuration does not specify one."""
    own = source.config.get("dtype") or source.config.get("torch_dtype")
    return own if own in _TORCH_DTYPES else "float32"


def pick_device(device: str) -> str:
    """Return "cuda" or "cpu"; "auto" selects CUDA if it is available.

    Raises:
        UserError: CUDA was requested but is not available, or the name is unknown.
    """
    has_cuda = torch.cuda.is_available()
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device='{device}' is not known.", allowed="Choose one of auto, cpu, cuda.")
    if device == "cuda" and not has_cuda:
        raise UserError(
            f"PyTorch {torch.__version__} cannot use a GPU here (built for CUDA {torch.version.cuda or 'not at all'}).",
            todo="`make doctor` shows the driver and its CUDA version; install a PyTorch for that. With an empty "
            "CUDA_VISIBLE_DEVICES everything is computed on the CPU.",
        )
    return "cuda" if has_cuda and device != "cpu" else "cpu"


EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FIRST = "model.layers.0."
"""Prefix of the tensors of the first layer."""


def true_name(name: str, number: int) -> str:
    """Return the name in the whole model of what is in layer `number`, by its name in a model of one layer."""
    return f"model.layers.{number}.{name.removeprefix(FIRST)}" if name.startswith(FIRST) else name


CHUNK_BYTES = 32 * 2**20
"""Bytes of an embedding or a file that are in memory at a time."""

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64",
)  # fmt: skip
"""Types in the order of the safetensors library, which writes the tensors of the last one first (`tensor.rs`)."""


class ModelWeights:
    """The tensors of a model folder, read one at a time."""

    def __init__(self, source: ModelFolder) -> None:
        """Read the headers of the files that Transformers would load."""
        self.folder = source.folder
        stored = stored_tensors(source.folder)
        self._found = {name: (file.path, file.header[name]) for name, (file, _) in stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Reject a folder without one of these tensors, or with one of another shape.

        Raises:
            UserError: names the first such tensor.
        """
        if missing := sorted(name for name in shapes if name not in self):
            raise UserError(
                f"{self.folder} lacks the tensor '{missing[0]}' ({len(missing)} missing).",
                todo="Download the model again.",
            )
        for name, shape in shapes.items():
            if self.shape(name) != shape:
                raise UserError(
                    f"The weight '{name}' of {self.folder} has the shape {list(self.shape(name))}; by config.json it "
                    f"is {list(shape)}.",
                    todo="Download the model again: config.json and weights are not of one model.",
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._found[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        return _TORCH[self._found[name][1].dtype]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a whole tensor.

        Raises:
            UserError: it contains NaN or infinity, or its file has become shorter.
        """
        _, info = self._found[name]
        return self._read(name, [(0, prod(info.shape))], dtype).reshape(info.shape)

    def chunks(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Read rows `start` to `stop` of a matrix in pieces of about `CHUNK_BYTES`; errors as for `tensor`."""
        columns = self.shape(name)[1]
        step = max(1, CHUNK_BYTES // (columns * 4))
        for row in range(start, stop, step):
            span = row * columns, min(row + step, stop) * columns
            yield self._read(name, [span], dtype).reshape(-1, columns)

    def gather(self, name: str, dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
        """Read single rows of a matrix, [len(rows), columns]; errors as for `tensor`."""
        columns = self.shape(name)[1]
        return self._read(name, [(int(row) * columns, (int(row) + 1) * columns) for row in rows], dtype).reshape(
            -1, columns
        )

    def same(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Compare two matrices in pieces; errors as for `tensor`."""
        shape = self.shape(one)
        return shape == self.shape(other) and all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(
                self.chunks(one, dtype, 0, shape[0]), self.chunks(other, dtype, 0, shape[0]), strict=True
            )
        )

    def _read(self, name: str, spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
        """Read spans of elements [begin, end), one after the other, into one vector."""
        _, info = self._found[name]
        if info.dtype not in _TORCH:
            raise UserError(
                f"The weight '{name}' of {self.folder} has the type {info.dtype}.",
                allowed=f"Weights to compress: {', '.join(_TORCH)}.",
                todo="Give the original model.",
            )
        values = self._values(name, spans, _TORCH[info.dtype])
        if values.numel() and not all(torch.isfinite(extreme) for extreme in torch.aminmax(values)):
            raise UserError(
                f"The weight '{name}' of {self.folder} contains NaN or infinity.",
                todo="Download or train the model again; such a model cannot be calibrated.",
            )
        return values.to(dtype)

    def _values(self, name: str, spans: Sequence[tuple[int, int]], stored: torch.dtype) -> torch.Tensor:
        """Read spans of elements into one vector, in the type in which they are stored."""
        path, info = self._found[name]
        item = ITEM_BYTES[info.dtype]
        values = torch.empty(sum(end - begin for begin, end in spans), dtype=stored)
        into, done = raw(values), 0
        with path.open("rb", buffering=0) as file:
            for begin, end in spans:
                file.seek(info.begin + begin * item)
                fill(file, into[done : done + (end - begin) * item], path, name)
                done += (end - begin) * item
        return values


def fill(file: FileIO, into: memoryview, path: Path, name: str) -> None:
    """Read until the buffer is full; a single read returns at most 2 GiB."""
    done = 0
    while done < len(into):
        got = file.readinto(into[done:])
        if not got:
            raise UserError(
                f"{path} ends early: '{name}' needs {len(into):,} bytes and {done:,} are there.",
                todo="The file changed while it was read; copy or download it again.",
            )
        done += got


class TensorWriter:
    """Safetensors files that are written tensor by tensor, in any order, and can be continued after a crash.

    They are byte for byte those of `safetensors.torch.save_file`: header first, larger types first, then by name.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        """Open files that `create` made."""
        self.folder = folder
        self._files = {name: read_header(folder / name) for name in names}

    @classmethod
    def create(
        cls, folder: Path, layouts: Mapping[str, Mapping[str, TensorSpec]], metadata: Mapping[str, str] | None = None
    ) -> Self:
        """Write the headers and reserve the disk space of all tensors, whose content is undefined at first.

        Raises:
            UserError: the disk has too little space.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, layout in layouts.items():
            header, size = _header(layout, metadata)
            with (folder / name).open("wb") as file:
                file.write(header)
                _reserve(file.fileno(), len(header) + size, folder / name)
        return cls(folder, list(layouts))

    def names(self, file: str) -> Set[str]:
        """Return the names of the tensors in a file."""
        return self._files[file].keys()

    def copy(self, file: str, name: str, source: Path, info: TensorInfo) -> None:
        """Copy the bytes of a tensor from another safetensors file."""
        ours = self._files[file][name]
        if ours.spec != info.spec:
            raise RuntimeError(f"'{name}' is {info.spec}, not {ours.spec} as in the first layer")
        with source.open("rb", buffering=0) as theirs, (self.folder / file).open("r+b") as mine:
            theirs.seek(info.begin)
            mine.seek(ours.begin)
            buffer, left = memoryview(bytearray(min(CHUNK_BYTES, info.nbytes))), info.nbytes
            while left:
                part = buffer[: min(left, len(buffer))]
                fill(theirs, part, source, name)
                mine.write(part)
                left -= len(part)

    def write(self, file: str, name: str, pieces: Iterator[torch.Tensor]) -> None:
        """Write a tensor from consecutive pieces; what they leave is zero."""
        ours = self._files[file][name]
        left = ours.nbytes
        with (self.folder / file).open("r+b") as mine:
            mine.seek(ours.begin)
            for piece in pieces:
                left -= mine.write(raw(piece))
            while left > 0:
                left -= mine.write(bytes(min(left, CHUNK_BYTES)))
        if left:
            raise RuntimeError(f"'{name}' got {-left} bytes more than its {ours.nbytes}")

    def sync(self) -> None:
        """Make sure that what was written survives a power failure."""
        for name in self._files:
            sync(self.folder / name)


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor; those of a contiguous tensor on the CPU are its own, not a copy."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _header(layout: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    """Return the header of a file, and the bytes of its tensors."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, spec in sorted(layout.items(), key=lambda item: (-_ORDER.index(item[1].dtype), item[0])):
        begin, end = end, end + spec.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _reserve(handle: int, size: int, path: Path) -> None:
    """Make the file `size` bytes long and claim them, where the system can, so that a full disk is known now."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)
            raise
        disk = os.statvfs(path.parent)
        raise UserError(
            f"{path} needs {show_bytes(size)}, and the disk has {show_bytes(disk.f_bavail * disk.f_frsize)} left.",
            todo="Free some space, or set paths.store to a folder on a larger disk.",
        ) from error
    os.truncate(handle, size)
