"""Logits after every token of given sequences, in slices: what an engine predicts while it reads a text.

Shapes: B sequences, T tokens of each, t tokens of one slice, V vocabulary, H hidden size.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from pipelines.engines.openvino.memory import inference_precision, usual_kv_precision
from pipelines.engines.openvino.runtime import FIRST_TOKENS, EngineFolder, OpenVinoOptions, arithmetic, properties
from pipelines.engines.openvino.weights import scalar

Array = np.ndarray[Any, Any]

KEPT_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of the 16-bit types, the implicit one included."""
KEPT_IN_16_BITS = ("_proj", "_residual", "layernorm", ".norm", ".product", ".attention", "embed_tokens")
"""Ends of the names of nodes whose result a GPU engine keeps in 16 bits; its logits are float32."""
BLOCK_OUTPUT = ".mlp_residual"
"""End of the name of the last node of a decoder block."""
GIVEN, TAKEN = "last_block", "head_input"
"""Names of what the last block puts out, [B, t, H], where the graph is cut, and of what the head makes logits from."""


class GraphForcing:
    """Reads sequences through the engine's graph; implements `port.TeacherForcing`.

    The head runs by itself: its products are wide enough to be made for a few tokens, whereas the layers below it are
    faster the more tokens they read at once. Both are parts of one graph, of which one is given no tokens: compiled by
    itself, the plugin holds a 16-bit head in float32 where it computes in float32.
    """

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions, *, varied: bool = False) -> None:
        """Load and compile.

        Args:
            folder: the engine.
            options: its arithmetic and threads.
            varied: compute the same with iterations of another size and another arithmetic.
        """
        model, chosen, self.arithmetic = _prepared(folder, options, varied=varied)
        logits, taken = _cut_head(model)
        model.add_results([logits])
        model.add_parameters([taken])
        nothing = np.zeros((1, 0, folder.config.hidden_size), dtype=np.float32)
        with folder.loading():
            self._layers = _Layers(model, chosen, {TAKEN: nothing}, shorter=varied)
            list(self.logits(self.hidden([[0] * FIRST_TOKENS], FIRST_TOKENS), FIRST_TOKENS))

    def hidden(self, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> Iterator[Array]:
        """See `port.TeacherForcing.hidden`."""
        return (each[GIVEN] for each in self._layers.read(sequences, tokens_at_once, [GIVEN]))

    def logits(self, hidden: Iterable[Array], logits_at_once: int) -> Iterator[Array]:
        """See `port.Head.logits`."""
        return map(self._layers.head, _cut(hidden, logits_at_once))


class GraphHead:
    """The graph from its last block on; implements `port.Head`."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions) -> None:
        model, chosen, _ = _prepared(folder, options, varied=False)
        logits, taken = _cut_head(model)
        head = ov.Model([logits], [taken], "head")
        with folder.loading():
            self._request = ov.Core().compile_model(head, "CPU", chosen).create_infer_request()
            self._infer(np.zeros((1, FIRST_TOKENS, folder.config.hidden_size), dtype=np.float32))

    def logits(self, hidden: Iterable[Array], logits_at_once: int) -> Iterator[Array]:
        """See `port.Head.logits`."""
        return map(self._infer, _cut(hidden, logits_at_once))

    def _infer(self, hidden: Array) -> Array:
        self._request.infer({TAKEN: np.ascontiguousarray(hidden)}, share_outputs=True)
        logits: Array = self._request.get_output_tensor(0).data
        return logits


class GraphBlocks:
    """Reads sequences through the layers of the engine's graph; implements `port.BlockOutputs`."""

    def __init__(self, folder: EngineFolder, options: OpenVinoOptions, *, varied: bool = False) -> None:
        """Load and compile; see `GraphForcing`. Iterations are of one size, as both sides of a comparison need."""
        model, chosen, _ = _prepared(folder, options, varied=varied)
        _cut_head(model)
        self._names = []
        for node in _block_ends(model):
            self._names.append(f"block.{int(node.get_friendly_name().split('.')[2])}")
            result = op.result(node.output(0))
            result.get_output_tensor(0).set_names({self._names[-1]})
            model.add_results([result])
        with folder.loading():
            self._layers = _Layers(model, chosen, {}, shorter=False)
            list(self.slices([[0] * FIRST_TOKENS], FIRST_TOKENS))

    def slices(self, sequences: Sequence[Sequence[int]], tokens_at_once: int) -> Iterator[Mapping[str, Array]]:
        """See `port.BlockOutputs.slices`."""
        return self._layers.read(sequences, tokens_at_once, self._names)


def _prepared(folder: EngineFolder, options: OpenVinoOptions, *, varied: bool) -> tuple[ov.Model, dict[str, Any], str]:
    """Return the graph, the plugin's properties, and the arithmetic in words.

    Varied, it is float32 where the engine computes in bf16, else float32 with the results of all products and sums
    rounded to 16 bits.
    """
    model, precision, arithmetic_text = folder.read_model(), inference_precision(options), arithmetic(folder, options)
    if varied and precision == "f32":
        dtype = folder.config.dtype if folder.config.dtype in KEPT_BITS else "bfloat16"
        _round_results(model, KEPT_BITS[dtype])
        arithmetic_text = f"f32, results of products and sums rounded to {dtype}"
    elif varied:
        options, arithmetic_text = options.model_copy(update={"inference_precision": "f32"}), "f32"
    return model, properties(folder.config, options, usual_kv_precision(options)), arithmetic_text


class _Layers:
    """The compiled graph, cut after its last block; the head is run by itself, where the graph has kept it."""

    def __init__(self, model: ov.Model, chosen: dict[str, Any], others: dict[str, Array], *, shorter: bool) -> None:
        self._request = ov.Core().compile_model(model, "CPU", chosen).create_infer_request()
        self._others, self._shorter = others, shorter

    def read(
        self, sequences: Sequence[Sequence[int]], tokens_at_once: int, names: Sequence[str]
    ) -> Iterator[dict[str, Array]]:
        """Read sequences of one length; yield outputs [B, t, H] by name, which the next inference overwrites."""
        rows = np.array(sequences, dtype=np.int64)
        length = rows.shape[1]
        size = max(1, tokens_at_once * 3 // 4) if self._shorter else tokens_at_once
        self._request.reset_state()
        for start in range(0, length, size):
            stop = min(start + size, length)
            self._infer(rows[:, start:stop], start, self._others)
            yield {name: self._request.get_tensor(name).data for name in names}

    def head(self, hidden: Array) -> Array:
        """Return logits [B, n, V] of what the last block gave, [B, n, H]; the next inference overwrites them."""
        no_tokens = np.zeros((len(hidden), 0), dtype=np.int64)
        self._infer(no_tokens, self._read, {TAKEN: np.ascontiguousarray(hidden)})
        logits: Array = self._request.get_tensor("logits").data
        return logits

    def _infer(self, tokens: Array, start: int, others: dict[str, Array]) -> None:
        count, width = tokens.shape
        self._read = start + width
        inputs = {
            "input_ids": np.ascontiguousarray(tokens),
            "attention_mask": np.ones((count, self._read), dtype=np.int64),
            "position_ids": np.tile(np.arange(start, self._read, dtype=np.int64), (count, 1)),
            "beam_idx": np.arange(count, dtype=np.int32),
        }
        self._request.infer({**inputs, **others}, share_outputs=True)


def _cut(pieces: Iterable[Array], size: int) -> Iterator[Array]:
    """Yield arrays [B, t, H] again in pieces of `size` tokens; the last one may be shorter."""
    held: Array | None = None
    for piece in pieces:
        held = piece.copy() if held is None else np.concatenate([held, piece], axis=1)
        while held.shape[1] >= size:
            yield held[:, :size]
            held = held[:, size:]
    if held is not None and held.shape[1]:
        yield held


def _cut_head(model: ov.Model) -> tuple[ov.Node, ov.Node]:
    """End a graph with the last block, which gives `GIVEN`; return what came after it: its result and its parameter."""
    *_, last = _block_ends(model)
    (logits,) = model.get_results()
    taken = op.parameter([-1, -1, last.get_output_partial_shape(0)[2].get_length()], ov.Type.f32)
    taken.get_output_tensor(0).set_names({TAKEN})
    for user in list(last.output(0).get_target_inputs()):
        user.replace_source_output(taken.output(0))
    result = op.result(last.output(0))
    result.get_output_tensor(0).set_names({GIVEN})
    model.add_results([result])
    model.remove_result(logits)
    return logits, taken


def _block_ends(model: ov.Model) -> list[ov.Node]:
    return [node for node in model.get_ordered_ops() if node.get_friendly_name().endswith(BLOCK_OUTPUT)]


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
