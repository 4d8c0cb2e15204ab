"""Logits after every token of given sequences, in slices: what an engine predicts while it reads a text.

Shapes: B sequences, T tokens of each, t tokens of one slice, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.options import OpenVinoOptions
from pipelines.engines.openvino.rounding import scalar
from pipelines.engines.openvino.runtime import (
    FIRST_TOKENS,
    EngineFolder,
    arithmetic,
    inference_precision,
    properties,
)

Array = np.ndarray[Any, Any]

KEPT_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of the 16-bit types, the implicit one included."""
KEPT_IN_16_BITS = ("_proj", "_residual", "layernorm", ".norm", ".product", ".attention", "embed_tokens")
"""Ends of the names of nodes whose result a GPU engine keeps in 16 bits; its logits are float32."""
BLOCK_OUTPUT = ".mlp_residual"
"""End of the name of the last node of a decoder block."""


class GraphForcing:
    """Reads sequences through the engine's graph; implements `port.TeacherForcing`.

    Attributes:
        arithmetic: its arithmetic in words.
    """

    def __init__(
        self, folder: EngineFolder, options: OpenVinoOptions, *, varied: bool = False, blocks: bool = False
    ) -> None:
        """Load and compile.

        Args:
            folder: the engine.
            options: its arithmetic and threads.
            varied: compute the same with another batch composition and another arithmetic: float32 where the engine
                computes in bf16, else float32 with the results of all products and sums rounded to 16 bits.
            blocks: give the outputs of the decoder blocks as well.
        """
        self._varied, self.arithmetic = varied, arithmetic(folder.config, options)
        with folder.loading():
            self._request = self._compiled(folder, options, blocks=blocks)
            self._infer(np.zeros((1, FIRST_TOKENS), dtype=np.int64), 0, FIRST_TOKENS)

    def _compiled(self, folder: EngineFolder, options: OpenVinoOptions, *, blocks: bool) -> ov.InferRequest:
        model, precision, varied = folder.read_model(), inference_precision(options), self._varied
        if varied and precision == "f32":
            dtype = folder.config.dtype if folder.config.dtype in KEPT_BITS else "bfloat16"
            _round_results(model, KEPT_BITS[dtype])
            self.arithmetic = f"f32, results of products and sums rounded to {dtype}"
        elif varied:
            options, self.arithmetic = options.model_copy(update={"inference_precision": "f32"}), "f32"
        self._blocks = _with_block_outputs(model) if blocks else []
        compiled = ov.Core().compile_model(
            model, "CPU", properties(folder.config, options, inference_precision(options))
        )
        return compiled.create_infer_request()

    def slices(
        self, sequences: Sequence[Sequence[int]], tokens_at_once: int
    ) -> Iterator[tuple[Array, Mapping[str, Array]]]:
        """See `port.TeacherForcing.slices`."""
        rows = np.array(sequences, dtype=np.int64)
        count, length = rows.shape
        if self._varied:  # one more sequence in the batch
            rows = np.concatenate([rows, rows[:1, ::-1]])
        self._request.reset_state()
        for start in range(0, length, tokens_at_once):
            self._infer(rows, start, min(start + tokens_at_once, length))
            names = ("logits", *self._blocks)
            found: dict[str, Array] = {name: self._request.get_tensor(name).data[:count] for name in names}
            yield found.pop("logits"), found

    def _infer(self, rows: Array, start: int, stop: int) -> None:
        """Run the next tokens; the results stay in the request until the next call."""
        inputs = {
            "input_ids": np.ascontiguousarray(rows[:, start:stop]),
            "attention_mask": np.ones((len(rows), stop), dtype=np.int64),
            "position_ids": np.tile(np.arange(start, stop, dtype=np.int64), (len(rows), 1)),
            "beam_idx": np.arange(len(rows), dtype=np.int32),
        }
        self._request.infer(inputs, share_outputs=True)


def linear_weights(folder: EngineFolder) -> Iterator[tuple[str, Array]]:
    """Yield the weight of every linear as the engine multiplies it, float32 [O, I], one at a time."""
    core = ov.Core()
    model = folder.read_model()
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            values = core.compile_model(
                ov.Model([op.result(node.output(0))], [], name), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
            )({})[0]
            yield name.removeprefix("model.layers.").removesuffix(".weight"), np.array(values, dtype=np.float32)


def _with_block_outputs(model: ov.Model) -> list[str]:
    """Add an output for each decoder block; return their names, "block.0" and so on, in order."""
    nodes = [node for node in model.get_ordered_ops() if node.get_friendly_name().endswith(BLOCK_OUTPUT)]
    names = []
    for node in nodes:
        layer = int(node.get_friendly_name().split(".")[2])
        names.append(f"block.{layer}")
        result = op.result(node.output(0))
        result.get_output_tensor(0).set_names({names[-1]})
        model.add_results([result])
    return names


def _round_results(model: ov.Model, bits: int) -> None:
    """Round results to `bits` significant bits: c = x (2^(24 - bits) + 1), and c - (c - x) (Dekker, 1971)."""
    factor = scalar(2.0 ** (24 - bits) + 1)
    for node in model.get_ordered_ops():
        if node.get_friendly_name().endswith(KEPT_IN_16_BITS) and node.get_output_size() == 1:
            users = list(node.output(0).get_target_inputs())
            large = op.multiply(node.output(0), factor)
            rounded = op.subtract(large, op.subtract(large, node.output(0)))
            for user in users:
                user.replace_source_output(rounded.output(0))
    model.validate_nodes_and_infer_types()
