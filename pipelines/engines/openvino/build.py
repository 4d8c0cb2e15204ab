"""Checkpoint -> engine folder: openvino_model.xml, openvino_model.bin, config.json."""

import json
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import openvino as ov

from pipelines.checkpoint.config_json import LAYERS_FILE
from pipelines.checkpoint.read import Checkpoint
from pipelines.domain.errors import UserError
from pipelines.domain.mixture_layers import EXPERTS
from pipelines.domain.progress import Progress
from pipelines.engines.openvino.graph import GraphBuilder
from pipelines.engines.openvino.rope import original_context
from pipelines.engines.port import BuildLimits, EngineFacts
from pipelines.host.disk import why_not_written

MODEL_FILE, CONFIG_FILE, FLAVOUR = "openvino_model.xml", "config.json", "openvino"
HEAD_PRECISION = "head_precision"
"""In an engine's description, if its head is not as in the checkpoint."""


def build_engine(
    checkpoint: Path,
    limits: BuildLimits,
    out_dir: Path,
    progress: Progress,
    *,
    int8_head: bool = False,
    grouped_experts: bool = False,
) -> EngineFacts:
    """Build an engine folder from a checkpoint folder.

    Weights go from the checkpoint's memory map to the file one by one; memory holds only float32 scales, and weights
    that are packed again, in their size in the file: of INT4, of weight-only formats, and of grouped experts.

    Raises:
        UserError: the checkpoint is damaged or of a kind that this engine does not support, or the limits contradict
            it.
    """
    opened = Checkpoint(checkpoint)
    positions = original_context(opened.config) or opened.config.max_position_embeddings
    if limits.max_seq_len > positions:
        raise UserError(
            f"max_seq_len={limits.max_seq_len} is more than the model's {positions} positions.",
            todo=f"Set max_seq_len={positions} or less.",
        )
    if limits.max_input_len > limits.max_seq_len:
        raise UserError(f"max_input_len={limits.max_input_len} is more than max_seq_len={limits.max_seq_len}.")
    out_dir.mkdir(parents=True, exist_ok=True)
    with progress.task("building the OpenVINO graph", opened.config.num_hidden_layers, "layers") as advance:
        form = {"int8_head": int8_head, "grouped_experts": grouped_experts}
        builder = GraphBuilder(opened, advance, limits.max_prompt_embedding_table_size, **form)
        model = builder.build()
    constants: Counter[str] = Counter()  # elements of each type, e.g. {"i4": 1024}
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            constants[node.get_output_element_type(0).get_type_name()] += prod(node.get_output_shape(0))
    save_graph(model, out_dir / MODEL_FILE)
    mark_16_bit_weights(out_dir / MODEL_FILE)
    description = describe(opened.config.raw, limits, dict(constants))
    description["engine"] |= {HEAD_PRECISION: "int8"} if int8_head else {}
    description["engine"] |= {EXPERTS: "grouped"} if builder.groups_experts else {}
    (out_dir / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    if opened.config.layers is not None:
        shutil.copyfile(checkpoint / LAYERS_FILE, out_dir / LAYERS_FILE)  # as trtllm-build does
    size = sum(path.stat().st_size for path in out_dir.iterdir() if path.is_file())
    return EngineFacts(engine_bytes=size, details=description["engine"])


def save_graph(model: ov.Model, path: Path) -> None:
    """Write the graph and its weights.

    Raises:
        OSError: the disk is full, or the file too large; OpenVINO's own error ("iostream error") does not mention it,
            and OpenVINO has deleted the file by then.
    """
    try:
        # compress_to_fp16 would round the float32 scales and norms
        ov.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        size = sum(each.get_byte_size() for each in model.get_ops() if each.get_type_name() == "Constant")
        if (reason := why_not_written(path.with_suffix(".bin"), size)) is not None:
            raise reason from error
        raise


def mark_16_bit_weights(graph: Path) -> int:
    """Mark the conversions of bf16 and f16 constants in a saved graph; return how many there are.

    Without the mark, the CPU plugin folds each into a float32 constant when it loads the graph, and keeps that beside
    the copy that it computes with. OpenVINO's converters set this mark in what they convert, but its Python API cannot
    set it. FP8 constants take more memory with it than without.
    """
    tree = ET.parse(graph)  # our own file
    layers = {layer.attrib["id"]: layer for layer in tree.iterfind("layers/layer")}
    source = {edge.attrib["to-layer"]: edge.attrib["from-layer"] for edge in tree.iterfind("edges/edge")}
    marked = 0
    for number, layer in layers.items():
        stored = layer.find("input/port[@precision]") if layer.get("type") == "Convert" else None
        if stored is None or stored.get("precision") not in ("BF16", "FP16"):
            continue
        if layers[source[number]].get("type") == "Const":
            info = ET.Element("rt_info")
            ET.SubElement(info, "attribute", name="decompression", version="0")
            layer.insert(1, info)
            marked += 1
    tree.write(graph, encoding="utf-8", xml_declaration=True)
    return marked


def runtime_version() -> str:
    """Return the version an engine records and requires, e.g. "2026.4.1-22982-e213a147257-releases/2026/4"."""
    return str(ov.get_version())


def describe(pretrained: Any, limits: BuildLimits, constants: dict[str, int]) -> dict[str, Any]:
    """Return config.json in the shape of a TensorRT-LLM engine folder, plus the key `engine`."""
    return {
        "version": runtime_version(),
        "pretrained_config": dict(pretrained),
        "build_config": {**limits.to_json(), "kv_cache_type": "PAGED", "plugin_config": {}},
        "engine": {"flavour": FLAVOUR, "openvino_version": runtime_version(), "weight_elements": constants},
    }
