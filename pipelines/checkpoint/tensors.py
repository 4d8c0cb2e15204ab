"""Read safetensors files as numpy views of a memory map, in every dtype that a checkpoint uses.

Format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of
JSON {name: {dtype, shape, data_offsets: [begin, end)}}, then the tensors back to back.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.domain.errors import UserError, shown
from pipelines.host.files import parse_json

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MOST_DIMENSIONS = 32  # of numpy 1, which makes the views

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""safetensors dtype -> bytes of one element."""

_NUMPY_NAMES = {
    "F64": "float64", "I64": "int64", "U64": "uint64", "F32": "float32", "I32": "int32", "U32": "uint32",
    "F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class TensorSpec(NamedTuple):
    """Type in safetensors spelling, e.g. "BF16", "F8_E4M3", "I8", and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, shape and position of one tensor in its file.

    Attributes:
        dtype: safetensors spelling: "F32", "F16", "BF16", "F8_E4M3", "I8", "U8", ...
        shape: dimensions; () is a scalar.
        begin: first byte, counted from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def spec(self) -> TensorSpec:
        """Type and shape."""
        return TensorSpec(self.dtype, self.shape)


def numpy_dtype(dtype: str) -> "np.dtype[Any]":
    """Return the numpy (or ml_dtypes) type for a safetensors dtype such as "BF16"."""
    import ml_dtypes  # noqa: F401 - gives numpy the types that it lacks
    import numpy as np

    return np.dtype(_NUMPY_NAMES[dtype])


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read names, dtypes, shapes and positions of all tensors, but no tensor data.

    Raises:
        UserError: the file is missing, truncated, or not a safetensors file.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist.", todo="Export the checkpoint again.")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(path, f"it declares a header of {length} bytes, the file has {size} bytes")
        raw = file.read(length)
    try:
        header = parse_json(raw)
    except ValueError as error:
        raise _corrupt(path, f"the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(path, f"the header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


KEEP_ONE = "Remove the one that is not meant, or download the model again."
"""What to do about two tensors of which a model can have one."""


def weight_files(folder: Path) -> list[Path]:
    """Return the files that Transformers loads: model.safetensors, those that the index names, or all."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> TensorInfo:
    """Parse one header entry, checking its byte range against its shape and the size of the file."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = (*shape, begin, end)
    except (KeyError, TypeError, ValueError):
        raise _corrupt(path, f"the header entry of {shown(name)} is {shown(entry)}") from None
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DIMENSIONS
        or not all(type(size) is int and abs(size) < 2**63 for size in sizes)
    ):
        raise _corrupt(path, f"the header entry of {shown(name)} is {shown(entry)}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        bare = shown(dtype).strip("'")
        raise UserError(
            f"{path} contains {shown(name)} with dtype {bare}, which is not supported.",
            allowed=f"Supported: {', '.join(ITEM_BYTES)}.",
        )
    expected, what = math.prod(shape) * ITEM_BYTES[dtype], f"{shown(name)} {dtype}{shown(shape)}"
    if begin < 0 or min(shape, default=0) < 0 or end - begin != expected:
        raise _corrupt(path, f"{what} needs {shown(expected)} bytes, but its entry has {end - begin}")
    if data_start + end > file_size:
        raise _corrupt(path, f"{shown(name)} ends at byte {data_start + end}, but the file has {file_size} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + begin, expected)


def _check_cover(path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_size: int) -> None:
    """Check that the tensors lie back to back, up to the end of the file, as the safetensors library does."""
    end, before = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if info.begin != end:
            how = "overlap" if info.begin < end else "leave a gap"
            raise _corrupt(path, f"{before} and {shown(name)} {how}: {end} and {info.begin}")
        end, before = info.begin + info.nbytes, shown(name)
    if end != file_size:
        raise _corrupt(path, f"{before} ends at byte {end}, but the file has {file_size} bytes")


def _corrupt(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged or truncated: {reason}.", todo="Copy or export the file again.")


class TensorFile(Mapping[str, "np.ndarray[Any, Any]"]):
    """One safetensors file; indexing returns read-only numpy views of the memory map, never copies."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            UserError: see `read_header`.
        """
        self.path = path
        self.header = read_header(path)
        self._map: np.ndarray[Any, Any] | None = None

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        import numpy as np

        info = self.header[name]
        if self._map is None:
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r")
        flat = self._map[info.begin : info.begin + info.nbytes]
        return flat.view(np.ndarray).view(numpy_dtype(info.dtype)).reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


def stored_tensors(folder: Path, own_name: Callable[[str], str | None] = str) -> dict[str, tuple[TensorFile, str]]:
    """Return the tensors of `weight_files`: file, and name in it.

    Args:
        folder: a Hugging Face folder.
        own_name: name in the folder -> key of the result; None leaves a tensor out.

    Raises:
        UserError: two tensors have the same key; see also `read_header`.
    """
    found: dict[str, tuple[TensorFile, str]] = {}
    for file in map(TensorFile, weight_files(folder)):
        for name in file:
            if (own := own_name(name)) is None:
                continue
            if own in found:
                first, other = found[own]
                raise UserError(
                    f"{folder} holds one tensor twice: '{other}' in {first.path.name}, '{name}' in {file.path.name}.",
                    allowed="It can hold one of them.",
                    todo=KEEP_ONE,
                )
            found[own] = file, name
    return found
