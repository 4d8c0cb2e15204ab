"""Compute the seconds of one engine iteration from the dimensions of a model and the data sheet of a GPU.

Every coefficient of `simulator.cost.IterationCost` is either a quantity of the model (FLOPs, bytes) over a rate of
the GPU times an efficiency, or a host time; the efficiencies and host times are the fitted parameters. All values
are for one rank; H = hidden, L = layers, d = head_dim:

    token_compute     2 W_active / (tp e_c peak(format))           row_compute   2 W_head / (tp e_c peak(16 bit))
    weights           bytes of W / (tp e_m BW)                     head_weights  bytes of the head / (tp e_m BW)
    prefill_attention 4 L heads d / (tp e_a peak(16 bit))          kv_token      KV bytes / (tp_kv e_k BW)
    token             (H L 4 act + expert activations) / BW   + [tp > 1] 2 L 2 (tp - 1) / tp 2 H / (e_l link)
    fixed             t0 + t_layer L   + [tp > 1] 2 L a   + streamed bytes of W / host link
    padding           2 W_experts tile / 2 / (tp e_c peak(format))
    sequence          t_seq                                       prompts           t_eager L_experts
    beside            max(prefill_attention tile - kv_token, 0)

With attention data parallelism a rank works on requests of its own: attention, common MLPs and head are whole on it
(no tp), its tokens pass through as many experts as alone, the tokens of all ranks share the reads of the experts, and
instead of all-reduces its tokens are gathered and their results scattered, in each layer with experts. With all-to-all
kernels a token goes to those ranks alone that hold one of its k experts, (tp - 1) (1 - (1 - 1 / tp)^k) of the others.

TensorRT-LLM's PyTorch backend replays CUDA graphs only for iterations without prompts; in the others the host launches
the many kernels of layers with experts one by one, which takes t_eager more.

FlashAttention 2 packs the query heads of a decoding request into a tile only if no prompt is in the batch. Beside
prompts each head is a tile of its own, whose rows cost as much as those of a prompt (vllm-project/flash-attention,
`seqlenq_ngroups_swapped`).

Latent attention (MLA) reads one vector for all heads, so that its products, heads (d_k + d_v), count like those of
prompts and not like those of a few heads per vector; the products or the reads are its cost, whichever takes longer.

Works on numbers and on numpy arrays of equal length, so that fitting and predicting use the same formula.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

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
    "t_layer": (1e-06, 0.0005), "t_seq": (1e-07, 0.0005), "kv_share": (0.3, 1.3),
    "slots": (32.0, 8192.0), "overhead_s": (0.0001, 0.5),
    "client_delay": (0.0001, 0.5), "c_expert": (0.01, 20.0), "tile": (1.0, 256.0), "t_eager": (1e-9, 0.002),
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
    def load(cls) -> Self:
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


SPARSE_COMPUTE, SPARSE_KNEE = 1.27, 1.75
"""FLOP/s with 2:4 sparsity over dense ones, and the knee, because such kernels hide less of their reads. No row of the
fit is sparse; with these, NVIDIA's speed-ups of Llama 2 70B come out (TensorRT-Model-Optimizer, benchmark.md)."""
SPARSE_BYTES = {16: 0.5625, 8: 0.625, 4: 0.75}
"""Bytes of 2:4-sparse weights over dense ones: half the values, and 2 bits of position for each remaining value."""
ACTIVATION_BYTES = {"16bit": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625}
"""Bytes of an activation as it is sent to the rank of its experts; of FP4 with the scale of 16."""
BLOCK_LATENCIES = 2
"""All-reduces per layer: after attention and after the MLP."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the formula for a model on GPUs. Numbers, or numpy arrays of equal length.

    Attributes:
        token_flops: FLOPs of the linears, per token, one rank; those in 16 bit count by the ratio of the peaks.
        row_flops: FLOPs of the output head, per row.
        weight_bytes: bytes of the linears, one rank.
        head_bytes: bytes of the output head, one rank.
        attention_flops: FLOPs of prompt attention, per (query x context) token, one rank, all layers.
        latent_flops: FLOPs of decoding per latent vector read, one rank; 0 without latent attention.
        kv_bytes: per KV token read, layers with full attention.
        kv_window_bytes: the same, layers with a sliding window.
        token_bytes: bytes of activations, per token, at c_act = 1.
        reduce_bytes: bytes sent in all-reduces, per token.
        peak: FLOP/s of the linears' format.
        peak16: FLOP/s at 16 bit.
        bandwidth: bandwidth of GPU memory, bytes/s.
        link: bandwidth between GPUs, bytes/s in one direction.
        host_seconds: to stream the weights that stay in the host's memory; nothing else is assumed to hide it.
        layers: number of decoder layers.
        expert_layers: those with experts; of a dense model all.
        sparse: 1 with 2:4 sparsity, else 0.
        sparse_most: data-sheet rate with 2:4 sparsity over the dense one.
        dense_share: share of the weights that every token uses.
        expert_share: experts per token / experts; of one token on each rank with attention data parallelism.
        expert_flops: FLOPs of all experts of one rank, per row.
        expert_bytes: bytes of activations of a token's experts, one rank, at c_expert = 1.
        windowed: share of the layers with a sliding window.
        window: size of that window, tokens; of chunks, what half of one has, which a token of a prompt sees on average.
        chunk: size of such a chunk, tokens; 0 means none.
        tile: rows of a tile that a query head of a decoding request fills beside prompts; 0 where heads are packed.
    """

    token_flops: Any
    row_flops: Any
    weight_bytes: Any
    head_bytes: Any
    attention_flops: Any
    latent_flops: Any
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
    expert_layers: Any
    sparse: Any
    sparse_most: Any
    dense_share: Any
    expert_share: Any
    expert_flops: Any
    expert_bytes: Any
    windowed: Any
    window: Any
    chunk: Any
    tile: Any


def facts(
    model: ModelShape, gpu: GpuSpec, qformat: QFormat, kv_format: KvFormat, *, tp: int, pp: int, sparse: bool,
    group_size: int = USUAL_GROUP, streamed: float = 0.0, attention_dp: bool = False, all_to_all: bool = False,
    tile: int = 0,
) -> Facts:  # fmt: skip
    """Compute the quantities of a model on tp x pp GPUs, of which each streams `streamed` bytes from its host.

    The stages of a pipeline work in sequence, so an iteration of one batch costs what the whole model costs on tp
    ranks, plus a send per stage; that pp batches, and with attention data parallelism tp ranks, work at the same time
    is left to the caller.
    """
    form = FORMATS[qformat]
    sparsity = SPARSE_BYTES[form.weights.bits] if sparse else 1.0
    split = 1 if attention_dp else tp
    activation = expert_activation(model, gpu, qformat)
    peak, peak16 = gpu.peak[activation], gpu.peak["16bit"]
    common_bits, bits = model.stored_bits(qformat, form.bits_in_groups(group_size))
    common = model.common_params * common_bits / split
    routed = model.routed_params * bits / tp
    in_16_bit = model.params_in_16_bit(qformat)
    windowed, layers, mixed = model.window_layers, model.num_hidden_layers, model.expert_layers
    passed = mixed * model.num_experts_per_token
    kv_width = model.kv_width if model.latent else model.kv_width / min(split, model.num_key_value_heads)
    kv_layer = kv_width * (2 if kv_format is KvFormat.AUTO else 1)
    gathered = 2.0 if model.in_16_bit.get(qformat) == "blocks" else ACTIVATION_BYTES[activation]
    reducing = mixed if attention_dp else layers
    reached = 1 - (1 - 1 / tp) ** model.num_experts_per_token if all_to_all else 1.0
    sent = reached * (tp - 1) * (gathered + 2) if attention_dp else BLOCK_LATENCIES * 2 * (tp - 1) / tp * 2
    share = model.num_experts_per_token / model.num_experts
    return Facts(
        token_flops=2 * (model.active_params - in_16_bit + in_16_bit * peak / peak16) / split,
        row_flops=2 * model.head_params / split,
        weight_bytes=(common + routed) / 8 * sparsity,
        head_bytes=2 * model.head_params / split,
        attention_flops=2 * layers * model.num_attention_heads * model.score_width / split,
        latent_flops=2 * layers * model.num_attention_heads * model.latent_width / split,
        kv_bytes=kv_layer * (layers - windowed),
        kv_window_bytes=kv_layer * windowed,
        token_bytes=4 * model.hidden_size * layers,
        reduce_bytes=sent * reducing * model.hidden_size,
        reduces=(BLOCK_LATENCIES * reducing if tp > 1 else 0) + (pp - 1),
        peak=peak,
        peak16=peak16,
        bandwidth=gpu.bandwidth,
        link=gpu.link(tp)[1],
        host_seconds=pp * streamed / gpu.host,
        layers=layers,
        expert_layers=mixed,
        sparse=float(sparse),
        sparse_most=gpu.sparse_multiplier,
        dense_share=common / (common + routed) if model.num_experts > 1 else 1.0,
        expert_share=1 - (1 - share) ** (tp / split),
        expert_flops=2 * model.routed_params / tp if model.num_experts > 1 else 0.0,
        expert_bytes=4 * (model.num_experts > 1) * passed * (model.hidden_size + model.intermediate_size) / split,
        windowed=windowed / layers,
        window=model.sliding_window // 2 if model.chunked else model.sliding_window,
        chunk=model.sliding_window if model.chunked else 0,
        tile=tile,
    )


def expert_activation(model: ModelShape, gpu: GpuSpec, qformat: QFormat) -> str:
    """Return the type of activations that the linears are multiplied in; MXFP4 experts take 8 bit on Blackwell.

    Source: TensorRT-LLM `_torch/models/modeling_gpt_oss.py` (W4A8_MXFP4_MXFP8 from SM 100, W4A16_MXFP4 before).
    """
    if model.mxfp4 and qformat is QFormat.NONE and gpu.sm >= 10.0:
        return "fp8"
    return FORMATS[qformat].activation


def iteration_cost(facts: Facts, values: Mapping[str, Any]) -> IterationCost:
    """Compute the coefficients of an iteration from parameters by name (`BOUNDS`)."""
    memory = values["e_m"] * facts.bandwidth
    faster = np.minimum(SPARSE_COMPUTE, facts.sparse_most)
    compute = values["e_c"] * facts.peak * (1 + facts.sparse * (faster - 1))
    products = values["e_a"] * facts.peak16
    decode = facts.attention_flops / (values["e_d"] * facts.peak16) * (facts.latent_flops == 0)
    reads = values["e_k"] * facts.bandwidth
    links = facts.reduce_bytes / (values["e_l"] * facts.link)
    kv_token = np.maximum(facts.kv_bytes / reads, facts.latent_flops / products) + (1 - facts.windowed) * decode
    prefill_attention = (1 - facts.windowed) * facts.attention_flops / products
    return IterationCost(
        token_compute=facts.token_flops / compute,
        row_compute=facts.row_flops / (values["e_c"] * facts.peak16),
        weights=facts.weight_bytes / memory,
        head_weights=facts.head_bytes / memory,
        knee=values["knee"] + facts.sparse * (SPARSE_KNEE - values["knee"]),
        dense_share=facts.dense_share,
        expert_share=facts.expert_share,
        prefill_attention=prefill_attention,
        kv_token=kv_token,
        kv_window_token=facts.kv_window_bytes / reads + facts.windowed * decode,
        window=facts.window,
        chunk=facts.chunk,
        token=(facts.token_bytes * values["c_act"] + facts.expert_bytes * values["c_expert"]) / facts.bandwidth + links,
        fixed=values["t0"] + values["t_layer"] * facts.layers + values["a"] * facts.reduces + facts.host_seconds,
        sequence=values["t_seq"],
        prompts=values["t_eager"] * facts.expert_layers,
        prefill_window=facts.windowed * facts.attention_flops / products,
        padding=facts.expert_flops * values["tile"] / 2 / compute,
        beside=np.maximum(facts.tile * prefill_attention - kv_token, 0.0),
    )
