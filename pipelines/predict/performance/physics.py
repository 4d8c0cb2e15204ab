"""Compute the seconds of one engine iteration from the dimensions of a model and the data sheet of a GPU.

Every coefficient of `simulator.cost.IterationCost` is either a quantity of the model (FLOPs, bytes) over a rate of
the GPU times an efficiency, or a host time; the efficiencies and host times are the fitted parameters. All values
are for one rank; H = hidden, L = layers, d = head_dim:

    token_compute     2 W_active / (tp e_c peak(format))           row_compute   2 W_head / (tp e_c peak(16 bit))
    weights           bytes of W / (tp e_m BW)                     head_weights  bytes of the head / (tp e_m BW)
    prefill_attention 4 L heads d / (tp e_a peak(16 bit))          kv_token      KV bytes / (tp_kv e_k BW)
    token             H L 4 act / BW   + [tp > 1] 2 L 2 (tp - 1) / tp 2 H / (e_l link)
    fixed             t0 + t_layer L   + [tp > 1] 2 L a   + streamed bytes of W / host link
    sequence, prefill t_seq, t_prefill

Works on numbers and on numpy arrays of equal length, so that fitting and predicting use the same formula.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.predict.performance.gpus import GpuSpec
from pipelines.predict.performance.memory import USUAL_GROUP
from pipelines.predict.simulator.run import IterationCost

FILE = Path(__file__).parent / "parameters.json"
BOUNDS = {
    "e_c": (0.05, 1.0), "e_m": (0.1, 1.0), "e_a": (0.02, 1.0), "e_k": (0.05, 1.0), "e_d": (0.002, 1.0),
    "e_l": (0.05, 1.0), "a": (1e-06, 3e-05), "c_act": (0.5, 100.0), "knee": (1.5, 8.0), "t0": (1e-05, 0.02),
    "t_layer": (1e-06, 0.0005), "t_seq": (1e-07, 0.0005), "t_prefill": (1e-06, 0.03), "sparse_compute": (1.0, 2.0),
    "sparse_knee": (1.2, 8.0), "kv_share": (0.3, 1.3), "slots": (32.0, 8192.0), "overhead_s": (0.0001, 0.5),
    "client_delay": (0.0001, 0.5),
}  # fmt: skip
"""Physical bounds of every parameter; no efficiency is above 1. What each one is: scripts/published_fit/priors.py."""


@dataclass(frozen=True)
class Parameters:
    """Parameter values of the model.

    Attributes:
        shared: shared values by name.
        offsets: by name and label, added to the logarithm.
        document: the whole file, with intervals, fitted data and errors.
    """

    shared: Mapping[str, float]
    offsets: Mapping[str, Mapping[str, float]]
    document: Mapping[str, Any]

    @classmethod
    @cache
    def load(cls) -> Parameters:
        """Read the bundled file, which scripts/published_fit writes."""
        document = json.loads(FILE.read_text(encoding="utf-8"))
        entries = document["parameters"]
        shared = {name: entry["value"] for name, entry in entries.items()}
        return cls(shared, {name: entry["offsets"] for name, entry in entries.items()}, document)

    def values(self, labels: Iterable[str]) -> dict[str, float]:
        """Return every parameter for a setup, within its bounds."""
        names, values = tuple(labels), dict[str, float]()
        for name, (low, high) in BOUNDS.items():
            offsets = self.offsets.get(name, {})
            logarithm = math.log(self.shared[name]) + sum(offsets.get(label, 0.0) for label in names)
            values[name] = min(high, max(low, math.exp(logarithm)))
        return values

    def knows(self, label: str, configurations: int = 1) -> bool:
        """Return whether at least so many configurations with this label were measured."""
        return bool(self.document.get("labels", {}).get(label, 0) >= configurations)


SPARSE_BYTES = {16: 0.5625, 8: 0.625, 4: 0.75}
"""Bytes of 2:4-sparse weights over dense ones: half the values, and 2 bits of position for each remaining value."""
BLOCK_LATENCIES = 2
"""All-reduces per layer: after attention and after the MLP."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the formula for a model on GPUs. Numbers, or numpy arrays of equal length.

    Attributes:
        token_flops: FLOPs of the linears, per token, one rank.
        row_flops: FLOPs of the output head, per row.
        weight_bytes: bytes of the linears, one rank.
        head_bytes: bytes of the output head, one rank.
        attention_flops: FLOPs of prompt attention, per (query x context) token, one rank.
        kv_bytes: per KV token read, layers with full attention.
        kv_window_bytes: the same, layers with a sliding window.
        token_bytes: bytes of activations, per token, at c_act = 1.
        reduce_bytes: bytes sent in all-reduces, per token.
        reduces: number of all-reduces in an iteration.
        peak: FLOP/s of the linears' format.
        peak16: FLOP/s at 16 bit.
        bandwidth: bandwidth of GPU memory, bytes/s.
        link: bandwidth between GPUs, bytes/s in one direction.
        host_seconds: to stream the weights that stay in the host's memory; nothing else is assumed to hide it.
        layers: number of decoder layers.
        sparse: 1 with 2:4 sparsity, else 0.
        sparse_most: data-sheet rate with 2:4 sparsity over the dense one.
        dense_share: share of the weights that every token uses.
        expert_share: experts per token / experts.
        windowed: share of the layers with a sliding window.
        window: size of that window, tokens.
    """

    token_flops: Any
    row_flops: Any
    weight_bytes: Any
    head_bytes: Any
    attention_flops: Any
    kv_bytes: Any
    kv_window_bytes: Any
    token_bytes: Any
    reduce_bytes: Any
    reduces: Any
    peak: Any
    peak16: Any
    bandwidth: Any
    link: Any
    host_seconds: Any
    layers: Any
    sparse: Any
    sparse_most: Any
    dense_share: Any
    expert_share: Any
    windowed: Any
    window: Any


def facts(
    model: ModelShape, gpu: GpuSpec, qformat: QFormat, kv_format: KvFormat, *, tp: int, pp: int, sparse: bool,
    group_size: int = USUAL_GROUP, streamed: float = 0.0,
) -> Facts:  # fmt: skip
    """Compute the quantities of a model on tp x pp GPUs, of which each streams `streamed` bytes from its host.

    The stages of a pipeline work in sequence, so an iteration of one batch costs what the whole model costs on tp
    ranks, plus a send per stage; that pp batches are in progress at once is left to the caller.
    """
    form = FORMATS[qformat]
    sparsity = SPARSE_BYTES[form.weights.bits] if sparse else 1.0
    tp_kv = min(tp, model.num_key_value_heads)
    kv_layer = 2 * model.num_key_value_heads * model.head_dim * (2 if kv_format is KvFormat.AUTO else 1) / tp_kv
    windowed = model.window_layers
    attention = model.num_hidden_layers * model.attention_params
    dense_share, bits = attention / model.linear_params, form.bits_in_groups(group_size)
    if qformat is QFormat.NONE and model.published_bits:
        bits = model.published_bits
        dense_share *= 16 / bits
    return Facts(
        token_flops=2 * model.active_params / tp,
        row_flops=2 * model.head_params / tp,
        weight_bytes=model.linear_params * bits / 8 * sparsity / tp,
        head_bytes=2 * model.head_params / tp,
        attention_flops=4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim / tp,
        kv_bytes=kv_layer * (model.num_hidden_layers - windowed),
        kv_window_bytes=kv_layer * windowed,
        token_bytes=4 * model.hidden_size * model.num_hidden_layers,
        reduce_bytes=BLOCK_LATENCIES * model.num_hidden_layers * 2 * (tp - 1) / tp * 2 * model.hidden_size,
        reduces=(BLOCK_LATENCIES * model.num_hidden_layers if tp > 1 else 0) + (pp - 1),
        peak=gpu.peak[form.activation],
        peak16=gpu.peak["16bit"],
        bandwidth=gpu.bandwidth,
        link=gpu.link(tp)[1],
        host_seconds=pp * streamed / gpu.host,
        layers=model.num_hidden_layers,
        sparse=float(sparse),
        sparse_most=gpu.sparse_multiplier,
        dense_share=dense_share if model.num_experts > 1 else 1.0,
        expert_share=model.num_experts_per_token / model.num_experts,
        windowed=windowed / model.num_hidden_layers,
        window=model.sliding_window,
    )


def iteration_cost(facts: Facts, values: Mapping[str, Any]) -> IterationCost:
    """Compute the coefficients of an iteration from parameters by name (`BOUNDS`)."""
    memory = values["e_m"] * facts.bandwidth
    faster = np.minimum(values["sparse_compute"], facts.sparse_most)
    compute = values["e_c"] * facts.peak * (1 + facts.sparse * (faster - 1))
    decode = facts.attention_flops / (values["e_d"] * facts.peak16)
    links = facts.reduce_bytes / (values["e_l"] * facts.link)
    return IterationCost(
        token_compute=facts.token_flops / compute,
        row_compute=facts.row_flops / (values["e_c"] * facts.peak16),
        weights=facts.weight_bytes / memory,
        head_weights=facts.head_bytes / memory,
        knee=values["knee"] + facts.sparse * (values["sparse_knee"] - values["knee"]),
        dense_share=facts.dense_share,
        expert_share=facts.expert_share,
        prefill_attention=facts.attention_flops / (values["e_a"] * facts.peak16),
        kv_token=facts.kv_bytes / (values["e_k"] * facts.bandwidth) + (1 - facts.windowed) * decode,
        kv_window_token=facts.kv_window_bytes / (values["e_k"] * facts.bandwidth) + facts.windowed * decode,
        window=facts.window,
        token=facts.token_bytes * values["c_act"] / facts.bandwidth + links,
        fixed=values["t0"] + values["t_layer"] * facts.layers + values["a"] * facts.reduces + facts.host_seconds,
        sequence=values["t_seq"],
        prefill=values["t_prefill"],
    )
