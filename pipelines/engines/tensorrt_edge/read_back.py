"""Compare the graph that TensorRT Edge-LLM exported with its checkpoint, tensor by tensor.

The exporter succeeds whatever it left out, so every tensor of the checkpoint must be found in the files it wrote, and
every array of the graph in the checkpoint. It renames, transposes, joins (q, k and v) and shares equal arrays, so
values are compared. 16-bit values and the scales of FP8 and INT4 become FP16.

Shape legend: O output channels, I input channels, G groups of input channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.checkpoint.tensors import TensorFile, numpy_dtype
from pipelines.domain.errors import Fault

Array = np.ndarray[Any, Any]
EMBEDDING = "model.embed_tokens.weight"
INT4_GEMM = "Int4GroupwiseGemmPluginV2"
OF_GRAPH = "_model."
"""Before the name of a tensor in the graph."""
_TYPES = {
    "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "F8_E4M3", "INT8": "I8", "INT64": "I64",
    "INT32": "I32", "UINT8": "U8", "FLOAT4E2M1": "U8", "BOOL": "BOOL",
}  # fmt: skip
_AGAIN = "Nothing was kept. Choose another format or engine, and report it to NVIDIA/TensorRT-Edge-LLM."
_LOSS = 0.01
"""Share of a scale that its rounding to FP16 may change; below 6e-5, FP16 loses bits."""


class Graph:
    """The arrays of an exported graph.

    Attributes:
        nodes: as listed by export_graph.py.
    """

    def __init__(self, listing: Mapping[str, Any], folder: Path) -> None:
        self.nodes: list[dict[str, Any]] = listing["nodes"]
        self._listed = listing["initializers"]
        self._data = np.memmap(folder / "model.onnx.data", np.uint8, "r")

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __contains__(self, name: str) -> bool:
        return name in self._listed

    def __getitem__(self, name: str) -> Array:
        """Return an array; FP4 has two values in a byte, [O, I/2]."""
        entry = self._listed[name]
        begin, length = entry.get("at", (0, 0))
        raw = self._data[begin : begin + length] if "at" in entry else np.frombuffer(bytes.fromhex(entry["hex"]), "u1")
        shape = list(entry["shape"])
        if entry["type"] == "FLOAT4E2M1":
            shape[-1] //= 2
        array: Array = raw.view(numpy_dtype(_TYPES[entry["type"]])).reshape(shape)
        return array


def fragments_to_int4(packed: Array, out: int, width: int) -> Array:
    """Return the codes [O, I], -8 to 7, of a weight as Int4GroupwiseGemmPluginV2 reads it.

    A block of 128 outputs and 64 inputs is 8 rows (4 parts of the inputs, 2 halves of the outputs) of 128 threads with
    a word of 32 bits each, whose nibbles are outputs n and n + 32, and inputs k, k + 8, k + 1 and k + 9.

    Args:
        packed: int8 [blocks * 8, 512].
        out: O.
        width: I.
    """
    outs, ins = -(-out // 128), -(-width // 64)
    words = np.ascontiguousarray(packed).view("<u4").reshape(outs, ins, 4, 2, 128)
    block, tile, part, half, thread = np.indices(words.shape, sparse=True)
    codes = np.zeros((outs * 128, ins * 64), np.int8)
    for nibble in range(8):
        n = 128 * block + 64 * half + thread // 4 + 32 * (nibble // 2 % 2)
        k = 64 * tile + 16 * part + 2 * (thread % 4) + 8 * (nibble % 2) + nibble // 4
        codes[n, k] = ((words >> np.uint32(4 * nibble)) & 15).astype(np.int8) - 8
    return codes[:out, :width]


def nibbles_to_int4(packed: Array) -> Array:
    """Return the codes [O, I] of ModelOpt's uint8 [O/2, I], two outputs in a byte in two's complement."""
    codes = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1]).astype(np.int8)
    return np.where(codes > 7, codes - 16, codes).astype(np.int8)


def read_back(files: Sequence[TensorFile], listing: Mapping[str, Any], folder: Path) -> list[Fault]:
    """Return every tensor that is in the checkpoint or in the graph, but not in both.

    Args:
        files: the checkpoint's.
        listing: of the graph, see export_graph.py.
        folder: with model.onnx.data and embedding.safetensors.
    """
    graph, checkpoint = Graph(listing, folder), {name: file for file in files for name in file}
    arrays = _Arrays(graph, _joined_rows(checkpoint))
    lost: list[str] = []
    faults: list[Fault] = []
    for name, file in checkpoint.items():
        tensor, found = file[name], False
        if name.endswith((".k_scale", ".v_scale")):
            found = _in_attention(graph, name, float(tensor))
        elif name == EMBEDDING:
            found = _same(TensorFile(folder / "embedding.safetensors")["embedding"], half := _half(tensor))
            arrays.take(half)  # the head, where it is tied
            faults += _unfit(name, tensor, half)
        else:
            for each in _as_stored(tensor):
                if found := arrays.has(name, each):
                    faults += _unfit(name, tensor, each)
                    break
        if not found:
            lost.append(name)
    added = arrays.unused()
    lacks = f"lacks {len(lost)} of the checkpoint's {len(checkpoint)} tensors"
    for names, what in ((lost, lacks), (added, f"adds {len(added)} arrays")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            faults.append(Fault(f"TensorRT Edge-LLM's graph {what}: {shown}.", todo=_AGAIN))
    return faults


class _Arrays:
    """The arrays of a graph by their values: as they are, transposed, and with joined outputs apart."""

    def __init__(self, graph: Graph, joined: tuple[int, ...]) -> None:
        self._graph, self._taken = graph, set[str]()
        self._weights = {
            node["inputs"][1]: (node["attributes"]["gemm_n"], node["attributes"]["gemm_k"])
            for node in graph.nodes
            if node["op"] == INT4_GEMM
        }
        self._by_value: dict[tuple[Any, ...], list[str]] = {}
        for name in graph:
            for piece in _pieces(self._decoded(name), joined):
                self._by_value.setdefault(_value(piece), []).append(name)

    def _decoded(self, name: str) -> Array:
        array = self._graph[name]
        return fragments_to_int4(array, *self._weights[name]) if name in self._weights else array

    def has(self, name: str, tensor: Array) -> bool:
        """Whether a tensor is in the graph: under its own name if there is one, else anywhere."""
        own = OF_GRAPH + name
        if own not in self._graph:
            return self.take(tensor)
        self._taken.add(own)
        decoded, tensor = self._decoded(own), nibbles_to_int4(tensor) if own in self._weights else tensor
        return _same(decoded, tensor) or (tensor.ndim == 2 and _same(decoded, tensor.T))

    def take(self, tensor: Array) -> bool:
        """Whether an array has these values; it is then accounted for."""
        names = self._by_value.get(_value(tensor), [])
        self._taken.update(names)
        return bool(names)

    def unused(self) -> list[str]:
        """Return the arrays that are not of the checkpoint; those of ones alone change nothing."""
        arrays = ((name, self._graph[name]) for name in self._graph if name not in self._taken)
        return [
            name
            for name, array in arrays
            if array.size > 1 and array.dtype not in (np.int64, np.int32) and (array.astype(np.float32) != 1).any()
        ]


def _joined_rows(checkpoint: Mapping[str, TensorFile]) -> tuple[int, ...]:
    """Return the outputs of q, k and v, which some graphs join."""
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    return tuple(checkpoint[name].header[name].shape[0] for name in names if name in checkpoint)


def _pieces(array: Array, joined: tuple[int, ...]) -> Iterator[Array]:
    for each in (array, array.T) if array.ndim == 2 else (array,):
        yield each
        if each.ndim and each.shape[0] == sum(joined) and len(joined) == 3:
            yield from np.split(each, np.cumsum(joined)[:-1])


def _value(array: Array) -> tuple[Any, ...]:
    return array.shape, array.dtype.name, hash(array.tobytes())


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _half(tensor: Array) -> Array:
    with np.errstate(over="ignore"):
        return tensor.astype(np.float32).astype(np.float16)


def _as_stored(tensor: Array) -> list[Array]:
    """Return a tensor as a graph may have it: as it is, or in FP16."""
    return [tensor, _half(tensor)] if tensor.dtype in (np.float32, numpy_dtype("BF16")) else [tensor]


def _unfit(name: str, tensor: Array, stored: Array) -> Iterator[Fault]:
    """Refuse what FP16 cannot hold: values above 65,504, and scales so small that bits are lost."""
    if stored.dtype != np.float16:
        return
    whole, half = tensor.astype(np.float32), stored.astype(np.float32)
    lost = ~np.isfinite(half)
    if name.endswith("scale"):
        lost |= np.abs(half - whole) > _LOSS * np.abs(whole)
    if lost.any():
        value = float(whole[lost].flat[0])
        yield Fault(f"'{name}' has {value:g}, which FP16 cannot hold; Edge-LLM computes in FP16.", todo=_AGAIN)


def _in_attention(graph: Graph, name: str, scale: float) -> bool:
    """Whether the attention of a tensor's layer has its scale of the KV cache."""
    match = re.search(r"layers\.(\d+)\.", name)
    attention = [node["attributes"] for node in graph.nodes if node["op"] == "AttentionPlugin"]
    if match is None or int(match[1]) >= len(attention):
        return False
    own = attention[int(match[1])]
    stored = own["qkv_scales"][2 if name.endswith("v_scale") else 1]
    return own["enable_fp8_kv_cache"] == 1 and bool(np.float32(stored) == np.float32(scale))
