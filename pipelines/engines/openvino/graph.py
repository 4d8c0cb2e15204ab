"""The decoder of Gemma, gpt-oss, Llama, Mistral, Mixtral, Phi and Qwen as an OpenVINO graph, from a checkpoint.

Inputs: input_ids [B, T], attention_mask [B, P + T], position_ids [B, T], beam_idx [B], all i64 but beam_idx (i32).
Output: logits [B, T, V], float32. Two Variables per layer hold the K and V of the P past tokens, [B, KV heads, P,
head size]; `beam_idx` gathers their batch rows, so a state of batch 1 can be spread over a batch.

openvino_genai turns exactly this pattern (ReadValue, Gather, Concat, broadcast to query heads, SDPA, Assign) into
paged attention. Linear layers carry Hugging Face module names, by which LoRA adapters find them; every other node is
named after the part of the model it belongs to.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from openvino.utils.node_factory import NodeFactory

from pipelines.checkpoint.read import Checkpoint, check_weight_dtype
from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.errors import UserError
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import FLOAT_WEIGHTS, Activation, KvFormat
from pipelines.domain.model_shape import SWIGLU_ALPHA, SWIGLU_LIMIT
from pipelines.engines.openvino.lora import named
from pipelines.engines.openvino.mixture import Expert, ExpertTensors, Route, grouped, route, separate, swiglu
from pipelines.engines.openvino.prompt_table import with_table
from pipelines.engines.openvino.rope import attention_factor, inverse_frequencies
from pipelines.engines.openvino.weights import WeightStore, to_fp8, to_int8, to_nvfp4

# Quantize the activation of a quantized matrix product, with the checkpoint's scales.
#
# Each format follows ModelOpt's fake quantization and the TensorRT-LLM kernel:
#     FP8, W4A8   round to E4M3 after dividing by activation_scaling_factor
#     INT8 SQ     256 levels of activation_scaling_factor
#     NVFP4       blocks of 16: an E4M3 block scale under the tensor's scale, then E2M1
#     W4A16 ...   nothing
# AWQ, W4A8 and SmoothQuant multiply by prequant_scaling_factor first.


def same_input(store: WeightStore, first: str, second: str) -> bool:
    """Return whether two linear layers with the same activation also share every activation scale."""
    names = [
        (f"{first}.{leaf}", f"{second}.{leaf}") for leaf in ("prequant_scaling_factor", "activation_scaling_factor")
    ]
    for a, b in names:
        if (a in store.checkpoint) != (b in store.checkpoint):
            return False
        if a in store.checkpoint and not np.array_equal(store.float32(a), store.float32(b)):
            return False
    return True


_QUANTIZERS: dict[Activation, Callable[[ov.Node, np.float32], ov.Node]] = {
    "fp8": to_fp8,
    "int8": to_int8,
    "fp4": to_nvfp4,
}

_LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj", "lm_head")
_NOT_BUILT = ("residual_mlp", "qk_layernorm", "attn_logit_softcapping", "final_logit_softcapping")
_ACTS: dict[str, Callable[[ov.Node], ov.Node]] = {
    "silu": lambda x: op.swish(x),
    "swiglu": lambda x: op.swish(x),  # where gate and up are one
    "gelu": lambda x: op.gelu(x, "tanh"),  # as in TensorRT-LLM's table, whose only GELU this is
    "gelu_pytorch_tanh": lambda x: op.gelu(x, "tanh"),
}


_CLAMPED = "swigluoai"


def _gated(name: str) -> Callable[[ov.Node, ov.Node], ov.Node]:
    """Return the function of gate and up that is the input of the down projection."""
    if name == _CLAMPED:
        return _clamped
    # Without broadcasting, so that OpenVINO does not make one node of the MLP where there is AMX: that holds the
    # weights twice and divides by zero on one thread.
    return lambda gate, up: op.multiply(_ACTS[name](gate), up, "NONE")


def _clamped(gate: ov.Node, up: ov.Node) -> ov.Node:
    """Return gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up within 7 of 0 (gpt-oss)."""
    gate = op.minimum(gate, np.float32(SWIGLU_LIMIT))
    up = op.clamp(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return op.multiply(op.swish(gate, np.float32(SWIGLU_ALPHA)), op.add(up, np.float32(1)), "NONE")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Graph inputs, and values derived from them for all layers.

    Attributes:
        beam_idx: batch row that each row continues, [B].
        batch: the batch size as a vector [1].
        mask: additive attention mask [B, 1, T, P + T].
        cos: [B, 1, T, head size]; sin likewise.
    """

    beam_idx: ov.Node
    batch: ov.Node
    mask: ov.Node
    cos: ov.Node
    sin: ov.Node


class GraphBuilder:
    """Builds the graph of one checkpoint; keep it alive until the model is saved, as it owns constant buffers."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer_done: Callable[[float], None],
        table_rows: int = 0,
        *,
        int8_head: bool = False,
        grouped_experts: bool = False,
    ) -> None:
        """Check that this builder supports the model.

        Args:
            checkpoint: an open checkpoint.
            layer_done: called with 1 after each decoder layer.
            table_rows: rows of the prompt table; 0 is none.
            int8_head: round the output head to INT8, one scale per token.
            grouped_experts: use one product for all experts, if none of them rounds activations.

        Raises:
            UserError: the architecture, the activation function or an attention feature is not supported.
        """
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._store = WeightStore(checkpoint)
        self._layer_done, self._table_rows = layer_done, table_rows
        self._int8_head = int8_head
        layers = (f"transformer.layers.{number}" for number in range(self._config.num_hidden_layers))
        grouped = grouped_experts and self._config.experts is not None
        self.groups_experts = grouped and not any(map(self._rounds_experts, layers))
        """Whether one product is for all experts."""
        self._sinks: list[ov.Node] = []
        self._variables: list[Variable] = []
        check_supported(checkpoint)

    def _rounds_experts(self, ours: str) -> bool:
        return self._config.format_of(f"{ours}.mlp.fc").activation in _QUANTIZERS

    def build(self) -> ov.Model:
        """Return the stateful model; see the module docstring for its inputs and output."""
        ids = _input("input_ids", [-1, -1], ov.Type.i64)
        attention_mask = _input("attention_mask", [-1, -1], ov.Type.i64)
        position_ids = _input("position_ids", [-1, -1], ov.Type.i64)
        beam_idx = _input("beam_idx", [-1], ov.Type.i32)
        cos, sin = self._rotary(position_ids, "rotary")
        batch, mask = named(_dims(ids, 0), "batch"), named(_causal_mask(ids, attention_mask), "causal_mask")
        shared = windowed = _Inputs(beam_idx, batch, mask, cos, sin)
        windows = self._config.windows
        if window := max(windows):
            mask = named(_window_mask(ids, attention_mask, window), "window_mask")
            windowed = replace(shared, mask=mask)
        if window and self._config.raw.get("rope_local_base_freq"):
            cos, sin = self._rotary(position_ids, "rotary_local", local=True)
            windowed = replace(windowed, cos=cos, sin=sin)
        embedding = named(self._store.stored("transformer.vocab_embedding.weight"), "model.embed_tokens.weight")
        hidden = with_table(ids, embedding, self._table_rows)
        if FAMILIES[self._config.architecture].scales_embedding:
            # by sqrt(hidden) rounded to the model's own type, as Transformers does
            stored = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[self._config.dtype]
            normalizer = np.array(self._config.hidden_size**0.5).astype(numpy_dtype(stored))
            hidden = op.multiply(hidden, normalizer.astype(np.float32))
        hidden = named(self._grown(hidden, "embedding_multiplier"), "model.embed_tokens")
        for layer in range(self._config.num_hidden_layers):
            hidden = self._decoder_layer(layer, hidden, windowed if windows[layer] else shared)
            self._layer_done(1)
        hidden = self._norm("transformer.ln_f", "model.norm", hidden)
        # before the head, which openvino_genai looks for at the end
        hidden = self._grown(hidden, "output_multiplier_scale")
        logits = named(op.result(self._head(embedding, hidden)), "logits")
        logits.get_output_tensor(0).set_names({"logits"})
        inputs = [ids, attention_mask, position_ids, beam_idx]
        return ov.Model([logits], self._sinks, inputs, self._variables, "language_model")

    def _head(self, embedding: ov.Node, hidden: ov.Node) -> ov.Node:
        tied = "lm_head.weight" not in self._checkpoint
        if self._int8_head:
            rounded = self._store.int8_rows("transformer.vocab_embedding" if tied else "lm_head")
            weight = named(rounded, "lm_head.weight")
        elif tied:
            weight = op.convert(embedding, "f32")
        else:
            return self._linear("lm_head", "lm_head", self._quantized("lm_head", "lm_head", hidden))
        return self._product("lm_head", "lm_head", hidden, weight)

    def _decoder_layer(self, layer: int, hidden: ov.Node, shared: _Inputs) -> ov.Node:
        ours, theirs = f"transformer.layers.{layer}", f"model.layers.{layer}"
        mlp = self._mlp if self._config.experts is None else self._mixture

        def norm(x: ov.Node, ours_name: str, theirs_name: str) -> ov.Node:
            return self._norm(f"{ours}.{ours_name}", f"{theirs}.{theirs_name}", x)

        after = ("post_layernorm", "post_attention_layernorm")
        attended = self._attention(layer, norm(hidden, "input_layernorm", "input_layernorm"), shared)
        before_mlp, after_mlp = FAMILIES[self._config.architecture].more_norms or ("", "")
        if after_mlp:  # Gemma 3 also normalizes the outputs added to the residual
            attended = norm(attended, *after)
        attended = self._grown(attended, "residual_multiplier")
        hidden = named(op.add(hidden, attended), f"{theirs}.attention_residual")
        added = mlp(ours, theirs, norm(hidden, *((before_mlp, before_mlp) if before_mlp else after)))
        if after_mlp:
            added = norm(added, after_mlp, after_mlp)
        added = self._grown(added, "residual_multiplier")
        return named(op.add(hidden, added), f"{theirs}.mlp_residual")

    def _mlp(self, ours: str, theirs: str, normed: ov.Node) -> ov.Node:
        gate_in = self._quantized(f"{ours}.mlp.fc", f"{theirs}.mlp.gate_proj", normed)
        if FAMILIES[self._config.architecture].fused_linears:
            inner = self._config.intermediate_size
            up = self._linear(f"{ours}.mlp.fc", f"{theirs}.mlp.up_proj", gate_in, slice(0, inner))
            gate = self._linear(f"{ours}.mlp.fc", f"{theirs}.mlp.gate_proj", gate_in, slice(inner, 2 * inner))
        else:
            shares = same_input(self._store, f"{ours}.mlp.fc", f"{ours}.mlp.gate")
            up_in = gate_in if shares else self._quantized(f"{ours}.mlp.gate", f"{theirs}.mlp.up_proj", normed)
            gate = self._linear(f"{ours}.mlp.fc", f"{theirs}.mlp.gate_proj", gate_in)
            up = self._linear(f"{ours}.mlp.gate", f"{theirs}.mlp.up_proj", up_in)
        product = named(_gated(self._config.hidden_act)(gate, up), f"{theirs}.mlp.product")
        down_in = self._quantized(f"{ours}.mlp.proj", f"{theirs}.mlp.down_proj", product)
        return self._linear(f"{ours}.mlp.proj", f"{theirs}.mlp.down_proj", down_in)

    def _mixture(self, ours: str, theirs: str, normed: ov.Node) -> ov.Node:
        config, experts = self._config, self._config.experts
        assert experts is not None
        router, bias = self._store.float32(f"{ours}.mlp.router.weight"), f"{ours}.mlp.router.bias"
        router_bias = self._store.float32(bias) if bias in self._checkpoint else None
        to = route(normed, router, router_bias, experts, f"{theirs}.mlp")
        if self.groups_experts:
            return grouped(normed, to, lambda tokens: self._grouped_mlp(ours, to, tokens))
        gated, rounds = _gated(config.hidden_act), self._rounds_experts(ours)
        rounded = self._quantized(f"{ours}.mlp.fc", f"{theirs}.mlp.experts", normed) if rounds else normed

        def product(module: str, linear: str) -> Expert:
            def of(number: int, rows: ov.Node) -> ov.Node:
                store = self._store.of(ExpertTensors(self._checkpoint, number))
                name, bias = f"{theirs}.mlp.experts.{number}.{linear}", f"{ours}.mlp.{module}.bias"
                weight = named(store.weight(f"{ours}.mlp.{module}"), f"{name}.weight")
                result = _multiplied(rows, weight, name)
                if bias not in self._checkpoint:
                    return result
                return named(op.add(result, store.float32(bias)), f"{name}.biased")

            return of

        def between(both: ov.Node) -> ov.Node:
            halves = op.split(both, np.int64(1), 2)
            up, gate = halves.output(0), halves.output(1)
            inside = named(gated(gate, up), f"{theirs}.mlp.experts.product")
            return self._quantized(f"{ours}.mlp.proj", f"{theirs}.mlp.experts.down_proj", inside) if rounds else inside

        return separate(normed, rounded, to, product("fc", "up_gate_proj"), between, product("proj", "down_proj"))

    def _grouped_mlp(self, ours: str, to: Route, tokens: ov.Node) -> ov.Node:
        """Return what every expert makes of every token [E, B T, H], in the form that `grouped` needs."""
        each = [ExpertTensors(self._checkpoint, number) for number in range(to.experts.count)]
        inner = self._config.intermediate_size

        def product(module: str, linear: str, x: ov.Node, *pieces: slice) -> ov.Node:
            name, bias = f"{to.name}.experts.{linear}", f"{ours}.mlp.{module}.bias"
            weight = named(self._store.stacked(each, f"{ours}.mlp.{module}", *pieces), f"{name}.weight")
            result = _multiplied(x, weight, name)
            if bias not in self._checkpoint:
                return result
            added = np.stack([self._store.float32(bias)[:, rows] for rows in pieces], axis=2)
            return named(op.add(result, added.reshape(len(each), 1, -1)), f"{name}.biased")

        up_rows, gate_rows = slice(0, inner), slice(inner, 2 * inner)
        if self._config.hidden_act == _CLAMPED:  # alternating: OpenVINO would make one split of two halves
            both = product("fc", "up_gate_proj", tokens, up_rows, gate_rows)
            end, step, axis = (np.array([value], dtype=np.int64) for value in (2 * inner, 2, 2))
            up, gate = (op.slice(both, np.array([first], dtype=np.int64), end, step, axis) for first in (0, 1))
            inside = _clamped(gate, up)
        else:
            gate = product("fc", "gate_proj", tokens, gate_rows)
            inside = swiglu(gate, product("fc", "up_proj", tokens, up_rows))
        return product("proj", "down_proj", named(inside, f"{to.name}.experts.product"), slice(None))

    def _attention(self, layer: int, x: ov.Node, shared: _Inputs) -> ov.Node:
        config, ours = self._config, f"transformer.layers.{layer}.attention"
        theirs = f"model.layers.{layer}.self_attn"
        x = self._quantized(f"{ours}.qkv", f"{theirs}.qkv_proj", x)
        q_rows, kv_rows = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
        weight = named(self._store.weight(f"{ours}.qkv"), f"{theirs}.qkv_proj.weight")
        whole = _multiplied(x, weight, f"{theirs}.qkv_proj")
        q, k, v = (
            self._heads(
                f"{theirs}.{part}_proj", self._part(whole, f"{ours}.qkv", f"{theirs}.{part}_proj", start, start + size)
            )
            for part, start, size in (("q", 0, q_rows), ("k", q_rows, kv_rows), ("v", q_rows + kv_rows, kv_rows))
        )
        q, k = self._head_normed(layer, "q", q), self._head_normed(layer, "k", k)
        q = named(_rotate(q, shared), f"{theirs}.q_rotated")
        k = self._kv_rounded(ours, f"{theirs}.k_rounded", named(_rotate(k, shared), f"{theirs}.k_rotated"))
        v = self._kv_rounded(ours, f"{theirs}.v_rounded", v)
        k = self._cached(f"past_key_values.{layer}.keypresent.{layer}.key", f"{theirs}.k", k, shared)
        v = self._cached(f"past_key_values.{layer}.valuepresent.{layer}.value", f"{theirs}.v", v, shared)
        k, v = named(self._repeated(k), f"{theirs}.k_repeated"), named(self._repeated(v), f"{theirs}.v_repeated")
        growth = config.raw.get("attention_multiplier", 1.0)
        scale = op.constant(np.float32(growth * (config.raw.get("query_pre_attn_scalar") or config.head_size) ** -0.5))
        attended = named(self._attended(ours, q, k, v, shared.mask, scale), f"{theirs}.attention")
        merged = op.transpose(attended, np.array([0, 2, 1, 3], dtype=np.int64))
        merged = op.reshape(merged, np.array([0, 0, q_rows], dtype=np.int64), special_zero=True)
        merged = named(merged, f"{theirs}.merged_heads")
        dense_in = self._quantized(f"{ours}.dense", f"{theirs}.o_proj", merged)
        return self._linear(f"{ours}.dense", f"{theirs}.o_proj", dense_in)

    def _attended(self, ours: str, q: ov.Node, k: ov.Node, v: ov.Node, mask: ov.Node, scale: ov.Node) -> ov.Node:
        """Return softmax(q k scale + mask) v; a sink is one more logit of each head, whose share is left out."""
        if f"{ours}.sinks" not in self._checkpoint:
            return op.scaled_dot_product_attention(q, k, v, mask, scale)
        sinks = op.constant(self._store.float32(f"{ours}.sinks").reshape(1, -1, 1, 1))
        # the sixth input, which the function of opset13 does not have
        return NodeFactory("opset13").create(
            "ScaledDotProductAttention", [q, k, v, mask, scale, sinks], {"causal": False}
        )

    def _head_normed(self, layer: int, part: str, x: ov.Node) -> ov.Node:
        """Apply RMSNorm to each head [B, heads, T, D] of the queries or keys, where the family has such a norm."""
        norm, theirs = f"{part}_layernorm", FAMILIES[self._config.architecture].head_norms.get(f"{part}_layernorm")
        if theirs is None:
            return x
        return self._norm(f"transformer.layers.{layer}.attention.{norm}", f"model.layers.{layer}.self_attn.{theirs}", x)

    def _quantized(self, module: str, name: str, x: ov.Node) -> ov.Node:
        """Return the activation [..., I] as the matrix product of a linear receives it."""
        form = self._config.format_of(module)
        if form.weights is not FLOAT_WEIGHTS:
            if (prequant := f"{module}.prequant_scaling_factor") in self._checkpoint:
                x = op.multiply(x, op.constant(self._store.float32(prequant)))
            if quantize := _QUANTIZERS.get(form.activation):
                x = quantize(x, self._store.scalar(f"{module}.activation_scaling_factor"))
        return named(x, f"{name}.input")

    def _linear(self, module: str, name: str, x: ov.Node, rows: slice = slice(None)) -> ov.Node:
        weight = named(self._store.weight(module, rows), f"{name}.weight")
        return self._product(module, name, x, weight, rows)

    def _product(self, module: str, name: str, x: ov.Node, weight: ov.Node, rows: slice = slice(None)) -> ov.Node:
        return self._biased(module, name, _multiplied(x, weight, name), rows)

    def _part(self, whole: ov.Node, module: str, name: str, start: int, stop: int) -> ov.Node:
        """Return some output channels of a product: one large product waits less for its threads than three small."""
        first, last, step, axis = (np.array([value], dtype=np.int64) for value in (start, stop, 1, 2))
        return self._biased(module, name, named(op.slice(whole, first, last, step, axis), name), slice(start, stop))

    def _biased(self, module: str, name: str, product: ov.Node, rows: slice) -> ov.Node:
        if f"{module}.bias" not in self._checkpoint:
            return product
        return named(op.add(product, self._store.float32(f"{module}.bias")[rows]), f"{name}.biased")

    def _norm(self, module: str, name: str, x: ov.Node) -> ov.Node:
        """Apply RMSNorm; the checkpoint already holds Gemma's weight as 1 + w."""
        squares = op.reduce_mean(op.power(x, np.float32(2)), np.array([-1], dtype=np.int64), keep_dims=True)
        root = op.sqrt(op.add(squares, np.float32(self._config.norm_epsilon)))
        normed = op.multiply(x, op.divide(np.float32(1), root))
        return named(op.multiply(normed, self._store.float32(f"{module}.weight")), name)

    def _grown(self, x: ov.Node, multiplier: str) -> ov.Node:
        """Multiply by a number of the checkpoint, where it has one (Granite)."""
        factor = self._config.raw.get(multiplier, 1.0)
        return x if factor == 1 else op.multiply(x, np.float32(factor))

    def _rotary(self, position_ids: ov.Node, name: str, *, local: bool = False) -> tuple[ov.Node, ov.Node]:
        frequencies = op.constant(inverse_frequencies(self._config, local=local).reshape(1, 1, -1))
        positions = op.convert(op.unsqueeze(position_ids, np.int64(2)), "f32")
        angles = op.unsqueeze(op.matmul(positions, frequencies, False, False), np.int64(1))
        both = named(op.concat([angles, angles], -1), f"{name}.angles")
        cos, sin = op.cos(both), op.sin(both)
        if not local and (factor := attention_factor(self._config)) != 1.0:
            cos, sin = op.multiply(cos, np.float32(factor)), op.multiply(sin, np.float32(factor))
        return named(cos, f"{name}.cos"), named(sin, f"{name}.sin")

    def _heads(self, name: str, x: ov.Node) -> ov.Node:
        """Reshape [B, T, heads * head size] -> [B, heads, T, head size]."""
        split = op.reshape(x, np.array([0, 0, -1, self._config.head_size], dtype=np.int64), special_zero=True)
        return named(op.transpose(split, np.array([0, 2, 1, 3], dtype=np.int64)), f"{name}.heads")

    def _kv_rounded(self, attention: str, name: str, x: ov.Node) -> ov.Node:
        """Round K or V to the values of the 8-bit cache, with the one scale that the GPU engine uses for both."""
        quantizers = {KvFormat.FP8: to_fp8, KvFormat.INT8: to_int8}
        quantize = quantizers.get(self._config.kv_format)
        if quantize is None:
            return x
        return named(quantize(x, self._store.scalar(f"{attention}.kv_cache_scaling_factor")), name)

    def _cached(self, variable_id: str, name: str, new: ov.Node, shared: _Inputs) -> ov.Node:
        """Append to a Variable and return past + new, [B, KV heads, P + T, head size]."""
        kv_heads, size = self._config.num_key_value_heads, self._config.head_size
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, kv_heads, -1, size])
        info.data_type, info.variable_id = ov.Type.f32, variable_id
        variable = Variable(info)
        empty_shape = op.concat([shared.batch, np.array([kv_heads, 0, size], dtype=np.int64)], 0)
        past = named(op.read_value(op.broadcast(np.float32(0), empty_shape), variable), f"{name}_past")
        joined = named(op.concat([op.gather(past, shared.beam_idx, np.int64(0)), new], 2), f"{name}_all")
        self._sinks.append(named(op.assign(joined, variable), f"{name}_kept"))
        self._variables.append(variable)
        return joined

    def _repeated(self, x: ov.Node) -> ov.Node:
        """Repeat KV heads for each query head: [B, KV, S, D] -> [B, heads, S, D]."""
        kv_heads = self._config.num_key_value_heads
        repeats = self._config.num_attention_heads // kv_heads
        if repeats == 1:
            return x
        ones = np.array([1, 1, repeats, 1, 1], dtype=np.int64)
        spread = op.broadcast(op.unsqueeze(x, np.int64(2)), op.constant(ones), broadcast_spec="BIDIRECTIONAL")
        shape = np.array([0, kv_heads * repeats, -1, self._config.head_size], dtype=np.int64)
        return op.reshape(spread, shape, special_zero=True)


def _multiplied(x: ov.Node, weight: ov.Node, name: str) -> ov.Node:
    """Return x [..., I] times the transpose of a weight [O, I]."""
    return named(op.matmul(x, weight, transpose_a=False, transpose_b=True), name)


def check_supported(checkpoint: Checkpoint) -> None:
    """Reject models whose arithmetic this graph does not implement.

    Raises:
        UserError: naming the feature and its value.
    """
    config = checkpoint.config
    built = [name for name, family in FAMILIES.items() if family.cpu_engine]
    if config.architecture not in built:
        raise UserError(
            f"{config.architecture} is not supported by engine=openvino.",
            allowed=f"It builds {', '.join(built)}.",
            todo="Use engine=tensorrt_llm for this model.",
        )
    if config.hidden_act not in (*_ACTS, _CLAMPED):
        raise UserError(
            f"hidden_act='{config.hidden_act}' is not supported by engine=openvino.",
            allowed=f"Known: {', '.join((*_ACTS, _CLAMPED))}.",
        )
    for key in _NOT_BUILT:
        if config.raw.get(key):
            raise UserError(f"{key}={config.raw[key]} is not supported by engine=openvino.")
    if config.raw.get("position_embedding_type", "rope_gpt_neox") not in ("rope_gpt_neox", "long_rope"):
        raise UserError(
            f"position_embedding_type='{config.raw['position_embedding_type']}' is not supported by engine=openvino.",
            allowed="It supports rope_gpt_neox and long_rope.",
        )
    for name in checkpoint:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.endswith(_LINEARS) and config.format_of(module).weights.stored:
            check_weight_dtype(checkpoint, module)


def _input(name: str, shape: list[int], element_type: ov.Type) -> ov.Node:
    parameter = op.parameter(ov.PartialShape(shape), element_type)
    named(parameter, name)  # paged attention finds inputs by friendly name, not by tensor name
    parameter.get_output_tensor(0).set_names({name})
    return parameter


def _dims(node: ov.Node, axis: int) -> ov.Node:
    """Return the size of one dimension as a vector of length 1, i64."""
    return op.gather(op.shape_of(node), np.array([axis], dtype=np.int64), np.int64(0))


def _rotate(x: ov.Node, shared: _Inputs) -> ov.Node:
    """Rotate pairs (i, i + D/2) of the first D channels by their angle (GPT-NeoX order): x cos + (-x2, x1) sin."""
    whole, rotated = (each.get_output_partial_shape(0)[3].get_length() for each in (x, shared.cos))
    kept = [_channels(x, rotated, whole)] if rotated < whole else []
    x = _channels(x, 0, rotated) if kept else x
    first, second = (_channels(x, start, start + rotated // 2) for start in (0, rotated // 2))
    turned = op.concat([op.multiply(second, np.full((1, 1, 1, 1), -1, dtype=np.float32)), first], -1)
    x = op.add(op.multiply(x, shared.cos), op.multiply(turned, shared.sin))
    return op.concat([x, *kept], -1) if kept else x


def _channels(x: ov.Node, start: int, stop: int) -> ov.Node:
    bounds = (np.array([value], dtype=np.int64) for value in (start, stop, 1, 3))
    return op.slice(x, *bounds)


def _causal_mask(ids: ov.Node, attention_mask: ov.Node) -> ov.Node:
    """Return a mask of 0 where a token may attend, and about -inf where not: later tokens and padding."""
    tokens, total = _dims(ids, 1), _dims(attention_mask, 1)
    zero, one = np.int64(0), np.int64(1)
    column = op.range(zero, op.squeeze(total, zero), one, "i64")
    row = op.add(op.range(zero, op.squeeze(tokens, zero), one, "i64"), op.subtract(total, tokens))
    causal = op.less_equal(op.unsqueeze(column, zero), op.unsqueeze(row, one))
    real = op.unsqueeze(op.not_equal(attention_mask, zero), np.array([1, 2], dtype=np.int64))
    visible = op.logical_and(real, op.unsqueeze(causal, np.array([0, 1], dtype=np.int64)))
    return op.select(visible, np.float32(0), np.float32(np.finfo(np.float32).min))


def _window_mask(ids: ov.Node, attention_mask: ov.Node, window: int) -> ov.Node:
    """Return the mask of layers that attend to the last `window` tokens alone.

    openvino_genai reads the window from exactly this pattern, which is that of Transformers' masks of gpt-oss and Gemma
    3 (OpenVINO, `state_management_pattern.cpp`): kv > q + constant, four times "and", Broadcast, Select, Slice.
    """
    tokens, total = _dims(ids, 1), _dims(attention_mask, 1)
    zero, one = np.int64(0), np.int64(1)
    row = op.add(op.range(zero, op.squeeze(tokens, zero), one, "i64"), op.subtract(total, tokens))
    row = op.unsqueeze(row, np.array([0, 1, 3], dtype=np.int64))  # [1, 1, T, 1]
    column = op.unsqueeze(op.range(zero, op.squeeze(total, zero), one, "i64"), np.array([0, 1, 2], dtype=np.int64))
    real = op.unsqueeze(op.not_equal(attention_mask, zero), np.array([1, 2], dtype=np.int64))
    causal, near = op.less_equal(column, row), op.greater(column, op.add(row, np.int64(-window)))
    visible = op.bitwise_and(real, op.bitwise_and(op.bitwise_and(real, near), causal))
    visible = op.bitwise_and(visible, causal)
    shape = op.concat([_dims(ids, 0), np.array([1], dtype=np.int64), tokens, total], 0)
    masked = op.select(op.broadcast(visible, shape), np.float32(0), np.float32(np.finfo(np.float32).min))
    bounds = (np.array([0], dtype=np.int64), total, np.array([1], dtype=np.int64), np.array([3], dtype=np.int64))
    return op.slice(masked, *bounds)
