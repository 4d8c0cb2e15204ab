"""A reference executor of the graphs that TensorRT Edge-LLM's exporter writes, in numpy.

ONNX's own operators compute as its specification says; NVIDIA's as the stubs of `tensorrt_edgellm/models/ops.py` and
`onnx/onnx_custom_schemas.py` describe them: attention over a paged KV cache, the INT4 product, and the quantization of
activations to FP4. Products are summed in float32. What a graph holds in FP16 is rounded to it, or not at all.

Shape legend: T tokens of all sequences, H query heads, K key heads, D size of a head.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pipelines.checkpoint.read import E2M1_VALUES
from pipelines.checkpoint.tensors import TensorFile
from pipelines.engines.tensorrt_edge.read_back import Graph, fragments_to_int4

Array = np.ndarray[Any, Any]
PAGE = 128
FP8_MAX = 448.0
E2M1 = np.array(E2M1_VALUES, np.float32)
FP16, FP8, FP32, INT8 = 10, 17, 1, 3
"""ONNX's numbers of types."""


class EdgeModel:
    """An exported model."""

    def __init__(self, folder: Path, listing: Mapping[str, Any], *, rounds: bool) -> None:
        """Take the exporter's folder and the listing of its graph.

        Args:
            folder: with model.onnx.data, embedding.safetensors and config.json.
            listing: see export_graph.py.
            rounds: whether values in FP16 are rounded to it.
        """
        self._config = json.loads((folder / "config.json").read_text())
        self._embedding = TensorFile(folder / "embedding.safetensors")["embedding"]
        self._half = np.float16 if rounds else np.float32
        graph = Graph(listing, folder)
        self._nodes, self._outputs = graph.nodes, listing["outputs"]
        self._types = {name: entry["type"] for name, entry in listing["initializers"].items()}
        self._constants = {name: self._own(graph[name]) for name in graph}

    def _own(self, array: Array) -> Array:
        return array.astype(self._half) if array.dtype == np.float16 else np.array(array)

    def logits(self, sequences: Array, *, chunks: int = 1) -> Array:
        """Return float32 logits [B, T, V] after every token.

        Args:
            sequences: token ids [B, T].
            chunks: iterations; from the second on, earlier tokens are read from the pages of the KV cache.
        """
        batch, length = sequences.shape
        pages = -(-length // PAGE)
        heads = [2, batch * pages, PAGE, self._config["num_key_value_heads"], self._config["head_dim"]]
        state = {f"past_key_values_{n}": np.zeros(heads, self._half) for n in range(self._config["num_hidden_layers"])}
        # pages in disorder: nothing may rely on their places
        places = np.random.default_rng(0).permutation(batch * pages).reshape(batch, 1, pages).repeat(2, axis=1)
        parts, done = [], 0
        for tokens in np.array_split(sequences, chunks, axis=1):
            new = tokens.shape[1]
            positions = np.tile(np.arange(done, done + new), batch)
            inputs = state | {
                "inputs_embeds": self._own(self._embedding[tokens.reshape(-1)]),
                "rope_rotary_cos_sin": self._rotary(positions),
                "positions": positions,
                "query_start_offsets": np.arange(batch + 1) * new,
                "query_lengths": np.full(batch, new),
                "past_lengths": np.full(batch, done),
                "attention_sequence_lengths": np.full(batch, done + new),
                "kv_page_table": places,
                "logits_indices": np.arange(batch * new),
            }
            values = self._run(inputs)
            state = {f"past_key_values_{n}": values[f"present_key_values_{n}"] for n in range(len(state))}
            parts.append(values["logits"].astype(np.float32).reshape(batch, new, -1))
            done += new
        return np.concatenate(parts, axis=1)

    def _rotary(self, positions: Array) -> Array:
        """Return cosines and sines [T, D], as config.json of the export says; computed by Transformers."""
        import torch
        import transformers

        read = self._config
        scaling = {**(read["rope_scaling"] or {"rope_type": "default"}), "rope_theta": read["rope_theta"]}
        config = transformers.LlamaConfig(
            hidden_size=read["hidden_size"],
            num_attention_heads=read["num_attention_heads"],
            head_dim=read["head_dim"],
            max_position_embeddings=read["max_position_embeddings"],
            rope_parameters=scaling,
        )
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        cosines, sines = rotary(torch.zeros(1, dtype=torch.float32), torch.from_numpy(positions)[None])
        half = read["head_dim"] // 2
        return np.concatenate([cosines[0, :, :half].numpy(), sines[0, :, :half].numpy()], axis=-1)

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        values: dict[str, Array] = {**self._constants, **inputs}
        for node in self._nodes:
            given = [values.get(name) for name in node["inputs"]]
            made = self._compute(node, given)
            values |= zip(node["outputs"], made if isinstance(made, tuple) else (made,), strict=False)
        return {name: values[name] for name in self._outputs}

    def _compute(self, node: Mapping[str, Any], given: list[Any]) -> Any:
        own, op = node["attributes"], node["op"]
        if op == "AttentionPlugin":
            return self._attention(own, given, dict(zip(node["inputs"], given, strict=True)))
        if op == "Int4GroupwiseGemmPluginV2":
            x, packed, scales = given
            codes = fragments_to_int4(packed, own["gemm_n"], own["gemm_k"]).astype(np.float32)
            weight = codes * scales.T.astype(np.float32).repeat(own["group_size"], axis=1)
            return _product(x, weight.T)
        if op == "TRT_FP4DynamicQuantize":
            return _to_fp4(given[0], given[1])
        if op in ("QuantizeLinear", "DequantizeLinear"):
            return self._quantized(op, own, given, self._types.get(node["inputs"][0]))
        if op == "Cast":
            return given[0].astype({FP32: np.float32, FP16: self._half}[own["to"]])
        return _ONNX[op](own, *given)

    def _quantized(self, op: str, own: Mapping[str, Any], given: list[Any], stored: str | None) -> Array:
        x, scale = given[0], given[1].astype(np.float32)
        if op == "QuantizeLinear":
            to = x.astype(np.float32) / scale
            if own["output_dtype"] == FP8:
                return np.clip(to, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
            assert own["output_dtype"] == INT8
            return np.clip(np.rint(to), -128, 127).astype(np.int8)
        if stored == "FLOAT4E2M1":
            x = E2M1[np.stack([x & 15, x >> 4], axis=-1).reshape(x.shape[0], -1)]
        if block := own.get("block_size"):
            scale = scale.repeat(block, axis=own["axis"])
        elif scale.ndim == 1:
            scale = scale.reshape([-1 if axis == own.get("axis", 1) else 1 for axis in range(x.ndim)])
        return (x.astype(np.float32) * scale).astype(given[1].dtype if given[1].dtype == self._half else np.float32)

    def _attention(self, own: Mapping[str, Any], given: list[Any], named: Mapping[str, Any]) -> tuple[Array, Array]:
        for off in ("tree_attention", "vision_block_attention", "kv_shared", "attention_sink"):
            assert not own.get(f"enable_{off}", 0), off
        assert own["skip_softmax_scale_factor"] == 0
        packed, pool, lengths, rotary, past, table = given[:6]
        heads, keys, size = own["num_q_heads"], own["num_kv_heads"], own["head_size"]
        qkv = packed.astype(np.float32).reshape(len(packed), heads + 2 * keys, size)
        q, k, v = np.split(qkv, [heads, heads + keys], axis=1)
        if own["enable_qk_norm"]:
            assert own["qk_norm_post_rope"] == 0
            q, k = (_normed(x, gamma, own["rms_norm_eps"]) for x, gamma in zip((q, k), given[6:8], strict=True))
        q, k = (_rotated(x, rotary) for x in (q, k))
        pool = pool.copy()
        out = np.zeros((len(packed), heads, size), np.float32)
        starts = named["query_start_offsets"]
        for number, (new, before) in enumerate(zip(lengths, past, strict=True)):
            rows = slice(starts[number], starts[number] + new)
            at = np.arange(before + new)
            for which, fresh in ((0, k[rows]), (1, v[rows])):
                written = at[before:]
                stored = _as_cached(fresh, own["qkv_scales"][1 + which]) if own["enable_fp8_kv_cache"] else fresh
                pool[which, table[number, which, written // PAGE], written % PAGE] = stored
            seen = [pool[which, table[number, which, at // PAGE], at % PAGE].astype(np.float32) for which in (0, 1)]
            out[rows] = _attend(q[rows], *seen, before, own["attention_scale"], own["sliding_window_size"])
        return out.astype(packed.dtype), pool


def _as_cached(values: Array, scale: float) -> Array:
    stored = np.clip(values / scale, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    return stored.astype(np.float32) * scale


def _attend(q: Array, k: Array, v: Array, before: int, scale: float, window: int) -> Array:
    """Return causal attention [T, H, D] of queries [T, H, D] over keys and values [S, K, D]."""
    k, v = (each.repeat(q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("thd,shd->hts", q, k, optimize=True) * scale
    query, key = before + np.arange(len(q))[:, None], np.arange(len(k))[None]
    hidden = key > query
    if window > 0:
        hidden |= key <= query - window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v, optimize=True)


def _rotated(x: Array, rotary: Array) -> Array:
    half = x.shape[-1] // 2
    cosine, sine = rotary[:, None, :half], rotary[:, None, half:]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _normed(x: Array, gamma: Array, epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * gamma.astype(np.float32)


def _product(x: Array, weight: Array) -> Array:
    return (x.astype(np.float32) @ weight.astype(np.float32)).astype(x.dtype)


def _to_fp4(x: Array, scale: Array) -> tuple[Array, Array]:
    """Return the values [..., I] of FP4 and an FP8 scale of each 16, under the scale of the tensor."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    stored = np.clip(np.abs(groups).max(-1) / 6 / np.float32(scale), 0, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    step = (stored.astype(np.float32) * np.float32(scale))[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step > 0, groups / step, 0).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    return codes.astype(np.float32).reshape(x.shape), stored


def _alike(function: Any) -> Any:
    """Compute in float32, and return the type of the first input."""
    return lambda _own, *x: function(*(each.astype(np.float32) for each in x)).astype(x[0].dtype)


def _reshaped(_own: Any, x: Array, shape: Array) -> Array:
    return x.reshape([int(each) for each in shape])


_ONNX: dict[str, Any] = {
    "Shape": lambda own, x: np.array(x.shape[own.get("start", 0) : own.get("end")], np.int64),
    "Unsqueeze": lambda _own, x, axes: np.expand_dims(x, tuple(int(axis) for axis in axes)),
    "Transpose": lambda own, x: x.transpose(own["perm"]),
    "Concat": lambda own, *x: np.concatenate(x, axis=own["axis"]),
    "QkvConcatPlugin": lambda _own, *x: np.concatenate(x, axis=-1),
    "Reshape": _reshaped,
    "Gather": lambda own, x, at: x.take(at, axis=own.get("axis", 0)),
    "MatMul": lambda _own, x, y: _product(x, y),
    "Gemm": lambda own, x, y: _product(x, y.T if own["transB"] else y),
    "ReduceMean": lambda own, x, axes: x.mean(tuple(int(each) for each in axes), keepdims=bool(own["keepdims"])),
    "Add": _alike(np.add),
    "Mul": _alike(np.multiply),
    "Pow": _alike(np.power),
    "Tanh": _alike(np.tanh),
    "Sqrt": _alike(np.sqrt),
    "Reciprocal": _alike(np.reciprocal),
    "Sigmoid": _alike(lambda x: 1 / (1 + np.exp(-x))),
}
"""ONNX's operators, as far as the graphs have them."""
