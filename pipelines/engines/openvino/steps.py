"""Results of the single steps of the graph while it reads a text, to find the step that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.runtime import EngineFolder, properties

Array = np.ndarray[Any, Any]

OF_A_LAYER = (
    "input_layernorm", "self_attn.qkv_proj.input", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.q_proj.biased", "self_attn.k_proj.biased", "self_attn.v_proj.biased", "self_attn.q_norm",
    "self_attn.k_norm", "self_attn.q_rotated",
    "self_attn.k_rotated", "self_attn.k_rounded", "self_attn.v_rounded", "self_attn.attention",
    "self_attn.o_proj.input", "self_attn.o_proj", "self_attn.o_proj.biased", "attention_residual",
    "post_attention_layernorm", "mlp.gate_proj.input", "mlp.up_proj.input", "mlp.gate_proj", "mlp.gate_proj.biased",
    "mlp.up_proj", "mlp.up_proj.biased", "mlp.product", "mlp.down_proj.input", "mlp.down_proj",
    "mlp.down_proj.biased", "mlp_residual",
)  # fmt: skip
"""Ends of the names of a decoder layer's nodes whose results are given, in order; those that it does not have are
left out."""
OUTSIDE = ("model.embed_tokens", "rotary.angles", "model.norm", "lm_head.input")


def step_results(
    folder: EngineFolder, options: OpenVinoOptions, tokens: Sequence[int], first_position: int, layers: range
) -> dict[str, Array]:
    """Read a text in float32 and return the results of the steps by the names of their nodes.

    Args:
        folder: the engine.
        options: its threads.
        tokens: token ids.
        first_position: position of the first token.
        layers: whose steps are given, besides those outside of layers.
    """
    exact = options.model_copy(update={"inference_precision": "f32", "dynamic_quantization": "off"})
    model = folder.read_model()
    wanted = {*OUTSIDE, *(f"model.layers.{layer}.{end}" for layer in layers for end in OF_A_LAYER)}
    # the block before the first one is its input
    wanted.add(f"model.layers.{layers.start - 1}.mlp_residual")
    names = []
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if name in wanted:
            result = op.result(node.output(0))
            result.get_output_tensor(0).add_names({f"step.{name}"})  # the node may have a name already
            model.add_results([result])
            names.append(name)
    request = ov.Core().compile_model(model, "CPU", properties(folder.config, exact, "f32")).create_infer_request()
    count = len(tokens)
    positions = np.arange(first_position, first_position + count, dtype=np.int64)
    request.infer(
        {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, count), dtype=np.int64),
            "position_ids": positions[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
    )
    found = {name: np.array(request.get_tensor(f"step.{name}").data[0]) for name in names}
    return {**found, "logits": np.array(request.get_tensor("logits").data[0])}
