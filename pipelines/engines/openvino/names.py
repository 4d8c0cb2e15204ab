"""Names of graph nodes.

OpenVINO numbers an unnamed node by the count of nodes the process has created before ("Multiply_1042"), and writes that
number into the engine file. Equal engines must have equal bytes, so every node gets a name here.
"""

from __future__ import annotations

from collections import Counter

import openvino as ov


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
