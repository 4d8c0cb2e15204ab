"""Choose the limits of a TensorRT-LLM engine for the load it is to serve (modelled).

A large max_batch_size takes memory from the KV cache, and a small one leaves the GPU idle; max_num_tokens sets the
memory of activations. Limits that the user gives stay as given; the others are searched:

    max_batch_size   } the pair that takes the least memory among those that reach nearly the highest rate under full
    max_num_tokens   } load, and with which the longest prompt fits beside one token of every other request
    max_seq_len      the longest request
    max_input_len    the longest prompt

`make plan`, `make size` and `make simulate` all choose here, so that they speak of the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelines.document.show import count
from pipelines.predict.performance.full_load import full_load_rate
from pipelines.predict.performance.lengths import LoadLengths
from pipelines.predict.performance.limits import (
    BATCHES,
    LEAST_TOKENS,
    ChosenLimits,
    WantedLimits,
    stepped,
)
from pipelines.predict.performance.memory import EngineSizes, concurrency, device_memory
from pipelines.predict.simulator.cost import IterationCost

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
    sizes: EngineSizes, total: float, cost: IterationCost, load: LoadLengths, wanted: WantedLimits
) -> ChosenLimits:
    """Choose the limits that are not given.

    Args:
        sizes: everything else about the engine; its own limits are not used.
        total: memory of one GPU, bytes.
        cost: cost of an iteration.
        load: requests to serve.
        wanted: limits that are given.
    """
    context = sizes.shape.max_position_embeddings
    longest_osl = load.longest - load.longest_isl
    seq_floor = max(LEAST_TOKENS, (wanted.max_input_len or 0) + longest_osl)
    seq = wanted.max_seq_len or min(stepped(max(load.longest, seq_floor)), context)
    longest_input = wanted.max_input_len or min(max(LEAST_INPUT, stepped(load.longest_isl)), seq)
    pairs = _pairs(load, wanted, longest_input)
    tried = _tried([_sized(sizes, *pair, seq) for pair in pairs], total, cost, load, chunked=wanted.chunked)
    best = max(each.rate for each in tried)
    chosen = min((each for each in tried if each.rate >= ENOUGH * best), key=lambda each: each.takes)
    reasons = {}
    if wanted.max_batch_size is None:
        reasons["max_batch_size"] = _why_batch(chosen, best, load)
    if wanted.max_num_tokens is None:
        reasons["max_num_tokens"] = _why_tokens(chosen, load, wanted)
    if wanted.max_seq_len is None:
        reasons["max_seq_len"] = f"the longest request has {load.longest:,}{_floor(seq, load.longest, context)}"
    if wanted.max_input_len is None and longest_input > LEAST_INPUT:
        reasons["max_input_len"] = f"the longest prompt has {load.longest_isl:,}"
    return ChosenLimits(chosen.batch, chosen.tokens, seq, longest_input, reasons)


def _pairs(load: LoadLengths, wanted: WantedLimits, longest_input: int) -> list[tuple[int, int]]:
    """List the pairs of max_batch_size and max_num_tokens to try."""
    # prompts in pieces share what the decoding requests leave; whole prompts must fit beside them
    prompt = 1 if wanted.chunked else load.longest_isl
    least = 1 if wanted.chunked else longest_input

    def needed(batch: int) -> int:
        return max(prompt + batch * wanted.tokens_per_step, least)

    batches = BATCHES if wanted.max_batch_size is None else (wanted.max_batch_size,)
    if wanted.max_num_tokens is None:
        return [
            (batch, tokens)
            for batch in batches
            for tokens in sorted({stepped(max(LEAST_TOKENS, needed(batch))), *TOKENS})
            if tokens >= needed(batch)
        ]
    room = [batch for batch in batches if needed(batch) <= wanted.max_num_tokens] or list(batches[:1])
    return [(batch, wanted.max_num_tokens) for batch in room]


def _sized(sizes: EngineSizes, batch: int, tokens: int, seq: int) -> EngineSizes:
    return replace(sizes, max_batch_size=batch, max_num_tokens=tokens, max_seq_len=seq)


def _tried(
    sizes: Sequence[EngineSizes], total: float, cost: IterationCost, load: LoadLengths, *, chunked: bool
) -> list[_Candidate]:
    """Compute the rate under full load of every size; 0 where the longest request does not fit."""
    memory = [device_memory(each, total) for each in sizes]
    pairs = list(zip(sizes, memory, strict=True))
    requests = np.array([concurrency(each, one, load.mean).requests for each, one in pairs])
    fits = [concurrency(each, one, load.longest).requests >= 1 for each, one in pairs]
    slots = np.maximum(requests, 1) / sizes[0].pp_size  # every pipeline stage works on a batch of its own
    budget = np.array([float(each.max_num_tokens) for each in sizes])
    if not chunked:  # an iteration takes whole prompts
        budget = slots + np.maximum(1, np.floor((budget - slots) / load.mean_isl)) * load.mean_isl
    rates = np.where(fits, full_load_rate(cost, load.mean_isl, load.mean_osl, slots, budget), 0.0)
    return [
        _Candidate(each.max_batch_size, each.max_num_tokens, int(held), float(rate), one.activations + one.buffers)
        for (each, one), held, rate in zip(pairs, requests, rates, strict=True)
    ]


def _why_batch(chosen: _Candidate, best: float, load: LoadLengths) -> str:
    if best == 0:
        return "the smallest, and still nothing fits"
    return (
        f"with it, {count(chosen.requests, 'request')} of {load.mean:,} tokens at a time reach "
        f"{int(100 * chosen.rate / best)} % of the best rate under full load"
    )


def _why_tokens(chosen: _Candidate, load: LoadLengths, wanted: WantedLimits) -> str:
    room = chosen.tokens - chosen.batch * wanted.tokens_per_step
    if wanted.chunked:
        return f"pieces of prompts, {count(max(1, room), 'token')} together, beside one of every other request"
    prompts = max(1, int(room / load.mean_isl))
    room_for = f"{prompts:,} prompts of {load.mean_isl:,.0f} tokens" if prompts > 1 else "the longest prompt"
    return f"room for {room_for} beside the tokens of {count(chosen.batch, 'request')}"


def _floor(chosen: int, needed: int, context: int) -> str:
    """Say why a limit is larger than the load needs."""
    if chosen == LEAST_TOKENS > stepped(needed):
        return f"; at least {LEAST_TOKENS:,}, for few-shot prompts"
    return f"; the model's context is {context:,}" if chosen == context else ""
