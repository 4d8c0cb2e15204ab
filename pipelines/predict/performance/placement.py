"""Place a model on its GPUs: the limits, the memory and the scheduler of one engine (modelled).

`make plan`, `make size`, `make simulate` and reports all build their engine here, so that one question has one answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from pipelines.checkpoint.llava import VisionShape
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.config import HardwareSettings
from pipelines.predict.performance.gpus import data_sheet
from pipelines.predict.performance.limits import (
    BATCHES,
    LEAST_TOKENS,
    NOTHING_GIVEN,
    ChosenLimits,
    LoadLengths,
    WantedLimits,
    engine_sizes,
    known_lengths,
    stepped,
)
from pipelines.predict.performance.memory import (
    Concurrency,
    DeviceMemory,
    EngineSizes,
    concurrency,
    device_memory,
    kv_blocks,
)
from pipelines.predict.performance.performance import Costed, Setup
from pipelines.predict.simulator.interface import Admission, Policy, SchedulerLimits, admission_of
from pipelines.predict.simulator.run import IterationCost
from pipelines.settings.root import Settings

# Closed form for an engine that always has work.


def full_load_rate(cost: IterationCost, isl: Any, osl: Any, slots: Any, max_num_tokens: Any) -> Any:
    """Return the output tokens per second of one engine whose queue never empties.

    With all slots busy, each request yields a token per iteration and leaves after osl of them, so an iteration brings
    slots / osl new prompts. They are processed in iterations filled with prompt tokens up to `max_num_tokens` (at least
    one whole prompt); the others only decode. If prompts alone would overfill every iteration, fewer slots are
    busy.
    """
    room = np.maximum(max_num_tokens - slots, isl)
    share = slots * isl / osl / room
    busy = np.where(share > 1, slots / np.maximum(share, 1), slots)
    share = np.minimum(share, 1.0)
    prompts = room / isl
    context = isl + osl / 2.0
    windowed = np.minimum(context, np.where(np.asarray(cost.window) > 0, cost.window, context))
    reads = {"kv": busy * context, "kv_window": busy * windowed}
    mixed = cost.seconds(room + busy, busy + prompts, q_ctx=room * isl / 2.0, prefills=prompts, **reads)
    plain = cost.seconds(busy, busy, **reads)
    return busy / (share * mixed + (1 - share) * plain)


# Choose the limits of a TensorRT-LLM engine for the load it is to serve (modelled).
#
# A large max_batch_size takes memory from the KV cache, and a small one leaves the GPU idle; max_num_tokens sets the
# memory of activations. Limits that the user gives stay as given; the others are searched:
#
#     max_batch_size   } the pair that takes the least memory among those that reach nearly the highest rate under full
#     max_num_tokens   } load, and with which the longest prompt fits beside one token of every other request
#     max_seq_len      the longest request
#     max_input_len    the longest prompt
#
# `make plan`, `make size` and `make simulate` all choose here, so that they speak of the same engine.

TOKENS = (4096, 8192, 16384, 32768)
"""Values tried for max_num_tokens, where a prompt fits beside one token of every other request."""
ENOUGH = 0.98
"""Share of the highest rate that the chosen pair must reach; larger limits would add memory and latency."""
LEAST_INPUT = 1024
"""Least max_input_len, trtllm-build's default."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pair that was tried: requests at a time, rate under full load in any unit, bytes of activations and buffers."""

    batch: int
    tokens: int
    requests: int
    rate: float
    takes: float


def choose(
    sizes: EngineSizes, total: float, cost: IterationCost, load: LoadLengths, limits: WantedLimits
) -> ChosenLimits:
    """Choose the limits that are not given; those in `sizes` are not used. `total` is the memory of one GPU, bytes."""
    context = sizes.shape.max_position_embeddings
    longest_osl = load.longest - load.longest_isl
    seq_floor = max(LEAST_TOKENS, (limits.max_input_len or 0) + longest_osl)
    seq = limits.max_seq_len or min(stepped(max(load.longest, seq_floor)), context)
    longest_input = limits.max_input_len or min(max(LEAST_INPUT, stepped(load.longest_isl)), seq)
    sized = [
        replace(sizes, max_batch_size=batch, max_num_tokens=tokens, max_seq_len=seq)
        for batch, tokens in _pairs(load, limits, longest_input)
    ]
    tried = _tried(sized, total, cost, load, chunked=limits.chunked)
    best = max(each.rate for each in tried)
    chosen = min((each for each in tried if each.rate >= ENOUGH * best), key=lambda each: each.takes)
    reasons = {}
    if limits.max_batch_size is None:
        reached = f"{int(100 * chosen.rate / best)} % of the best rate under full load" if best else ""
        requests = count(chosen.requests, "request")
        verb = "reaches" if chosen.requests == 1 else "reach"
        together = f"{requests} of {load.mean:,} tokens at a time {verb} {reached}"
        reasons["max_batch_size"] = f"with it, {together}" if best else "the smallest, and still nothing fits"
    if limits.max_num_tokens is None:
        reasons["max_num_tokens"] = _why_tokens(chosen, load, limits)
    if limits.max_seq_len is None:
        reasons["max_seq_len"] = f"the longest request has {load.longest:,}{_floor(seq, load.longest, context)}"
    if limits.max_input_len is None and longest_input > LEAST_INPUT:
        reasons["max_input_len"] = f"the longest prompt has {load.longest_isl:,}"
    return ChosenLimits(chosen.batch, chosen.tokens, seq, longest_input, reasons)


def _pairs(load: LoadLengths, limits: WantedLimits, longest_input: int) -> list[tuple[int, int]]:
    # prompts in pieces share what the decoding requests leave; whole prompts must fit beside them
    prompt = 1 if limits.chunked else load.longest_isl
    least = 1 if limits.chunked else longest_input

    def needed(batch: int) -> int:
        return max(prompt + batch * limits.tokens_per_step, least)

    batches = BATCHES if limits.max_batch_size is None else (limits.max_batch_size,)
    if limits.max_num_tokens is None:
        return [
            (batch, tokens)
            for batch in batches
            for tokens in sorted({stepped(max(LEAST_TOKENS, needed(batch))), *TOKENS})
            if tokens >= needed(batch)
        ]
    room = [batch for batch in batches if needed(batch) <= limits.max_num_tokens] or list(batches[:1])
    return [(batch, limits.max_num_tokens) for batch in room]


def _tried(
    sizes: Sequence[EngineSizes], total: float, cost: IterationCost, load: LoadLengths, *, chunked: bool
) -> list[_Candidate]:
    """Compute the rate under full load of every size; 0 where the longest request does not fit."""
    memory = [device_memory(each, total) for each in sizes]
    pairs = list(zip(sizes, memory, strict=True))
    requests = np.array([concurrency(each, one, load.mean).requests for each, one in pairs])
    fits = [concurrency(each, one, load.longest).requests >= 1 for each, one in pairs]
    slots = np.maximum(requests, 1) / sizes[0].lanes
    budget = np.array([float(each.max_num_tokens) for each in sizes])
    if not chunked:  # an iteration takes whole prompts
        budget = slots + np.maximum(1, np.floor((budget - slots) / load.mean_isl)) * load.mean_isl
    rates = np.where(fits, full_load_rate(cost, load.mean_isl, load.mean_osl, slots, budget), 0.0)
    return [
        _Candidate(each.max_batch_size, each.max_num_tokens, int(held), float(rate), one.activations + one.buffers)
        for (each, one), held, rate in zip(pairs, requests, rates, strict=True)
    ]


def _why_tokens(chosen: _Candidate, load: LoadLengths, limits: WantedLimits) -> str:
    room = chosen.tokens - chosen.batch * limits.tokens_per_step
    if limits.chunked:
        return f"pieces of prompts, {count(max(1, room), 'token')} together, beside one of every other request"
    prompts = max(1, int(room / load.mean_isl))
    room_for = f"{prompts:,} prompts of {count(round(load.mean_isl), 'token')}" if prompts > 1 else "the longest prompt"
    return f"room for {room_for} beside the tokens of {count(chosen.batch, 'request')}"


def _floor(chosen: int, needed: int, context: int) -> str:
    """Say why a limit is larger than the load needs."""
    if chosen == LEAST_TOKENS > stepped(needed):
        return f"; at least {LEAST_TOKENS:,}, for few-shot prompts"
    return f"; the model's context is {context:,}" if chosen == context else ""


Judge = Callable[[Setup, ChosenLimits | None], None]
"""Applies the rules of a plan to an engine; raises UserError for what they refuse."""


def unjudged(_setup: Setup, _limits: ChosenLimits | None) -> None:
    """Accept an engine, where no rules are at hand."""


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Properties of an engine that do not depend on its format and split.

    Attributes:
        sizes: quantities that determine its memory; its limits count only if the requests are not known.
        wanted: limits that are given; the others are chosen for the load.
        admission: how requests get KV blocks.
        prefix_tokens: tokens of each prompt that are already in the cache.
    """

    sizes: EngineSizes
    wanted: WantedLimits = NOTHING_GIVEN
    policy: Policy = "inflight"
    admission: Admission = "GUARANTEED_NO_EVICT"
    prefix_tokens: int = 0

    @classmethod
    def of(cls, settings: Settings, shape: ModelShape) -> Self:
        """Read them from the groups build, triton, runtime, kv_cache and workload."""
        chunked, images = settings.runtime.enable_chunked_context, settings.multimodal
        encoder = VisionShape.read(images.path) if images.model_type != "none" and images.path else None
        return cls(
            sizes=replace(engine_sizes(settings, shape), encoder=encoder),
            wanted=WantedLimits.of(settings.build, chunked=chunked),
            policy="inflight_chunked" if chunked else "inflight",
            admission=admission_of(settings.triton.batch_scheduler_policy),
            prefix_tokens=cached_prefix(settings),
        )


def cached_prefix(settings: Settings) -> int:
    """Return the tokens of each prompt that all requests share, if the KV cache keeps them."""
    share = settings.workload.shared_prefix_share
    if not share or not settings.kv_cache.enable_block_reuse:
        return 0
    lengths = known_lengths(settings)
    mean = settings.workload.expected("isl") or (lengths.mean_isl if lengths else 0.0)
    return int(share * mean)


@dataclass(frozen=True, slots=True)
class Placed:
    """An engine on its GPUs.

    Attributes:
        engine: scheduler of one batch; with pipeline stages several batches are in progress, each with its share.
        sizes: quantities that determined its memory.
        concurrency: number of requests of mean length that run at a time.
        limits: limits that it is built with, given or chosen; None if the requests are not known.
    """

    engine: SchedulerLimits
    sizes: EngineSizes
    memory: DeviceMemory
    concurrency: Concurrency
    limits: ChosenLimits | None

    def holds(self, tokens: int) -> bool:
        """Return whether one request of this many tokens fits."""
        return concurrency(self.sizes, self.memory, tokens).requests >= 1


def place(setup: Setup, cost: IterationCost, terms: EngineTerms, load: LoadLengths | None) -> Placed:
    """Place a model on its GPUs. Without requests to serve, no limit is chosen."""
    sizes, total = setup.resized(terms.sizes), setup.gpu.reported_bytes
    limits = None if load is None else choose(sizes, total, cost, load, terms.wanted)
    sizes = sizes if limits is None else limits.sizes(sizes)
    usual = sizes.max_seq_len if load is None else load.mean
    memory = device_memory(sizes, total)
    engine = SchedulerLimits(
        policy=terms.policy,
        slots=sizes.max_batch_size,
        max_num_tokens=sizes.max_num_tokens,
        admission=terms.admission,
        kv_blocks=kv_blocks(sizes, memory, usual),
        tokens_per_block=sizes.tokens_per_block,
        prefix_tokens=terms.prefix_tokens,
    )
    return Placed(engine, sizes, memory, concurrency(sizes, memory, usual), limits)


def limits_for_load(
    settings: Settings, shape: ModelShape | None, hardware: HardwareSettings, cost_of: Callable[[Setup], Costed]
) -> ChosenLimits | None:
    """Choose the limits of the engine that the settings describe.

    Returns:
        None where nothing is left to choose, or the model, the speed of the GPU or the requests are not known.
    """
    if shape is None or hardware.mem_bw_gb_s is None:
        return None
    terms, load = EngineTerms.of(settings, shape), known_lengths(settings)
    if load is None or terms.wanted.all_given:
        return None
    try:
        setup = Setup.of(settings, shape, data_sheet(hardware))
        timed = max(settings.quant.formats, key=lambda each: FORMATS[each].linear_bits)  # of a mix, the slowest to read
        cost = cost_of(replace(setup, qformat=timed)).cost
    except UserError:
        return None  # a format, a split or windows that other checks refuse
    return place(setup, cost, terms, load).limits
