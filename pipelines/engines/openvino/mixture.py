"""Route tokens to the experts of a mixture: each expert multiplies the rows of the tokens that chose it, no others.

A row is a token at one of its experts. There are two graphs for it:

`separate`: rows are sorted by expert and split into a part for each, twice: before the product of up and gate in one,
and before that of down. What is between the two is computed of all rows at once. In the end they are brought back into
the order of tokens. Every node counts: one of an expert without rows still takes about 5 us, which is what a token of
one user waits for most. An expert's weights are packed when its first row comes.

`grouped`: all tokens times all experts, as optimum-intel writes it. The CPU plugin recognizes the form and multiplies
only the rows (its node GatherMatmul), in tiles of an expert's rows with AMX, otherwise row by row.

Other ways were measured and are not used (docs/benchmarks.md, "Experts on the CPU engine").

Shapes: B T tokens in all, K experts of a token, E experts, R = B T K rows, I inner channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.utils.node_factory import NodeFactory

from pipelines.checkpoint.config_json import Experts
from pipelines.checkpoint.read import Array, Checkpoint
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

    def dtype(self, name: str) -> str:
        """See `Checkpoint.dtype`."""
        return self._checkpoint.dtype(name)

    def tensor(self, name: str) -> Array:
        """See `Checkpoint.tensor`."""
        part: Array = self._checkpoint.tensor(name)[self._number]
        return part


@dataclass(frozen=True, slots=True)
class Route:
    """Where the tokens of a layer go.

    Attributes:
        tokens: [B T, H].
        numbers: of a token's experts, int64 [B T, K].
        weights: of what these return, [B T, K].
        experts: how many there are, and how many a token goes through.
        name: of the MLP, e.g. "model.layers.0.mlp".
    """

    tokens: ov.Node
    numbers: ov.Output
    weights: ov.Node | ov.Output
    experts: Experts
    name: str

    @property
    def hidden(self) -> int:
        """H."""
        width: int = self.tokens.get_output_partial_shape(0)[1].get_length()
        return width


def route(x: ov.Node, router: Array, bias: Array | None, experts: Experts, name: str) -> Route:
    """Return which experts each token goes to.

    The weights are those of a softmax over all experts, in float32 as in TensorRT-LLM's plugin and Transformers.
    Divided by their sum, they are a softmax over the chosen ones, which gpt-oss has.

    Args:
        x: [B, T, H].
        router: float32 [E, H].
        bias: of the router, float32 [E].
        experts: how many there are, and how many a token goes through.
        name: of the MLP.
    """
    tokens = _flat(x, router.shape[1])
    scores = named(op.matmul(tokens, op.constant(router), False, True), f"{name}.router")
    if bias is not None:
        scores = named(op.add(scores, bias), f"{name}.router.biased")
    top = op.topk(op.softmax(scores, -1), np.int64(experts.chosen), -1, "max", "value", "i64")
    weights = top.output(0)  # [B T, K]
    if experts.renormalized:
        weights = op.divide(weights, op.reduce_sum(weights, np.array([-1]), keep_dims=True))
    return Route(tokens, top.output(1), weights, experts, name)


def separate(
    x: ov.Node,
    rounded: ov.Node,
    to: Route,
    up_and_gate: Expert,
    between: Callable[[ov.Node], ov.Node],
    down: Expert,
) -> ov.Node:
    """Return the sum of what the experts of each token return, times their weights, with products of each expert.

    Args:
        x: [B, T, H].
        rounded: the same as experts take it.
        to: where its tokens go.
        up_and_gate: -> [r, 2 I].
        between: all rows [R, 2 I] -> [R, I].
        down: -> [r, H].
    """
    experts, tokens = to.experts, to.tokens if rounded is x else _flat(rounded, to.hidden)
    row_expert = op.reshape(to.numbers, np.array([-1], dtype=np.int64), special_zero=False)
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

    sorted_rows = op.gather(tokens, op.divide(order, np.int64(experts.chosen)), np.int64(0))
    lengths = op.convert(counts, "i64")
    product = _by_expert(named(sorted_rows, f"{to.name}.rows"), lengths, experts.count, up_and_gate)
    back = op.gather(_by_expert(between(product), lengths, experts.count, down), place, np.int64(0))
    of_token = op.reshape(back, np.array([-1, experts.chosen, to.hidden], dtype=np.int64), special_zero=False)
    weights = named(op.unsqueeze(to.weights, np.int64(2)), f"{to.name}.router.weights")
    summed = op.reduce_sum(op.multiply(of_token, weights), np.array([1]), keep_dims=False)
    return named(op.reshape(summed, op.shape_of(x), special_zero=False), f"{to.name}.mixed")


def grouped(x: ov.Node, to: Route, mlp: Callable[[ov.Node], ov.Node]) -> ov.Node:
    """Return the sum of what the experts of each token return, times their weights, with products of all experts.

    Every node is one that the plugin looks for: `ConvertTiledMoeBlockToGatherMatmuls` of OpenVINO 2026.4.

    Args:
        x: [B, T, H].
        to: where its tokens go.
        mlp: all tokens at all experts [E, B T, H] -> the same; three products, or two that have biases.
    """
    count, hidden = to.experts.count, to.hidden
    everywhere = op.tile(to.tokens, np.array([count, 1], dtype=np.int64))
    everywhere = op.reshape(everywhere, np.array([count, -1, hidden], dtype=np.int64), special_zero=False)
    batch = op.gather(op.shape_of(x), np.array([0], dtype=np.int64), np.int64(0))
    shape = op.concat([np.array([count], dtype=np.int64), batch, np.array([-1], dtype=np.int64)], 0)  # E, B, T
    width = op.concat([shape, np.array([hidden], dtype=np.int64)], 0)
    returned = op.reshape(mlp(everywhere), width, special_zero=False)
    tokens = op.gather(op.shape_of(to.tokens), np.array([0], dtype=np.int64), np.int64(0))
    zeros = op.broadcast(np.float32(0), op.concat([tokens, np.array([count], dtype=np.int64)], 0))
    weights = op.scatter_elements_update(zeros, to.numbers, to.weights, np.int64(1))  # of all experts
    weights = op.reshape(op.transpose(weights, np.array([1, 0], dtype=np.int64)), shape, special_zero=False)
    weighted = op.multiply(returned, op.unsqueeze(weights, np.int64(3)))
    return named(op.reduce_sum(weighted, np.array([0], dtype=np.int64), keep_dims=False), f"{to.name}.mixed")


def swiglu(gate: ov.Node, up: ov.Node) -> ov.Node:
    """Return swish(gate) times up; the plugin looks for a Swish with one input, which opset13's function has not."""
    return op.multiply(NodeFactory("opset13").create("Swish", [gate], {}), up, "NONE")


def _flat(x: ov.Node, hidden: int) -> ov.Node:
    """Reshape [B, T, H] -> [B T, H]."""
    return op.reshape(x, np.array([-1, hidden], dtype=np.int64), special_zero=False)


def _by_expert(rows: ov.Node, lengths: ov.Node, count: int, expert: Expert) -> ov.Node:
    """Return what each expert makes of its rows, in their order; rows [R, channels] are sorted by expert."""
    width = rows.get_output_partial_shape(0)[1].get_length()
    parts = op.variadic_split(rows, np.int64(0), lengths)
    shape = np.array([-1, width], dtype=np.int64)
    return op.concat(
        [expert(each, op.reshape(parts.output(each), shape, special_zero=False)) for each in range(count)], 0
    )
