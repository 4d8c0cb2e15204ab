"""The CPU engine against its checkpoint, step by step.

Each step is computed again with numpy from the engine's own result of the step before and the checkpoint's tensors. So
an error does not travel on to later steps, and the first step that differs is the one that is wrong.

Shapes: T tokens, H hidden size, N heads, K KV heads, D head size, O output channels, I input channels.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from eval.diagnose import arithmetic
from eval.diagnose.result import ACTIVATION, PREQUANT, QKV, Finding
from pipelines.checkpoint.read import Checkpoint, dequantize
from pipelines.checkpoint.tensors import numpy_dtype
from pipelines.domain.families import FAMILIES
from pipelines.domain.formats import FLOAT_WEIGHTS, Activation, KvFormat
from pipelines.engines.openvino.rope import attention_factor, inverse_frequencies

Array = np.ndarray[Any, Any]
Steps = Mapping[str, Array]

AGAIN = "Build the engine again from this checkpoint."
EXACT = 1e-5
"""Relative error of a step in float32, many times what rounding explains (4e-7 was measured)."""
ROUNDED = 2e-2
"""Relative error of a step that rounds to codes, where two nearly equal numbers can be different codes."""
NAMES = {
    "self_attn.qkv_proj": "attention.qkv", "self_attn.o_proj": "attention.dense", "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate", "mlp.down_proj": "mlp.proj",
}  # fmt: skip
"""Names of linears in the engine and in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, and the same computed from the checkpoint.

    Attributes:
        layer: decoder layer; None outside.
        tensor: what of the checkpoint it reads.
        right: the result computed here.
        allowed: relative error without a fault.
        why: explains a difference.
    """

    name: str
    layer: int | None
    tensor: str
    actual: Array
    right: Array
    allowed: float
    why: Callable[[], str]

    @property
    def error(self) -> float:
        """Relative error, Frobenius norm; infinite if a value is not finite or shapes differ."""
        if self.actual.shape != self.right.shape or not np.isfinite(self.actual).all():
            return math.inf
        return float(np.linalg.norm(self.actual - self.right)) / (float(np.linalg.norm(self.right)) or 1.0)

    def finding(self) -> Finding:
        """Return the step as something that is wrong."""
        error = self.error
        figure = "not finite" if math.isinf(error) else f"{100 * error:.3g} % off"
        return Finding(self.layer, self.tensor, figure, f"{self.name}: {self.why()}", AGAIN)


class Retraced:
    """Computes the steps of an engine again from its checkpoint."""

    def __init__(self, checkpoint: Checkpoint, engine_weight: Callable[[str], Array | None]) -> None:
        """Keep both.

        Args:
            checkpoint: an open checkpoint.
            engine_weight: returns the weight of a linear as the engine multiplies it, by "LAYER.module" of
                Hugging Face, to explain a difference; None if it has none of this name.
        """
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._engine_weight = engine_weight

    def outside(self, steps: Steps, tokens: Sequence[int], first_position: int) -> Iterator[Step]:
        """Yield the embedding and the rotary angles."""
        config, name = self._config, "transformer.vocab_embedding.weight"
        table = self._checkpoint.tensor(name).astype(np.float32)
        plain, factor = table[list(tokens)], 1.0
        if FAMILIES[config.architecture].scales_embedding:
            factor = float(np.array(config.hidden_size**0.5).astype(numpy_dtype(_DTYPES[config.dtype])))
        factor *= float(self._grows("embedding_multiplier"))
        actual = steps["model.embed_tokens"]
        right, how = plain * np.float32(factor), f"it is multiplied by {factor:.4g}"
        yield Step(
            "model.embed_tokens", None, name, actual, right, EXACT,
            partial(arithmetic.scale_cause, actual, right, "the embedding", how),
        )  # fmt: skip
        angles, positions = steps["rotary.angles"], np.arange(first_position, first_position + len(tokens))
        right = positions[:, None] * inverse_frequencies(config)[None]
        rotary = angles.reshape(len(tokens), -1)[:, : config.head_size // 2]
        why = "it follows from rotary_base and rotary_scaling"
        yield Step(
            "rotary.angles", None, "config.json rotary_base", rotary, right, EXACT,
            partial(arithmetic.scale_cause, rotary, right, "the rotary angle", why),
        )  # fmt: skip

    def head(self, steps: Steps) -> Iterator[Step]:
        """Yield the last norm and the head."""
        last = f"model.layers.{self._config.num_hidden_layers - 1}.mlp_residual"
        yield self._norm(None, "model.norm", "transformer.ln_f", steps[last], steps["model.norm"])
        own = "lm_head.weight" in self._checkpoint
        name = "lm_head" if own else "transformer.vocab_embedding"
        table = (
            dequantize(self._checkpoint, name) if own else self._checkpoint.tensor(f"{name}.weight").astype(np.float32)
        )
        grown = steps["model.norm"] * self._grows("output_multiplier_scale")
        hidden = steps.get("lm_head.input", grown)
        if "lm_head.input" in steps:
            yield self._input(None, "lm_head", "lm_head", grown, steps)
        yield Step(
            "lm_head", None, f"{name}.weight", steps["logits"], hidden @ table.T, EXACT,
            lambda: arithmetic.scale_cause(steps["logits"], hidden @ table.T, "the logit", "the head is another one"),
        )  # fmt: skip

    def layer(self, steps: Steps, number: int) -> Iterator[Step]:
        """Yield the steps of one decoder layer in order."""
        before = "model.embed_tokens" if number == 0 else f"model.layers.{number - 1}.mlp_residual"
        here, ours = f"model.layers.{number}", f"transformer.layers.{number}"
        normed = steps[f"{here}.input_layernorm"]
        yield self._norm(number, f"{here}.input_layernorm", f"{ours}.input_layernorm", steps[before], normed)
        yield from self._attention(steps, number, normed)
        growth = self._grows("residual_multiplier")
        attended = _last(steps, f"{here}.self_attn.o_proj") * growth
        middle = steps[f"{here}.attention_residual"]
        yield _sum(number, f"{here}.attention_residual", steps[before], attended, middle)
        normed = steps[f"{here}.post_attention_layernorm"]
        yield self._norm(number, f"{here}.post_attention_layernorm", f"{ours}.post_layernorm", middle, normed)
        yield from self._mlp(steps, number, normed)
        added = _last(steps, f"{here}.mlp.down_proj") * growth
        yield _sum(number, f"{here}.mlp_residual", middle, added, steps[f"{here}.mlp_residual"])

    def _grows(self, multiplier: str) -> np.float32:
        """Return a multiplier of the checkpoint (Granite); 1 where it has none."""
        return np.float32(self._config.raw.get(multiplier, 1.0))

    def _attention(self, steps: Steps, number: int, normed: Array) -> Iterator[Step]:
        config, here = self._config, f"model.layers.{number}.self_attn"
        yield self._input(number, f"{here}.qkv_proj", f"transformer.layers.{number}.attention.qkv", normed, steps)
        fed = steps.get(f"{here}.qkv_proj.input", normed)
        for part in QKV:
            yield from self._linear(steps, number, f"self_attn.{part}_proj", fed)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q, k, v = (
            arithmetic.split_heads(_last(steps, f"{here}.{part}_proj"), heads if part == "q" else kv_heads)
            for part in QKV
        )
        angles = steps["rotary.angles"].reshape(normed.shape[0], -1)[:, : config.head_size // 2]
        factor = np.float32(attention_factor(config))
        for ours, theirs in FAMILIES[config.architecture].head_norms.items():
            module, plain = f"transformer.layers.{number}.attention.{ours}", q if ours[0] == "q" else k
            yield self._norm(number, f"{here}.{theirs}", module, plain, steps[f"{here}.{theirs}"])
        q, k = (steps.get(f"{here}.{part}_norm", plain) for part, plain in (("q", q), ("k", k)))
        for part, plain in (("q", q), ("k", k)):
            actual, right = steps[f"{here}.{part}_rotated"], arithmetic.rotate(plain, angles) * factor
            yield Step(
                f"{here}.{part}_rotated", number, f"attention.qkv ({part} heads)", actual, right, EXACT,
                partial(arithmetic.rotation_cause, actual, plain, angles),
            )  # fmt: skip
        keys, values = steps[f"{here}.k_rotated"], v
        if config.kv_format is not KvFormat.AUTO:
            yield from self._kv(steps, number, {"k": keys, "v": values})
            keys, values = steps[f"{here}.k_rounded"], steps[f"{here}.v_rounded"]
        rotated, actual = steps[f"{here}.q_rotated"], steps[f"{here}.attention"]
        scale, window = float(self._grows("attention_multiplier")) * config.head_size**-0.5, config.windows[number]
        right = arithmetic.attend(rotated, keys, values, scale, window=window)
        yield Step(
            f"{here}.attention", number, "attention", actual, right, EXACT,
            lambda: arithmetic.attention_cause(actual, rotated, keys, values, scale, config.hidden_size, window),
        )  # fmt: skip
        merged = actual.transpose(1, 0, 2).reshape(normed.shape[0], -1)
        yield self._input(number, f"{here}.o_proj", f"transformer.layers.{number}.attention.dense", merged, steps)
        yield from self._linear(steps, number, "self_attn.o_proj", steps.get(f"{here}.o_proj.input", merged))

    def _kv(self, steps: Steps, number: int, plain: Mapping[str, Array]) -> Iterator[Step]:
        name = f"transformer.layers.{number}.attention.kv_cache_scaling_factor"
        scale = float(self._checkpoint.tensor(name).astype(np.float32).reshape(-1)[0])
        kind: Activation = "fp8" if self._config.kv_format is KvFormat.FP8 else "int8"
        for part, values in plain.items():
            node = f"model.layers.{number}.self_attn.{part}_rounded"
            yield Step(
                node, number, name, steps[node], arithmetic.ROUNDINGS[kind](values, scale), ROUNDED,
                lambda: "keys and values are rounded with another scale than the checkpoint's",
            )  # fmt: skip

    def _mlp(self, steps: Steps, number: int, normed: Array) -> Iterator[Step]:
        here, ours = f"model.layers.{number}.mlp", f"transformer.layers.{number}.mlp"
        yield self._input(number, f"{here}.gate_proj", f"{ours}.fc", normed, steps)
        gate_in = steps.get(f"{here}.gate_proj.input", normed)
        yield from self._linear(steps, number, "mlp.gate_proj", gate_in)
        yield self._input(number, f"{here}.up_proj", f"{ours}.gate", normed, steps, shared=gate_in)
        yield from self._linear(steps, number, "mlp.up_proj", steps.get(f"{here}.up_proj.input", gate_in))
        gate, up = (_last(steps, f"{here}.{name}_proj") for name in ("gate", "up"))
        actual, act = steps[f"{here}.product"], self._config.hidden_act
        yield Step(
            f"{here}.product", number, "config.json hidden_act", actual, arithmetic.ACTS[act](gate) * up, EXACT,
            lambda: arithmetic.act_cause(actual, gate, up, act),
        )  # fmt: skip
        yield self._input(number, f"{here}.down_proj", f"{ours}.proj", actual, steps)
        yield from self._linear(steps, number, "mlp.down_proj", steps.get(f"{here}.down_proj.input", actual))

    def _norm(self, layer: int | None, node: str, module: str, x: Array, actual: Array) -> Step:
        weight, eps = self._checkpoint.tensor(f"{module}.weight").astype(np.float32), self._config.norm_epsilon
        return Step(
            node, layer, f"{module}.weight", actual, arithmetic.normed(x, eps) * weight, EXACT,
            lambda: arithmetic.norm_cause(actual, x, weight, eps, FAMILIES[self._config.architecture].norm_offset),
        )  # fmt: skip

    def _input(
        self, layer: int | None, node: str, module: str, x: Array, steps: Steps, shared: Array | None = None
    ) -> Step:
        """Check what a linear receives; without a node of its own it receives `shared`, or its input unchanged."""
        form = self._config.format_of(module)
        kind, excluded = form.activation, form.weights is FLOAT_WEIGHTS
        prequant, scale = (self._leaf(module, leaf) for leaf in (PREQUANT, ACTIVATION))
        right = x if prequant is None or excluded else x * prequant
        if not excluded and scale is not None:
            right = arithmetic.ROUNDINGS[kind](right, float(scale.reshape(-1)[0]))
        actual = steps.get(f"{node}.input", x if shared is None else shared)
        tensor = f"{module}.{ACTIVATION if scale is not None else PREQUANT}"
        return Step(
            f"{node}.input", layer, tensor, actual, right, EXACT if kind == "16bit" or excluded else ROUNDED,
            lambda: arithmetic.input_cause(actual, x, right, prequant),
        )  # fmt: skip

    def _leaf(self, module: str, leaf: str) -> Array | None:
        name = f"{module}.{leaf}"
        return self._checkpoint.tensor(name).astype(np.float32) if name in self._checkpoint else None

    def _linear(self, steps: Steps, number: int, name: str, x: Array) -> Iterator[Step]:
        node, part = f"model.layers.{number}.{name}", name.rpartition(".")[2][0]
        merged = name.startswith("self_attn.") and part in QKV
        module = f"transformer.layers.{number}.{NAMES['self_attn.qkv_proj' if merged else name]}"
        weight = self._rows(dequantize(self._checkpoint, module), part if merged else "")
        rows = f" ({part} rows)" if merged else ""
        yield Step(
            node, number, f"{module}.weight{rows}", steps[node], x @ weight.T, EXACT,
            lambda: self._weight_cause(number, name, weight, x, steps[node]),
        )  # fmt: skip
        bias = self._leaf(module, "bias")
        engine_value = steps.get(f"{node}.biased", steps[node])
        right = steps[node] if bias is None else steps[node] + self._rows(bias, part if merged else "")
        if bias is not None or f"{node}.biased" in steps:
            yield Step(
                f"{node}.biased", number, f"{module}.bias", engine_value, right, EXACT, lambda: "the bias is not added"
            )

    def _rows(self, values: Array, part: str) -> Array:
        q, kv = (
            n * self._config.head_size for n in (self._config.num_attention_heads, self._config.num_key_value_heads)
        )
        where = {"": slice(None), "q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, None)}
        return values[where[part]]

    def _weight_cause(self, number: int, name: str, weight: Array, x: Array, actual: Array) -> str:
        """Explain a product: by the engine's weight if it differs, otherwise by the product itself."""
        engine_value = self._engine_weight(f"{number}.{name}")
        if engine_value is None or engine_value.shape != weight.shape:
            return "the engine's weight has another shape"
        if not arithmetic.compare(weight, engine_value, weight).suspicious:
            return arithmetic.scale_cause(
                actual, x @ weight.T, "the product", "its weight is right, so the product is computed wrongly"
            )
        config = self._config
        part = name.rpartition(".")[2][0]
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        suspect = arithmetic.Suspect(
            weight, engine_value, weight, heads.get(part, 0) if "self_attn" in name else 0, name.endswith("o_proj")
        )
        return arithmetic.explain(suspect, self._others(number, name))

    def _others(self, number: int, name: str) -> Iterator[tuple[str, Array]]:
        module = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.fc"}.get(name)
        if module is not None:
            other = f"transformer.layers.{number}.{module}"
            yield f"{module} of the same layer", dequantize(self._checkpoint, other)
        part = name.rpartition(".")[2][0]
        merged = name.startswith("self_attn.") and part in QKV
        leaf = NAMES["self_attn.qkv_proj" if merged else name]
        for layer in range(self._config.num_hidden_layers):
            whole = dequantize(self._checkpoint, f"transformer.layers.{layer}.{leaf}")
            if layer != number:
                yield f"the tensor of layer {layer}", self._rows(whole, part if merged else "")
            elif merged:
                for other in QKV:
                    yield f"the {other} rows", self._rows(whole, other)


_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _last(steps: Steps, node: str) -> Array:
    return steps.get(f"{node}.biased", steps[node])


def _sum(layer: int, node: str, a: Array, b: Array, actual: Array) -> Step:
    return Step(node, layer, node.partition(".layers.")[2], actual, a + b, EXACT, lambda: "the residual sum is wrong")
