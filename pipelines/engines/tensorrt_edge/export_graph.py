"""Export a checkpoint with TensorRT Edge-LLM's own program, then list what the graph on disk holds.

Runs by its path in Edge-LLM's environment, where nothing of this project can be imported:
`python export_graph.py CHECKPOINT OUT LISTING`. The listing is JSON:

- `initializers`: name -> {"type": ONNX's name of the element type, "shape": [...]} with "at": [first byte, bytes] in
  model.onnx.data, or "hex": the bytes of one that is inside the graph;
- `nodes`: {"op", "domain", "inputs", "outputs", "attributes"} in the order of the graph;
- `inputs`, `outputs`: names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def listing_of(path: Path) -> dict[str, Any]:
    """Return the listing of a graph with its data beside it."""
    import onnx  # of Edge-LLM's environment alone

    def listed(tensor: onnx.TensorProto) -> dict[str, Any]:
        entry = {"type": onnx.TensorProto.DataType.Name(tensor.data_type), "shape": list(tensor.dims)}
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return {**entry, "hex": onnx.numpy_helper.to_array(tensor).tobytes().hex()}
        place = {each.key: each.value for each in tensor.external_data}
        if place["location"] != f"{path.name}.data":
            raise SystemExit(f"{tensor.name} is in {place['location']}, not in {path.name}.data")
        return {**entry, "at": [int(place.get("offset", 0)), int(place["length"])]}

    def value(attribute: onnx.AttributeProto) -> Any:
        raw = onnx.helper.get_attribute_value(attribute)
        if isinstance(raw, onnx.TensorProto):
            return listed(raw)
        return raw.decode() if isinstance(raw, bytes) else list(raw) if hasattr(raw, "__iter__") else raw

    graph = onnx.load(path, load_external_data=False).graph
    nodes = [
        {
            "op": node.op_type,
            "domain": node.domain,
            "inputs": list(node.input),
            "outputs": list(node.output),
            "attributes": {each.name: value(each) for each in node.attribute},
        }
        for node in graph.node
    ]
    return {
        "initializers": {tensor.name: listed(tensor) for tensor in graph.initializer},
        "nodes": nodes,
        "inputs": [each.name for each in graph.input],
        "outputs": [each.name for each in graph.output],
    }


if __name__ == "__main__":
    from tensorrt_edgellm.scripts.export import main

    checkpoint, out, listing = sys.argv[1:]
    sys.argv = ["tensorrt-edgellm-export", checkpoint, out]
    main()
    Path(listing).write_text(json.dumps(listing_of(Path(out) / "llm" / "model.onnx")), encoding="utf-8")
