"""LoRA adapters from Hugging Face's peft, added to an engine's graph as low-rank branches.

    y = W x + scaling * B (A x),   A [rank, I], B [O, rank], scaling = lora_alpha / rank (Hu et al., 2021), by module

The branch is a separate node and computes in float, so the engine's weights stay packed and the result equals that of
peft. openvino_genai supports adapters too, but only in its own `generate`, not for a scheduler that adds requests at
any time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.checkpoint.adapter_files import AdapterFiles, place
from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS, UNIFORM

# Names of graph nodes.
#
# OpenVINO numbers an unnamed node by the count of nodes the process has created before ("Multiply_1042"), and writes
# that number into the engine file. Equal engines must have equal bytes, so every node gets a name here.


def named(node: ov.Node, name: str) -> ov.Node:
    """Name a node, and derive names for its unnamed inputs; nodes that have a name keep it.

    Args:
        node: the last node of one step of the graph, e.g. the sum that ends a rotation.
        name: place and meaning, e.g. "model.layers.0.self_attn.q_rotated"; the nodes behind it become
            "<name>.Multiply", "<name>.Multiply.2", "<name>.Constant" and so on.

    Returns:
        The same node.
    """
    if not _is_named(node):
        node.set_friendly_name(name)
        _name_inputs(node, name, Counter())
    return node


def _name_inputs(node: ov.Node, prefix: str, seen: Counter[str]) -> None:
    for value in node.input_values():
        source = value.get_node()
        if not _is_named(source):
            kind = source.get_type_name()
            seen[kind] += 1
            source.set_friendly_name(f"{prefix}.{kind}" + (f".{seen[kind]}" if seen[kind] > 1 else ""))
            _name_inputs(source, prefix, seen)


def _is_named(node: ov.Node) -> bool:
    return bool(node.get_friendly_name() != node.get_name())


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One LoRA adapter.

    Attributes:
        branches: module, e.g. "model.layers.0.self_attn.q_proj" -> (A [rank, I], scaling * B [O, rank]), float32.
    """

    path: Path
    branches: Mapping[str, tuple[Array, Array]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder that peft wrote.

        Raises:
            UserError: see `AdapterFiles`.
        """
        files = AdapterFiles.read(folder)
        # the engine is a language model alone, also where the adapter's model held it beside another one
        branches = {"model.layers.{}.{}".format(*place(module)): files.matrices(module) for module in files.scalings}
        return cls(folder, branches)

    @property
    def rank(self) -> int:
        """Largest rank of all modules."""
        return max(len(a) for a, _ in self.branches.values())


def read_adapters(folder: Path) -> dict[int, LoraAdapter]:
    """Read every adapter from `folder/<task id>/`, the layout of TensorRT-LLM's lora_prefetch_dir.

    Raises:
        UserError: the folder is missing or empty, or a name in it is not a number.
    """
    folders = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not folders:
        raise UserError(
            f"lora_prefetch_dir='{folder}' holds no adapters.",
            allowed="It must have a folder <task id>/ for each adapter.",
        )
    for path in folders:
        if not path.name.isdecimal():
            raise UserError(
                f"{path} is not a LoRA task id.", allowed="Folders in lora_prefetch_dir must be named by integers."
            )
    return {int(path.name): LoraAdapter.read(path) for path in folders}


def apply_adapter(model: ov.Model, adapter: LoraAdapter, config: CheckpointConfig) -> None:
    """Add the branches to a graph, in place.

    Raises:
        UserError: the checkpoint's format changes activations before its matrix products, or a module is missing in
            the graph or has another size.
    """
    # with a format that scales or rounds the activation, A would get the changed one
    if not all(FORMATS[qformat].plain_activations for qformat in config.qformats):
        works = ", ".join(name for name in UNIFORM if FORMATS[name].plain_activations)
        raise UserError(
            f"The LoRA adapter {adapter.path} is not possible with {config.qformat}: it scales or rounds activations,"
            " but the adapter was trained on unchanged ones.",
            allowed=f"Formats that support adapters on the CPU engine: {works}.",
        )
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    for module, (a, b) in adapter.branches.items():
        product = node = nodes.get(module)
        if node is not None and node.get_type_name() == "Slice":  # of the product of queries, keys and values
            product = node.input_value(0).get_node()
        if node is None or product is None or product.get_type_name() != "MatMul":
            raise UserError(f"The LoRA adapter {adapter.path} changes '{module}', which the engine does not have.")
        x = product.input(0).get_source_output()
        size = (node.get_output_partial_shape(0)[2].get_length(), x.get_partial_shape()[2].get_length())
        if (len(b), a.shape[1]) != size:
            raise UserError(
                f"{adapter.path}: {module} is for a weight of shape [{len(b)}, {a.shape[1]}]; the engine's is"
                f" {list(size)}."
            )
        consumers = node.output(0).get_target_inputs()
        low = named(op.matmul(x, op.constant(a), transpose_a=False, transpose_b=True), f"{module}.lora_A")
        high = named(op.matmul(low, op.constant(b), transpose_a=False, transpose_b=True), f"{module}.lora_B")
        total = named(op.add(node, high), f"{module}.lora")
        for consumer in consumers:
            consumer.replace_source_output(total.output(0))
    model.validate_nodes_and_infer_types()
