"""The prompt table: rows of embeddings that a request brings and its token ids name, as in TensorRT-LLM.

Token ids from the vocabulary's size V on are no tokens: id V + r is row r of the request's own `prompt_embedding_table`
[rows, hidden]. Features of a picture and tuned prompts (P-tuning) reach the model in this way.

The graph has one table for all running requests, and the paged pipeline takes token ids alone. So each row of a request
gets a place in the graph's table while it runs, and an id that no other content ever had: V + place + N * generation,
of which the graph takes the remainder by the table's N rows. openvino_genai names its KV blocks by these ids. Requests
with equal tables get equal ids as long as the rows are in their places, and share KV blocks; others never do.
"""

import ctypes
import hashlib
import mmap
import os
import xml.etree.ElementTree as ET
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.domain.errors import UserError

Array = np.ndarray[Any, Any]

NAME = "prompt_embedding_table"
PROBED = 2
"""Generations of ids that looking for the table uses; the pipeline keeps the KV of what it read there."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """The rows of one request.

    Attributes:
        rows: float32 [rows, hidden].
        key: names the content; equal for equal rows.
    """

    rows: Array
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", hashlib.sha256(np.ascontiguousarray(self.rows).data).digest())


def with_table(ids: ov.Node, embedding: ov.Node, rows: int) -> ov.Node:
    """Return the embeddings [B, T, H], float32, of token ids [B, T], i64, and of ids that name rows of a table.

    Args:
        ids: token ids.
        embedding: of the vocabulary [V, H].
        rows: N, of the table; 0 is no table.
    """
    if not rows:
        return op.convert(op.gather(embedding, ids, np.int64(0)), "f32")
    vocab_size, hidden = (each.get_length() for each in embedding.get_output_partial_shape(0))
    of_table = op.greater_equal(ids, np.int64(vocab_size))
    tokens = op.gather(embedding, op.select(of_table, np.int64(0), ids), np.int64(0))
    # not equal elements, which a pass could make one number of
    start = (np.arange(rows * hidden, dtype=np.float32) % 7).reshape(rows, hidden)
    table = op.constant(start)
    table.set_friendly_name(NAME)
    places = op.floor_mod(op.subtract(ids, np.int64(vocab_size)), np.int64(rows))
    from_table = op.gather(table, places, np.int64(0))
    return op.select(op.unsqueeze(of_table, np.int64(2)), from_table, op.convert(tokens, "f32"))


def with_table_input(model: ov.Model) -> ov.Model:
    """Give the graph its table as an input [rows, H] named `prompt_embedding_table`; a model without one stays."""
    for node in model.get_ordered_ops():
        if node.get_friendly_name() == NAME:
            hidden = node.get_output_shape(0)[1]
            parameter = op.parameter(ov.PartialShape([-1, hidden]), ov.Type.f32)
            parameter.get_output_tensor(0).set_names({NAME})
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(parameter.output(0))
            model.add_parameters([parameter])
            model.validate_nodes_and_infer_types()
    return model


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
MAP_FIXED = 0x10
"""From <sys/mman.h> of Linux."""


def mapped_table(graph: Path, is_read: Callable[[Array], bool]) -> Array:
    """Return the table of a graph that this process has just loaded, float32 [N, H]; what is written there is read.

    openvino_genai takes nothing but token ids, and OpenVINO reads the rows of a constant from the mapped file of its
    weights. The pages around the table are mapped again at the same place, for this process alone and to be written to;
    the file stays as it is.

    Args:
        graph: the file.
        is_read: whether the loaded graph reads a memory that may be its table.

    Raises:
        UserError: the graph reads none, so that no request could bring rows.
    """
    stored = _stored(graph)
    start, size, shape = int(stored["offset"]), int(stored["size"]), [int(each) for each in stored["shape"].split(",")]
    weights = graph.with_suffix(".bin").resolve()
    first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    with weights.open("rb") as file:
        for address in _whole_mappings(weights):
            protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
            place = _libc.mmap(address + first, last - first, protection, kind, file.fileno(), first)
            if place != address + first:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(weights))
            memory = (ctypes.c_float * (size // ctypes.sizeof(ctypes.c_float))).from_address(address + start)
            table: Array = np.ctypeslib.as_array(memory).reshape(shape)
            if is_read(table):
                return table
    raise UserError(
        f"{graph} has a prompt table that this version of OpenVINO does not read from the file.",
        todo="Build the engine without one: build.max_prompt_embedding_table_size=0.",
    )


def _stored(graph: Path) -> dict[str, str]:
    """Return where the weights file has the table."""
    for layer in ET.parse(graph).iterfind("layers/layer"):  # our own file
        data = layer.find("data")
        if layer.get("name") == NAME and data is not None:
            return dict(data.attrib)
    raise UserError(f"{graph} has no prompt table.", todo="Build the engine again.")


def _whole_mappings(file: Path) -> Iterator[int]:
    """Yield where whole read-only mappings of a file start; one whose table is in use has been cut."""
    for start, stop, permissions, offset, path in mappings():
        if path == str(file) and permissions.startswith("r--s") and not offset and stop - start >= file.stat().st_size:
            yield start


def mappings() -> Iterator[tuple[int, int, str, int, str]]:
    """Yield start, end, permissions, offset and file (empty for none) of this process's mappings."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        place, permissions, offset, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in place.split("-"))
        yield start, stop, permissions, int(offset, 16), "".join(path)


@dataclass(slots=True)
class _Placed:
    """The rows of a table in the graph's one: places and ids (i64) of each, and how many running requests use it."""

    places: list[int]
    ids: Array
    users: int = 0


class TablePlaces:
    """Which rows are in the graph's table, for the thread that runs the engine."""

    def __init__(self, memory: Array, vocab_size: int) -> None:
        """Start empty.

        Args:
            memory: the graph's table [N, H], float32.
            vocab_size: V.
        """
        self._memory, self._vocab_size = memory, vocab_size
        self._free = list(range(len(memory)))
        self._generation = PROBED - 1  # of the last rows
        self._placed: OrderedDict[bytes, _Placed] = OrderedDict()  # the one unused for longest first

    def fits(self, table: PromptTable) -> bool:
        """Return whether there is room for the rows beside those of running requests."""
        if table.key in self._placed:
            return True
        unused = sum(len(each.places) for each in self._placed.values() if not each.users)
        return len(table.rows) <= len(self._free) + unused

    def take(self, table: PromptTable) -> None:
        """Put rows in their places for a request that starts; see `fits`."""
        if table.key not in self._placed:
            self._placed[table.key] = self._place(table)
        self._placed[table.key].users += 1
        self._placed.move_to_end(table.key)

    def release(self, table: PromptTable) -> None:
        """Let go of rows after a request; they stay until others need their places."""
        self._placed[table.key].users -= 1

    def ids(self, prompt: Array, table: PromptTable) -> Array:
        """Return a prompt [T] with the graph's ids for the request's own."""
        rows = prompt - self._vocab_size
        return np.where(rows < 0, prompt, self._placed[table.key].ids[np.maximum(rows, 0)])

    def _place(self, table: PromptTable) -> _Placed:
        while len(self._free) < len(table.rows):
            oldest = next(key for key, each in self._placed.items() if not each.users)
            self._free += self._placed.pop(oldest).places
        places, self._free = self._free[: len(table.rows)], self._free[len(table.rows) :]
        self._generation += 1
        self._memory[places] = table.rows
        first = self._vocab_size + len(self._memory) * self._generation
        return _Placed(places, first + np.array(places, dtype=np.int64))
