"""Read safetensors files and OpenVINO models as rows, without the libraries that wrote them."""

import hashlib
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

Rows = dict[str, Any]
"""Rows by name, with JSON values."""


def tensor_rows(path: Path) -> Rows:
    """Return one row per tensor of a safetensors file: element type, shape and digest of its bytes.

    Raises:
        ValueError: the file is not in that format.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    if not 8 < start <= len(content):
        raise ValueError(f"{path} is not a safetensors file")
    header = json.loads(content[8:start])
    rows: Rows = {"metadata": header.pop("__metadata__", {})}
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        rows[name] = f"{entry['dtype']} {entry['shape']} {digest(content[start + begin : start + end])}"
    return rows


def graph_rows(path: Path) -> Rows:
    """Describe an OpenVINO model independently of its nodes' names and of the order in which they are written.

    Returns:
        the count of each constant (element type, shape, digest of its bytes) and of each kind of operation, and
        `graph`, a digest over all operations with their attributes, constants and wiring.

    Raises:
        ValueError: the model contains nested models, which are not supported here.
    """
    root = ElementTree.parse(path).getroot()
    if root.find(".//body") is not None:
        raise ValueError(f"{path} contains nested models, which are not supported")
    weights = path.with_suffix(".bin").read_bytes()
    layers = {str(layer.get("id")): layer for layer in root.iterfind("layers/layer")}
    inputs: dict[str, list[tuple[str, str, str]]] = {name: [] for name in layers}
    for edge in root.iterfind("edges/edge"):
        source, target = edge.attrib["from-layer"], edge.attrib["to-layer"]
        inputs[target].append((edge.attrib["to-port"], source, edge.attrib["from-port"]))
    rows: Counter[str] = Counter()
    digests: dict[str, str] = {}
    before = {name: {source for _, source, _ in edges} for name, edges in inputs.items()}
    for name in TopologicalSorter(before).static_order():
        layer = layers[name]
        node = _node(layer, weights)
        rows[f"operation {layer.get('type')}"] += 1
        if layer.get("type") == "Const":
            rows[f"constant {node['element_type']} [{node['shape']}] {node['content']}"] += 1
        wiring = sorted((port, digests[source], from_port) for port, source, from_port in inputs[name])
        digests[name] = digest(json.dumps([node, wiring], sort_keys=True).encode())
    sinks = set(layers) - {source for edges in before.values() for source in edges}
    graph = digest(json.dumps(sorted(digests[name] for name in sinks)).encode())
    return {**{name: rows[name] for name in sorted(rows)}, "graph": graph}


def _node(layer: ElementTree.Element, weights: bytes) -> dict[str, Any]:
    """Describe an operation without its name, except for model inputs and outputs, whose names its users rely on."""
    data = layer.find("data")
    node: dict[str, Any] = {} if data is None else dict(data.attrib)
    node["type"], node["version"] = layer.get("type"), layer.get("version")
    if node["type"] == "Const":
        begin, size = int(node.pop("offset")), int(node.pop("size"))
        node["content"] = digest(weights[begin : begin + size])
    ports = list(layer.iterfind("output/port"))
    if node["type"] in ("Parameter", "Result"):
        node["known as"] = [layer.get("output_names"), *(port.get("names") for port in ports)]
    node["outputs"] = [[port.get("precision"), *(dim.text for dim in port.iterfind("dim"))] for port in ports]
    return node


def digest(content: bytes) -> str:
    """Return half of a SHA-256: enough to tell files apart, and a row still fits on a line."""
    return hashlib.sha256(content).hexdigest()[:32]
