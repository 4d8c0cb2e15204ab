"""Route tokens to the experts of a mixture: each expert multiplies the rows of the tokens that chose it, no others.

A row is a token at one of its experts; rows are sorted by expert and split into a part for each, twice: before the
product of up and gate in one, and before that of down. What is between the two is computed of all rows at once. In the
end they are brought back into the order of tokens. Every node counts: one of an expert without rows still takes about 5
us, which is what a token of one user waits for most. An expert's weights are packed when its first row comes.

Other ways were measured and are not used (docs/benchmarks.md, "Experts on the CPU engine").

Shapes: B T tokens in all, K experts of a token, E experts, R = B T K rows, I inner channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.checkpoint.config_json import Experts
from pipelines.checkpoint.read import Array, Checkpoint
from pipelines.checkpoint.tensors import TensorSpec
from pipelines.engines.openvino.lora import named

Expert = Callable[[int, ov.Node], ov.Node]
"""Number of an expert and its rows [r, channels] -> their products with a weight of this expert."""


class ExpertTensors:
    """The tensors of one expert, under the names and in the shapes of a dense model's; stands for a `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, number: int) -> None:
        self.folder, self.config = checkpoint.folder, checkpoint.config
        self._checkpoint, self._number = checkpoint, number

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def spec(self, name: str) -> TensorSpec:
        """See `Checkpoint.spec`."""
        spec = self._checkpoint.spec(name)
        return replace(spec, shape=spec.shape[1:])

    def tensor(self, name: str) -> Array:
        """See `Checkpoint.tensor`."""
        part: Array = self._checkpoint.tensor(name)[self._number]
        return part


def routed(
    x: ov.Node,
    rounded: ov.Node,
    router: Array,
    bias: Array | None,
    experts: Experts,
    hidden: int,
    name: str,
    up_and_gate: Expert,
    between: Callable[[ov.Node], ov.Node],
    down: Expert,
) -> ov.Node:
    """Return the sum of what the experts of each token return, times their weights.

    The weights are those of a softmax over all experts, in float32 as in TensorRT-LLM's plugin and Transformers.
    Divided by their sum, they are a softmax over the chosen ones, which gpt-oss has.

    Args:
        x: [B, T, H].
        rounded: the same as experts take it.
        router: float32 [E, H].
        bias: of the router, float32 [E].
        experts: how many there are, and how many a token goes through.
        hidden: H.
        name: of the MLP, e.g. "model.layers.0.mlp".
        up_and_gate: -> [r, 2 I].
        between: all rows [R, 2 I] -> [R, I].
        down: -> [r, H].
    """
    tokens = op.reshape(x, np.array([-1, hidden], dtype=np.int64), special_zero=False)
    scores = named(op.matmul(tokens, op.constant(router), False, True), f"{name}.router")
    if bias is not None:
        scores = named(op.add(scores, bias), f"{name}.router.biased")
    top = op.topk(op.softmax(scores, -1), np.int64(experts.chosen), -1, "max", "value", "i64")
    weights = top.output(0)  # [B T, K]
    if experts.renormalized:
        weights = op.divide(weights, op.reduce_sum(weights, np.array([-1]), keep_dims=True))
    weights = named(op.unsqueeze(weights, np.int64(2)), f"{name}.router.weights")

    row_expert = op.reshape(top.output(1), np.array([-1], dtype=np.int64), special_zero=False)
    numbers = np.arange(experts.count, dtype=np.int64)[None]
    is_of = op.convert(op.equal(op.unsqueeze(row_expert, np.int64(1)), numbers), "i32")  # [R, E]
    counts = op.reduce_sum(is_of, np.array([0]), keep_dims=False)
    starts = op.subtract(op.cum_sum(counts, np.int64(0)), counts)
    # a row comes after those of earlier experts, and after earlier rows of its own
    place = op.multiply(is_of, op.add(op.cum_sum(is_of, np.int64(0), exclusive=True), starts))
    place = op.convert(op.reduce_sum(place, np.array([1]), keep_dims=False), "i64")
    rows = op.shape_of(row_expert)
    row = op.range(np.int64(0), op.squeeze(rows, np.int64(0)), np.int64(1), "i64")
    order = op.scatter_elements_update(op.broadcast(np.int64(0), rows), place, row, np.int64(0))

    if rounded is not x:
        tokens = op.reshape(rounded, np.array([-1, hidden], dtype=np.int64), special_zero=False)
    sorted_rows = op.gather(tokens, op.divide(order, np.int64(experts.chosen)), np.int64(0))
    lengths = op.convert(counts, "i64")
    product = _by_expert(named(sorted_rows, f"{name}.rows"), lengths, experts.count, up_and_gate)
    back = op.gather(_by_expert(between(product), lengths, experts.count, down), place, np.int64(0))
    of_token = op.reshape(back, np.array([-1, experts.chosen, hidden], dtype=np.int64), special_zero=False)
    summed = op.reduce_sum(op.multiply(of_token, weights), np.array([1]), keep_dims=False)
    return named(op.reshape(summed, op.shape_of(x), special_zero=False), f"{name}.mixed")


def _by_expert(rows: ov.Node, lengths: ov.Node, count: int, expert: Expert) -> ov.Node:
    """Return what each expert makes of its rows, in their order; rows [R, channels] are sorted by expert."""
    width = rows.get_output_partial_shape(0)[1].get_length()
    parts = op.variadic_split(rows, np.int64(0), lengths)
    shape = np.array([-1, width], dtype=np.int64)
    return op.concat(
        [expert(each, op.reshape(parts.output(each), shape, special_zero=False)) for each in range(count)], 0
    )
