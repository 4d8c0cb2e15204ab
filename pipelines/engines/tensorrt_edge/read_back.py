"""Compare the graph that TensorRT Edge-LLM exported with its checkpoint, tensor by tensor.

The exporter succeeds whatever it left out, so every tensor of the checkpoint must be found in the files it wrote, and
every array of the graph in the checkpoint. It renames, transposes, joins (q, k and v) and shares equal arrays, so
values are compared. 16-bit values and the scales of FP8 and INT4 become FP16.

Shape legend: O output channels, I input channels.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.checkpoint.tensors import TensorFile, numpy_dtype
from pipelines.domain.errors import Fault

Array = np.ndarray[Any, Any]
GRAPH = "model.onnx"
EMBEDDING = "model.embed_tokens.weight"
INT4_GEMM = "Int4GroupwiseGemmPluginV2"
_TYPES = {
    "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "F8_E4M3", "INT8": "I8", "INT64": "I64",
    "INT32": "I32", "UINT8": "U8", "FLOAT4E2M1": "U8", "BOOL": "BOOL",
}  # fmt: skip
_AGAIN = "Nothing was kept. Choose another format or engine, and report it to NVIDIA/TensorRT-Edge-LLM."
_JOINED = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
"""Weights that a graph may join, in every layer."""
_LOSS = 0.01
"""Share of a scale that its rounding to FP16 may change; below 6e-5, FP16 loses bits."""


class Graph(Mapping[str, Array]):
    """The arrays of an exported graph by name; FP4 has two values in a byte, [O, I/2].

    Attributes:
        nodes: as listed by export_graph.py.
    """

    def __init__(self, listing: Mapping[str, Any], folder: Path) -> None:
        self.nodes: list[dict[str, Any]] = listing["nodes"]
        self._listed = listing["initializers"]
        self._data = np.memmap(folder / f"{GRAPH}.data", np.uint8, "r")

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def __getitem__(self, name: str) -> Array:
        entry = self._listed[name]
        begin, length = entry.get("at", (0, 0))
        raw = self._data[begin : begin + length] if "at" in entry else np.frombuffer(bytes.fromhex(entry["hex"]), "u1")
        *outer, last = entry["shape"] or [1]
        last = last // 2 if entry["type"] == "FLOAT4E2M1" else last
        array: Array = raw.view(numpy_dtype(_TYPES[entry["type"]])).reshape([*outer, last] if entry["shape"] else [])
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
    """Return every tensor that is in the checkpoint or in the graph, but not in both, or that FP16 cannot hold.

    Args:
        files: the checkpoint's.
        listing: of the graph, see export_graph.py.
        folder: with model.onnx.data, embedding.safetensors and config.json.
    """
    graph, checkpoint = Graph(listing, folder), {name: file for file in files for name in file}
    embedding = _value(TensorFile(folder / "embedding.safetensors")["embedding"])
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = [sizes[f"num_{each}_heads"] * sizes["head_dim"] for each in ("attention", "key_value", "key_value")]
    rows = [len(checkpoint[name][name]) for name in _JOINED if name in checkpoint]
    arrays, taken = _by_value(graph, rows), set[str]()
    lost, faults = list[str](), list[Fault]()
    for name, file in checkpoint.items():
        tensor = file[name]
        if name.endswith((".k_scale", ".v_scale")):
            lost += [] if _in_attention(graph, name, float(tensor)) else [name]
            continue
        # the head is the embedding again, where it is tied
        places = {embedding: arrays.get(embedding, [])} if name == EMBEDDING else arrays
        match = _found(name, tensor, places, heads)
        if match is None:
            lost.append(name)
        else:
            stored, pieces = match
            for piece in pieces:
                taken.update(places[_value(piece)])
            faults += _unfit(name, tensor, stored)
    added = [name for name, array in graph.items() if name not in taken and _counts(array)]
    lacks = f"lacks {len(lost)} of the checkpoint's {len(checkpoint)} tensors"
    for names, what in ((lost, lacks), (added, f"adds {len(added)} arrays")):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            faults.append(Fault(f"TensorRT Edge-LLM's graph {what}: {listed}.", todo=_AGAIN))
    if listing.get("skipped") and not lost:  # tensors that equal others
        faults.append(Fault(f"TensorRT Edge-LLM's exporter skipped {listing['skipped']} tensors.", todo=_AGAIN))
    return faults


def _by_value(graph: Graph, joined: Sequence[int]) -> dict[Any, list[str]]:
    """Return the names of a graph's arrays by their values: as they are, transposed, and with joined outputs apart."""
    gemms = {node["inputs"][1]: node["attributes"] for node in graph.nodes if node["op"] == INT4_GEMM}
    names: dict[Any, list[str]] = {}
    for name, stored in graph.items():
        own = gemms.get(name)
        array = fragments_to_int4(stored, own["gemm_n"], own["gemm_k"]) if own else stored
        for each in (array, array.T) if array.ndim == 2 else (array,):
            apart = np.split(each, np.cumsum(joined)[:-1]) if each.ndim and len(each) == sum(joined) else []
            for piece in (each, *apart):
                names.setdefault(_value(piece), []).append(name)
    return names


def _value(array: Array) -> tuple[Any, ...]:
    return array.shape, array.dtype.name, hash(array.tobytes())


def _found(
    name: str, tensor: Array, places: Mapping[Any, list[str]], heads: Sequence[int]
) -> tuple[Array, list[Array]] | None:
    """Return a tensor as the graph has it, and its pieces there: q, k and v, or gate and up, may be apart."""
    for stored in _as_stored(tensor):
        outs = len(stored) if stored.ndim else 0
        sizes = heads if ".qkv_proj." in name else [outs // 2, outs // 2] if ".gate_up_proj." in name else []
        apart = np.split(stored, np.cumsum(sizes)[:-1]) if outs and outs == sum(sizes) else []
        for pieces in ([stored], apart):
            if pieces and all(_value(piece) in places for piece in pieces):
                return stored, pieces
    return None


def _as_stored(tensor: Array) -> list[Array]:
    """Return a tensor as a graph may have it: as it is, in FP16, or unpacked from INT4."""
    if tensor.dtype == np.uint8:
        return [tensor, nibbles_to_int4(tensor)]
    if tensor.dtype not in (np.float32, numpy_dtype("BF16")):
        return [tensor]
    with np.errstate(over="ignore"):
        return [tensor, tensor.astype(np.float32).astype(np.float16)]


def _counts(array: Array) -> bool:
    """Whether an array that is not of the checkpoint changes the result: no sizes of shapes, no number, no ones."""
    return array.size > 1 and array.dtype not in (np.int64, np.int32) and bool((array.astype(np.float32) != 1).any())


def _unfit(name: str, tensor: Array, stored: Array) -> Iterator[Fault]:
    """Refuse what FP16 cannot hold: values above 65,504, and scales so small that bits are lost."""
    if stored.dtype == np.float16:
        whole, half = tensor.astype(np.float32), stored.astype(np.float32)
        lost = ~np.isfinite(half)
        if name.endswith("scale"):
            lost |= np.abs(half - whole) > _LOSS * np.abs(whole)
        if lost.any():
            value = float(whole[lost].flat[0])
            yield Fault(f"'{name}' has {value:g}, which FP16 cannot hold; Edge-LLM computes in FP16.", todo=_AGAIN)


def _in_attention(graph: Graph, name: str, scale: float) -> bool:
    """Whether the attention of a tensor's layer has its scale of the KV cache."""
    layer = re.search(r"layers\.(\d+)\.", name)
    own = [node["attributes"] for node in graph.nodes if node["op"] == "AttentionPlugin"]
    if layer is None or int(layer[1]) >= len(own) or own[int(layer[1])]["enable_fp8_kv_cache"] != 1:
        return False
    return bool(np.float32(own[int(layer[1])]["qkv_scales"]["qkv".index(name[-7])]) == np.float32(scale))
