"""Bytes that a TensorRT-LLM engine takes on each GPU, before it is built (modelled).

    weights + activations + buffers + CUDA itself + KV pool,   KV pool = min(max_tokens, fraction x what is left)

Source: TensorRT-LLM `docs/source/legacy/reference/memory.md`. The unknowns (bytes of activation per token, bytes of
buffer per request, CUDA's own share) are fitted to published logs: `tests/reference/published_logs.json` has them with
their sources, and a test compares the formulas with each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.checkpoint.llava import VisionShape
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import MIB

LAYER_FACTOR = 1.3
"""Peak activation memory within a layer, in units of all its outputs at 16 bit; published logs: 1.12 to 1.44."""
HEAD_BYTES = 9
"""Bytes per token and hidden channel that are live besides the logits; published logs: 13.0, less than 9.8."""
BUFFER_LOGITS = 9
"""Float32 rows of the vocabulary that runtime and decoder hold per request; published logs (0.12, 0.14): 7.3, 11.2."""
CUDA_BYTES = 800 * MIB
"""Memory of a GPU taken by CUDA, its libraries and NCCL; published log: 0.77 GiB."""
USUAL_GROUP = 128
"""Input channels that share a scale unless the settings say otherwise."""
SMALL_BATCH, SMALL_TOKENS = 256, 2048
"""Limits proposed when an engine does not fit."""
ROPE_ENTRY_BYTES = 4
"""Bytes of an entry of the rotary table (max_position_embeddings x head_dim), part of the weights since 0.9."""


def weight_bytes(shape: ModelShape, qformat: QFormat, mean_bits: float | None = None) -> float:
    """Return the bytes of all weights, not split.

    Linears take the format's bits plus their group scales (16 bit; NVFP4's are 8 bit); embedding, head and norms
    stay at 16 bit. Llama-3-8B at 16 bit: 2 x 8,030,261,248 = 16.06 GB; int4_awq: 6,979,321,856 linear weights
    x (4 + 16/128) bit = 3.60 GB + 2 x 1,050,939,392 = 5.70 GB.
    """
    bits = mean_bits or FORMATS[qformat].linear_bits
    return shape.linear_params * bits / 8 + 2 * (shape.num_params - shape.linear_params)


def checkpoint_bytes(shape: ModelShape, qformat: QFormat, mean_bits: float | None = None) -> float:
    """Return the bytes of the checkpoint on disk: as on the device, but weight-only formats are stored at 16 bit."""
    return weight_bytes(shape, QFormat.NONE if FORMATS[qformat].weights.at_build else qformat, mean_bits)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Quantities that determine how much memory each GPU needs, under the names of trtllm-build and Triton.

    Attributes:
        qformat: format of weights and activations.
        kv_format: element type of the KV cache.
        group_size: input channels asked to share a scale; formats without a choice take their own.
        mean_bits: of a weight in a mix of formats, with scales; None for a single format.
        tp_size: tensor parallel ranks.
        attention_dp: whether each of these ranks has the whole attention, for requests of its own, and shares only the
            experts with the others.
        pp_size: pipeline parallel ranks.
        max_batch_size: requests scheduled together.
        max_seq_len: longest prompt + output, tokens.
        tokens_per_block: tokens per block of the paged KV cache.
        user_buffers: whether all-reduces are done in buffers of their own (build.user_buffer).
        gather_context_logits: whether the logits of every prompt token are kept.
        parallel_embedding: whether the embedding is split over TP ranks, as ModelOpt exports it.
        gpu_weights_percent: share of the weights that stays on the GPU; the rest is streamed from the host (Triton's
            name, although it is a fraction).
        kv_fraction: share of the remaining memory that the KV pool takes.
        max_kv_tokens: upper bound of the KV pool in tokens, or None.
        windows: attention window per layer, repeated over the layers; empty means none.
        encoder: sizes of a vision encoder on the same GPU, or None.
    """

    shape: ModelShape
    qformat: QFormat
    kv_format: KvFormat = KvFormat.AUTO
    group_size: int = USUAL_GROUP
    mean_bits: float | None = None
    tp_size: int = 1
    attention_dp: bool = False
    pp_size: int = 1
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    max_seq_len: int = 8192
    tokens_per_block: int = 32
    user_buffers: bool = False
    gather_context_logits: bool = False
    parallel_embedding: bool = True
    gpu_weights_percent: float = 1.0
    kv_fraction: float = 0.9
    max_kv_tokens: int | None = None
    windows: tuple[int, ...] = ()
    encoder: VisionShape | None = None

    @property
    def stored_bits(self) -> tuple[float, float]:
        """Bits per weight, with scales, of the linears that every token uses, and of the experts."""
        bits = self.mean_bits or FORMATS[self.qformat].bits_in_groups(self.group_size)
        return self.shape.stored_bits(self.qformat, bits)

    @property
    def attention_tp(self) -> int:
        """Ranks between which attention is split: 1 with attention data parallelism, where each has all of it."""
        return 1 if self.attention_dp else self.tp_size

    @property
    def pools(self) -> int:
        """Parts of the KV cache that hold different requests: one per attention data parallel rank."""
        return self.tp_size // self.attention_tp

    @property
    def lanes(self) -> int:
        """Batches that are in progress at the same time: one per pipeline stage and attention data parallel rank."""
        return self.pp_size * self.pools

    @property
    def layers(self) -> int:
        """Decoder layers of the fullest pipeline stage."""
        return -(-self.shape.num_hidden_layers // self.pp_size)

    @property
    def kv_heads(self) -> int:
        """KV heads of one rank; with fewer heads than TP ranks they are duplicated."""
        return max(1, self.shape.num_key_value_heads // self.attention_tp)

    @property
    def kv_layer_bytes(self) -> float:
        """KV bytes of one token in one layer on one rank: 2 (K, V) x heads x head_dim x bytes.

        A latent vector serves all heads, so that each rank has the whole of it. DeepSeek V3 at 16 bit: 576 x 2.
        """
        width = self.shape.kv_width if self.shape.latent else 2 * self.kv_heads * self.shape.head_dim
        return width * (2 if self.kv_format is KvFormat.AUTO else 1)

    @property
    def kv_token_bytes(self) -> float:
        """KV bytes of one token on one rank. Llama-3.1-8B at 16 bit: 131,072; TP 16: 16,384, as with TP 8."""
        return self.layers * self.kv_layer_bytes

    def kv_request_bytes(self, tokens: int) -> float:
        """KV bytes of a request of this many tokens on one rank, in whole blocks, each layer within its window."""
        windows = self.windows or (tokens,)
        held = (min(tokens, windows[layer % len(windows)]) for layer in range(self.layers))
        block = self.tokens_per_block
        return sum(-(-count // block) * block for count in held) * self.kv_layer_bytes * self.max_beam_width


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Split of one GPU's memory, bytes (modelled).

    Attributes:
        weights: weights of the fullest rank including the rotary table; with weight streaming, those that stay.
        activations: fixed at build time by max_num_tokens.
        buffers: buffers of runtime and decoder, proportional to max_batch_size, and of the all-reduces; the whole of a
            vision encoder.
        cuda: CUDA and its libraries.
        kv_pool: paged KV cache; 0 if nothing is left.
        streamed: weights of the rank that stay on the host and are read from there in every iteration.
    """

    total: float
    weights: float
    activations: float
    buffers: float
    cuda: float
    kv_pool: float
    kv_token_bytes: float
    streamed: float = 0.0

    @property
    def fixed(self) -> float:
        """All memory except the KV pool."""
        return self.weights + self.activations + self.buffers + self.cuda

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return int(self.kv_pool / self.kv_token_bytes)


def device_memory(sizes: EngineSizes, total: float) -> DeviceMemory:
    """Split the memory of one GPU.

    LLaMA-7B at 16 bit with 20,480 tokens of KV cache: 20,480 x 524,288 bytes = 10,240 MiB beside 12,852 MiB of weights.
    With weight streaming the GPU keeps gpu_weights_percent of the weights (`cpp/tensorrt_llm/runtime/tllmRuntime.cpp`:
    the budget is that share of TensorRT's getStreamableWeightsSize). Weights that TensorRT does not stream and its
    scratch memory for streaming are not known before the build, and not counted.
    """
    held, share = rank_weight_bytes(sizes), sizes.gpu_weights_percent
    memory = DeviceMemory(
        total=total,
        weights=share * held,
        streamed=(1 - share) * held,
        activations=activation_bytes(sizes),
        buffers=buffer_bytes(sizes) + user_buffer_bytes(sizes) + encoder_bytes(sizes),
        cuda=CUDA_BYTES,
        kv_pool=0,
        kv_token_bytes=sizes.kv_token_bytes,
    )
    pool = max(0.0, sizes.kv_fraction * (total - memory.fixed))
    if sizes.max_kv_tokens is not None:
        pool = min(pool, sizes.max_kv_tokens * sizes.kv_token_bytes)
    return replace(memory, kv_pool=pool)


def rank_weight_bytes(sizes: EngineSizes) -> float:
    """Return the bytes of the weights on the fullest rank.

    Linears are split over TP, but every rank has at least one KV head; embedding (if parallel) and head are split by
    rows; each pipeline stage has its own layers, the first the embedding and the last the head. Llama-3-8B at 16 bit,
    TP 4, embedding not split, 1,048,576 positions: 5,340,405,760 bytes, exactly what trtllm-build 0.12 logs.
    """
    shape, split = sizes.shape, sizes.attention_tp
    common, expert = sizes.stored_bits
    norms = shape.hidden_size * shape.norms_per_layer
    table = 2 * shape.vocab_size * shape.hidden_size
    embedding, head = table / (split if sizes.parallel_embedding else 1), table / split
    held = (embedding,) if shape.tie_word_embeddings else (embedding, head)
    ends = max(embedding, head) if sizes.pp_size > 1 else sum(held)
    rotary = shape.latent.rope_dim if shape.latent else shape.head_dim
    rope = ROPE_ENTRY_BYTES * shape.max_position_embeddings * rotary
    mixed = min(sizes.layers, -(-shape.expert_layers // sizes.pp_size))
    if sizes.pp_size > 1 and shape.dense_layers < shape.num_hidden_layers // sizes.pp_size:
        # layers without experts come first, and the second stage has none of them; elsewhere they are between others
        mixed = max(mixed, -(-(shape.num_hidden_layers - 1) // sizes.pp_size))
    others = (shape.common_params - shape.num_hidden_layers * shape.attention_params) / split / shape.num_hidden_layers
    experts = mixed * shape.num_experts * shape.expert_params / sizes.tp_size
    linears = sizes.layers * (_rank_attention(sizes) + others) * common + experts * expert
    return linears / 8 + 2 * sizes.layers * norms + ends + 2 * shape.hidden_size + rope


def _rank_attention(sizes: EngineSizes) -> float:
    """Weights of one layer's attention on a rank: whole KV heads, and whole projections to latent vectors."""
    shape, split = sizes.shape, sizes.attention_tp
    if (mla := shape.latent) is None:
        return _rank_qkv(sizes) * shape.hidden_size + shape.output_params / split
    down = shape.hidden_size * (mla.query_rank + mla.kv_rank + mla.rope_dim)
    return down + (shape.attention_params - down) / split


def _rank_qkv(sizes: EngineSizes) -> float:
    shape = sizes.shape
    return (shape.num_attention_heads / sizes.attention_tp + 2 * sizes.kv_heads) * shape.head_dim


def activation_bytes(sizes: EngineSizes) -> float:
    """Return the most bytes that an iteration of max_num_tokens needs; fixed when the engine is built.

    The larger of two peaks: inside a layer, tokens x 2 bytes x outputs of the layer (4 x hidden, which all ranks hold,
    and this rank's part of gate, up and qkv); at the end, the logits at 16 bit besides the last hidden states. Logits
    exist for one token per sequence, or for every token with gather_context_logits.
    """
    shape, tokens = sizes.shape, sizes.max_num_tokens
    apart = sizes.attention_dp and shape.num_experts > 1  # the tokens of all ranks meet in the experts
    inner = 0.0 if apart else shape.intermediate_size * shape.num_experts_per_token / sizes.tp_size
    inner = max(inner + shape.shared_size / sizes.attention_tp, shape.dense_size / sizes.attention_tp)
    outputs = 4 * shape.hidden_size + 2 * inner + _rank_qkv(sizes)
    layer = LAYER_FACTOR * tokens * 2 * outputs + (gathered_bytes(sizes) if apart else 0)
    sequences = sizes.max_batch_size * sizes.max_beam_width
    rows = tokens if sizes.gather_context_logits else min(tokens, sequences)
    return max(layer, rows * shape.vocab_size * 2 + tokens * shape.hidden_size * HEAD_BYTES)


def gathered_bytes(sizes: EngineSizes) -> int:
    """Return the bytes of a rank's experts for the tokens of all attention data parallel ranks, however they choose.

    Hidden states gathered and results to be scattered, at 16 bit, and the workspace of the grouped products, which has
    a row for each token and each of its experts: inputs (or results) and gate and up. DeepSeek R1 with 8 ranks and
    8,192 tokens: 15.0 GB + 1.9 GB. Source: `fused_moe_cutlass.py` (moe_max_num_tokens times the data parallel size) and
    `moe_kernels.cu`, getWorkspaceDeviceBufferSizes (overlapped_gemm1_gemm2_inputs and outputs) of TensorRT-LLM 1.2.
    """
    shape, tokens = sizes.shape, sizes.tp_size * sizes.max_num_tokens
    row = 2 * shape.hidden_size + max(4 * shape.intermediate_size, 2 * shape.hidden_size)
    return tokens * (shape.num_experts_per_token * row + 4 * shape.hidden_size)


def buffer_bytes(sizes: EngineSizes) -> float:
    """Return the bytes of runtime and decoder, allocated for max_batch_size requests before the KV pool."""
    sequences = sizes.max_batch_size * sizes.max_beam_width
    return BUFFER_LOGITS * 4 * sizes.shape.vocab_size * sequences


def encoder_bytes(sizes: EngineSizes) -> int:
    """Return the bytes of a vision encoder that takes a picture of every request at once; 0 without one."""
    encoder = sizes.encoder
    return 0 if encoder is None else encoder.weight_bytes + encoder.activation_bytes(sizes.max_batch_size)


def user_buffer_bytes(sizes: EngineSizes) -> float:
    """Return the bytes of the two 16-bit buffers in which the ranks add up hidden states; 0 on one rank.

    Llama-3.1-70B with 8,192 tokens: 2 x 8,192 x 8,192 x 2 bytes = 256 MiB on each rank. Source:
    `initializeUserBuffer` in `cpp/tensorrt_llm/runtime/tllmRuntime.cpp`; the third one, of NVFP4, cannot be enabled.
    """
    if not sizes.user_buffers or sizes.tp_size == 1:
        return 0.0
    return 2 * sizes.max_num_tokens * sizes.shape.hidden_size * 2


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests that run at the same time.

    Attributes:
        binds: binding limit: "KV cache" or "max_batch_size".
    """

    requests: int
    binds: str


def concurrency(sizes: EngineSizes, memory: DeviceMemory, tokens: int) -> Concurrency:
    """Return how many requests of this many tokens (prompt + output) run together without any being paused."""
    by_memory = int(memory.kv_pool / sizes.kv_request_bytes(tokens)) * sizes.pools
    # every pipeline stage, and attention data parallel rank, works on a different batch of max_batch_size requests
    by_batch = sizes.max_batch_size * sizes.lanes
    return Concurrency(by_batch, "max_batch_size") if by_batch <= by_memory else Concurrency(by_memory, "KV cache")


def kv_blocks(sizes: EngineSizes, memory: DeviceMemory, tokens: int) -> int:
    """Return the KV blocks of one batch for a simulator in which a request keeps the blocks of all its tokens.

    With attention windows a request keeps fewer, so the pool counts as larger, by that ratio for requests this long.
    Each pipeline stage works on a different batch, and the batches share the pool; an attention data parallel rank has
    a pool of its own.
    """
    each = -(-tokens // sizes.tokens_per_block)
    return int(memory.kv_pool / sizes.kv_request_bytes(tokens) * each) // sizes.pp_size


def fits(sizes: EngineSizes, total: float, tokens: int, least: int = 1) -> bool:
    """Return whether at least so many requests of this many tokens run together."""
    return concurrency(sizes, device_memory(sizes, total), tokens).requests >= least


def what_fits(sizes: EngineSizes, total: float, tokens: int, formats: Sequence[QFormat], least: int = 1) -> list[str]:
    """Return changes, as overrides, each of which makes an engine fit at least `least` requests of `tokens`."""
    fewer = replace(sizes, max_batch_size=min(SMALL_BATCH, sizes.max_batch_size))
    smaller = replace(fewer, max_num_tokens=min(SMALL_TOKENS, sizes.max_num_tokens))
    batch, both = f"build.max_batch_size={SMALL_BATCH}", f"build.max_num_tokens={SMALL_TOKENS}"
    limits = [(batch, fewer), (f"{batch} {both}", smaller)]
    ranks = [
        (f"build.tp_size={count}", replace(sizes, tp_size=count))
        for count in (2, 4, 8, 16)
        if count > sizes.tp_size and sizes.shape.num_attention_heads % count == 0
    ]
    own = sizes.mean_bits or FORMATS[sizes.qformat].linear_bits
    lighter = [name for name in formats if FORMATS[name].linear_bits < own]
    quants = [(f"quant={name}", replace(sizes, qformat=name, mean_bits=None)) for name in lighter]
    small_quants = [(f"quant={name} {batch}", replace(fewer, qformat=name, mean_bits=None)) for name in lighter]
    fitting = [
        [text for text, changed in changes if fits(changed, total, tokens, least)]
        for changes in (limits, ranks, quants, small_quants)
    ]
    return [*fitting[0][:1], *fitting[1][:1], *fitting[2]] or fitting[3]
