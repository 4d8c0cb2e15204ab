"""Resident memory of the CPU engine's process at full load, before it is built (modelled).

    process + weights + KV pool + activations + compiled kernels

This is the resident set size (RSS) of the process that holds the engine, once it has run iterations of max_num_tokens
and of as many other numbers of tokens as it keeps compiled kernels for, and has filled its KV pool; all of this stays
resident from then on. Mapped pages of libraries and of the engine file count too, although the kernel may drop them
when memory is short. With Triton's python backend the figure is the same as with a separate process within 1 MiB;
the server's other processes are not counted.

The constants are measured (OpenVINO 2026.4.1, x86-64, one and two threads; their number does not matter) on random
Llamas of 15 to 90 M parameters, varied one size at a time: docs/decisions/0015-knowing-the-machine.md. What a
format costs is in its row of `pipelines.domain.formats`; formats that were not measured have no costs there. Other
processors have other kernels: in float32, fp8 and int4_awq engines were up to 27 % smaller on a Xeon without bf16, and
those of bf16 are a quarter larger on one with AMX, whose figure is taken. What is needed in addition without AVX-512 or
without bf16 is counted there.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipelines.checkpoint.llava import VisionShape
from pipelines.domain.errors import Fault
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import GIB, MIB
from pipelines.engines.config import OpenVinoSettings
from pipelines.host.machine import has_amx, has_vnni, native_bf16

# Blocks of the KV cache, and the attention windows that the engine supports.

KV_BLOCK_TOKENS = 32
"""Tokens of one paged KV block on the CPU plugin; not configurable there. Source: openvinotoolkit/openvino
`src/plugins/intel_cpu`."""
LEAST_WINDOW_BLOCKS = 3
"""The engine drops blocks between the first and the last, so there must be one of each."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens that a sequence keeps while it generates; multiples of a block.

    Attributes:
        start: tokens at the beginning, never dropped.
        recent: tokens at the end, never dropped.
        total: all tokens kept; between the two, blocks that received little attention are dropped.
    """

    start: int
    recent: int
    total: int

    def blocks_at_most(self, prompt: int, new: int) -> int:
        """Return the most blocks a sequence holds: a prompt is computed with full attention before any are dropped."""
        everything = blocks_of(prompt + new)
        return min(everything, max(blocks_of(prompt), blocks_of(self.total)) + 1)


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that a number of tokens fills, the last one perhaps partially."""
    return -(-tokens // KV_BLOCK_TOKENS)


def least_window(sinks: int) -> int:
    """Return the smallest window for a number of sinks: 96 without sinks, as at least one block of sinks is kept."""
    return _start(sinks) + (LEAST_WINDOW_BLOCKS - 1) * KV_BLOCK_TOKENS


def nearest_window(window: int, sinks: int) -> int:
    """Return the window if the engine can keep exactly as many tokens, otherwise the nearest possible: 100 -> 96."""
    return max(least_window(sinks), window // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)


def eviction(window: int, sinks: int) -> Eviction:
    """Return the tokens kept with a window that the engine supports."""
    start = _start(sinks)
    return Eviction(start, window - start - KV_BLOCK_TOKENS, window)


def _start(sinks: int) -> int:
    return max(1, blocks_of(sinks)) * KV_BLOCK_TOKENS


Precision = Literal["f32", "bf16"]

USUAL_REQUESTS = 32
"""Requests of max_seq_len tokens that fit into the paged KV cache if its size is not given."""
ELEMENT_BITS = {"f32": 32, "bf16": 16, "f16": 16, "u8": 8, "u4": 4}
SCALE_BYTES = 8
"""Bytes of a float32 scale and zero point: for keys per channel and block, for values per token and head."""

KERNEL_CACHE = 512
"""Entries in each of the plugin's caches of compiled kernels. Every number of tokens in an iteration has its own;
unbounded, a server whose prompts differ in length grows by 0.8 MiB with each new number (tiny_gemma, INT4)."""

PROCESS = 45 * MIB
"""Python with OpenVINO (34 MiB), and what the first inference allocates for any model (11 MiB)."""
LIBRARIES = 78 * MIB
"""Mapped pages of Python, OpenVINO and its kernels."""
HEAD, EMBEDDING, F32 = 2, 2, 4
"""Bytes per weight of the output head's packed copy, of the 16-bit embedding in the engine file, which is mapped, and
of the prompt table there."""
EXPERT_ROWS = 1.7
"""Buffers that experts keep, per row of an iteration of max_num_tokens; 1.4 to 1.9 were measured, and once 0.5."""
LORA_COPIES, LORA_OUTPUTS = 2, 3
"""Copies in float32 of an adapter's matrices that are no mapped pages (the one that was read, and the plugin's), and of
the outputs of Q, K and V. Measured in float32, on adapters of all linears and of those of the attention."""


@dataclass(frozen=True, slots=True)
class CpuSizes:
    """Sizes that determine how much memory the CPU engine needs.

    Attributes:
        qformat: format of weights and activations.
        candidates: for `auto`: formats that a linear may get.
        avx512: whether the processor has it; without it, float32 arithmetic packs some weights twice.
        bf16: whether the processor computes in bf16 natively; without it, float32 kernels are others.
        int8_head: whether the output head is in INT8.
        grouped_experts: whether one product is for all experts of a mixture.
        kv_precision: storage type of the KV cache.
        max_seq_len: longest prompt + output, tokens.
        kv_cache_bytes: given size of the KV pool, or None for the default.
        iterations: number of distinct token counts of iterations; None means every possible one.
    """

    shape: ModelShape
    qformat: QFormat
    precision: Precision
    kv_precision: str
    max_num_tokens: int
    max_seq_len: int
    kv_cache_bytes: int | None = None
    iterations: int | None = None
    candidates: tuple[QFormat, ...] = ()
    avx512: bool = True
    bf16: bool = True
    table_rows: int = 0
    int8_head: bool = False
    grouped_experts: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the paged KV cache."""
        shape = self.shape
        layers, heads = shape.num_hidden_layers, shape.num_key_value_heads
        return kv_block_bytes(layers, heads, shape.head_dim, precision=self.kv_precision)


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """Memory of the engine's process by use, bytes (modelled).

    Attributes:
        process: Python, OpenVINO and the graph.
        weights: the plugin's copies.
        kv_pool: paged KV cache, all blocks used once.
        activations: activations of an iteration of max_num_tokens.
        kernels: compiled kernels for every number of tokens, as many as the plugin keeps.
        mapped: pages of libraries and of the engine file.
    """

    process: float
    weights: float
    kv_pool: float
    activations: float
    kernels: float
    mapped: float
    kv_blocks: int

    @property
    def own(self) -> float:
        """Memory that the kernel cannot reclaim: all but the mapped pages."""
        return self.process + self.weights + self.kv_pool + self.activations + self.kernels

    @property
    def total(self) -> float:
        """Resident memory of the process."""
        return self.own + self.mapped

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.kv_blocks * KV_BLOCK_TOKENS


def kv_block_bytes(layers: int, kv_heads: int, head_size: int, *, precision: str) -> int:
    """Return bytes per block of the paged KV cache: 2 (K, V) x layers x KV heads x 32 tokens x head bytes, and scales.

    Gemma 2B at f32: 2 * 18 * 1 * 32 * 256 * 4 = 1,179,648.
    """
    head_bytes = 2 * KV_BLOCK_TOKENS * head_size * ELEMENT_BITS[precision] // 8
    if precision in ("u8", "u4"):
        head_bytes += SCALE_BYTES * (head_size + KV_BLOCK_TOKENS)
    return layers * kv_heads * head_bytes


def kv_blocks(block_bytes: int, max_seq_len: int, kv_cache_bytes: int | None) -> int:
    """Return the number of blocks in the paged KV cache.

    Args:
        block_bytes: size of one block.
        max_seq_len: longest prompt + output, tokens.
        kv_cache_bytes: requested size; None means room for 32 requests of max_seq_len tokens, but at most 1 GiB and at
            least one request.
    """
    if kv_cache_bytes is not None:
        return kv_cache_bytes // block_bytes
    one_request = blocks_of(max_seq_len)
    return max(one_request, min(USUAL_REQUESTS * one_request, GIB // block_bytes))


def cpu_memory(sizes: CpuSizes) -> CpuMemory | None:
    """Return the resident memory of the engine's process at full load; None for a format that was not measured.

    A mix of formats takes at most what the largest of its candidates takes, or 16 bit, which is always a choice.
    """
    if sizes.candidates:
        alone = [cpu_memory(replace(sizes, qformat=each, candidates=())) for each in (QFormat.NONE, *sizes.candidates)]
        measured = [memory for memory in alone if memory is not None]
        return max(measured, key=lambda memory: memory.total) if len(measured) == len(alone) else None
    cost = FORMATS[sizes.qformat].cpu
    if cost is None:
        return None
    shape, wide = sizes.shape, sizes.precision == "f32"
    table, head = shape.vocab_size * shape.hidden_size, HEAD // 2 if sizes.int8_head else HEAD
    stored = 0 if shape.tie_word_embeddings and not sizes.int8_head else head
    blocks = kv_blocks(sizes.block_bytes, sizes.max_seq_len, sizes.kv_cache_bytes)
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    channels = (shape.intermediate_size, shape.hidden_size, queries, keys)
    per_token = sum(each * count for each, count in zip(cost.token, channels, strict=True))
    per_token *= cost.f32_factor if wide else 1
    linear, kernels = (cost.f32_linear, cost.f32_kernels) if wide else (cost.linear, cost.kernels)
    if wide and not sizes.avx512:
        linear *= cost.avx2_copies
    if wide and not sizes.bf16:
        kernels = cost.kernels_without_bf16 or kernels
    different = sizes.max_num_tokens if sizes.iterations is None else sizes.iterations
    each_has = 1 + (len(set(shape.linear_shapes.values())) if kernels.linears else 0)
    return CpuMemory(
        process=PROCESS + cost.layer * shape.num_hidden_layers,
        weights=linear * shape.linear_params + head * table,
        kv_pool=blocks * sizes.block_bytes,
        activations=sizes.max_num_tokens * per_token + _expert_rows(sizes),
        kernels=min(KERNEL_CACHE, different * each_has) * kernels.size,
        mapped=LIBRARIES
        + cost.mapped * shape.linear_params
        + (EMBEDDING + stored) * table
        + F32 * sizes.table_rows * shape.hidden_size,
        kv_blocks=blocks,
    )


def _expert_rows(sizes: CpuSizes) -> float:
    """Return the bytes of the rows that experts multiply: those of a layer if grouped, else of all layers.

    Products of each expert have buffers of their own, which stay as large as the most rows that they ever had.
    """
    shape = sizes.shape
    if shape.num_experts == 1:
        return 0
    channels = 2 * shape.hidden_size + 3 * shape.intermediate_size  # in and out, and up, gate and their product
    row = channels * ELEMENT_BITS[sizes.precision] // 8
    rows = sizes.max_num_tokens * shape.num_experts_per_token
    return EXPERT_ROWS * rows * row * (1 if sizes.grouped_experts else shape.num_hidden_layers)


def in_same_process(memory: CpuMemory) -> CpuMemory:
    """Return what a model takes in a process that has loaded one already: Python and the libraries are there."""
    return replace(memory, process=memory.process - PROCESS, mapped=memory.mapped - LIBRARIES)


def adapter_memory(sizes: CpuSizes, matrices: float) -> CpuMemory | None:
    """Return what a LoRA adapter takes in the engine's process: the model is loaded again, with the adapter's branches.

    Args:
        sizes: of the engine.
        matrices: bytes of the adapter's matrices in float32.
    """
    memory = cpu_memory(sizes)
    if memory is None:
        return None
    shape, memory = sizes.shape, in_same_process(memory)
    outputs = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    per_token = LORA_OUTPUTS * outputs * ELEMENT_BITS[sizes.precision] // 8
    return replace(
        memory,
        weights=memory.weights + LORA_COPIES * matrices,
        activations=memory.activations + sizes.max_num_tokens * per_token,
        mapped=memory.mapped + matrices,
    )


def loaded_for_logits(sizes: CpuSizes) -> float | None:
    """Return the bytes of the model that requests for logits share; None for a format that was not measured, or a mix.

    It is loaded beside the paged pipeline, with the first of them. Each also holds its KV state and activations, which
    are not counted. In float32, 0.94 (int4_wo) and 1.02 (none) of it were seen with a Llama of 88 M parameters.
    """
    cost, shape = FORMATS[sizes.qformat].cpu, sizes.shape
    if cost is None or sizes.candidates:
        return None
    head = (HEAD // 2 if sizes.int8_head else HEAD) * shape.vocab_size * shape.hidden_size
    return cost.layer * shape.num_hidden_layers + cost.linear * shape.linear_params + head


def vision_memory(encoder: VisionShape, precision: Precision) -> CpuMemory:
    """Return the resident memory of the process of a vision encoder, which encodes the tiles of one picture at a time.

    In float32 within 5 % of random CLIPs of 2, 8 and 24 layers, without tiles and with five; bf16 was not measured.
    """
    return CpuMemory(
        process=PROCESS,
        weights=encoder.weight_bytes * ELEMENT_BITS[precision] / 16,
        kv_pool=0,
        activations=encoder.activation_bytes(1),
        kernels=0,
        mapped=LIBRARIES + encoder.weight_bytes,
        kv_blocks=0,
    )


def inference_precision(options: OpenVinoSettings) -> Precision:
    """Return the configured type, or what this processor computes natively."""
    if options.inference_precision != "auto":
        return options.inference_precision
    return "bf16" if native_bf16() else "f32"


def usual_kv_precision(options: OpenVinoSettings) -> str:
    """Return the storage type of an unquantized KV cache: 16 bits, unless the arithmetic was asked for by name.

    f16 halves the cache of a processor without bf16, and with it what attention reads. Where bf16 is emulated,
    attention takes float32 alone.
    """
    if options.inference_precision == "auto":
        return "bf16" if native_bf16() else "f16"
    return "bf16" if options.inference_precision == "bf16" and native_bf16() else "f32"


def kv_fault(options: OpenVinoSettings) -> Fault | None:
    """Return why this processor's attention cannot use the KV cache that was asked for; None if it can."""
    precision, arithmetic = options.kv_cache_precision, inference_precision(options)
    own = arithmetic if native_bf16() else "f32"
    usable = ("auto", own, *(("f16",) if own == arithmetic else ()), "u8", "u4")
    if precision in usable:
        return None
    what = f"engine.openvino.kv_cache_precision={precision} does not go with inference_precision="
    return Fault(f"{what}{options.inference_precision} on this processor.", f"Here: {', '.join(usable)}.")


SPREAD = 4
"""Experts per expert that a token goes through, up to which one product for all is faster (docs/benchmarks.md)."""
NEEDS_AMX = "needs a processor with AMX and arithmetic in bf16; elsewhere it takes up to ten times as long."


def multiplies_tiles(options: OpenVinoSettings) -> bool:
    """Return whether the plugin multiplies in tiles of bf16 here, also the rows of experts in one product for all."""
    return has_amx() and inference_precision(options) == "bf16"


def groups_experts(options: OpenVinoSettings, shape: ModelShape | None, qformat: QFormat) -> bool:
    """Return whether an engine is built with one product for all experts.

    One product for all pads the rows of each expert to the number of tokens, so prompts take longer the more experts
    there are for each one that a token goes through. Of a model on the Hub that may not be known.
    """
    few = shape is not None and 1 < shape.num_experts <= SPREAD * shape.num_experts_per_token
    faster = few and FORMATS[qformat].activation == "16bit" and multiplies_tiles(options)
    return options.experts == "grouped" or (options.experts == "auto" and faster)


def experts_fault(options: OpenVinoSettings, shape: ModelShape, qformat: QFormat) -> Fault | None:
    """Return why experts cannot be multiplied as asked; None if they can."""
    if options.experts != "grouped":
        return None
    what, todo = "engine.openvino.experts=grouped", "Leave it out."
    if shape.num_experts == 1:
        return Fault(f"{what} needs a mixture of experts; {shape.architecture} is none.", todo=todo)
    if FORMATS[qformat].activation != "16bit":
        return Fault(f"{what} does not go with quant={qformat}: its experts round activations.", todo=todo)
    return None if multiplies_tiles(options) else Fault(f"{what} {NEEDS_AMX}", todo=todo)


def elsewhere_fault(engine: Path | None, options: OpenVinoSettings) -> Fault | None:
    """Return why an engine with one product for all experts is not run here; None if it can be."""
    if multiplies_tiles(options):
        return None
    again = "Build the engine again here, or with engine.openvino.experts=separate."
    arithmetic = f"Leave out engine.openvino.inference_precision={options.inference_precision}."
    what = f"{engine} was built with one product for all experts, which {NEEDS_AMX}"
    return Fault(what, todo=arithmetic if has_amx() else again)


def rounds_activations(options: OpenVinoSettings) -> bool:
    """Return whether the plugin rounds activations to INT8 here, where it is asked to.

    It does so with VNNI, and with activations that reach a linear in float32: with AMX they reach it in bf16 if that is
    the inference precision (useDynamicQuantizationImpl in OpenVINO's dnnl_fullyconnected_primitive.cpp). On such a
    processor logits were the same bits with and without it.
    """
    return has_vnni() and not multiplies_tiles(options)


def unheard(options: OpenVinoSettings) -> str:
    """Say that a number for `dynamic_quantization` has no effect on this processor; empty if it has."""
    group = options.dynamic_quantization
    if group in ("auto", "off") or rounds_activations(options):
        return ""
    why = "it has AMX and computes in bf16" if has_vnni() else "it has no VNNI"
    return f"engine.openvino.dynamic_quantization={group} has no effect on this processor: {why}."
