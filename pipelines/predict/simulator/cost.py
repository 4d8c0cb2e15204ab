"""Duration of one engine iteration, as numbers that a tight loop can evaluate.

An engine works in iterations. Each processes T tokens (one per decoding request and the tokens of the prompts, or of
their chunks) and takes

    t = ((token_compute T + row_compute n)^p + (weights active(T) + head_weights)^p)^(1/p)   linears: compute or memory
      + prefill_attention sum(q ctx)                        attention of prompts
      + kv_token sum(kv) + kv_window_token sum(min(kv, window))   attention of decoding requests: KV traffic
      + token T                                             norms, activations, all-reduce traffic
      + fixed + sequence n_seq + prefill n_prefill          launches, all-reduce latency, scheduler, sampling
      + prompts, where n_prefill > 0                        cost of preparing a batch of a new size
      + end n_ended, before the next iteration              last answers sent, blocks freed, next requests admitted

with n = n_seq = requests that yield a token or are prefilled in the iteration, and active(T) the share of the weights
that T tokens touch: 1 for a dense model, dense_share + (1 - dense_share) (1 - (1 - expert_share)^T) for a mixture of
experts. KV traffic is its own term, because it stays memory-bound at any batch (arXiv:2503.08311).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np

from pipelines.predict.simulator.loop import iteration_seconds


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Coefficients of the formula above: seconds per named quantity, for one rank, with pipeline stages folded in.

    Attributes:
        token_compute: per token in the linears when compute-bound.
        row_compute: per row of logits when compute-bound.
        weights: to read the linears' weights once.
        head_weights: to read the output head once.
        knee: p; about 3 gives the smooth knee near the ridge batch, infinity a hard maximum.
        dense_share: share of `weights` that every token uses (1 for a dense model).
        expert_share: experts per token / experts (1 for a dense model).
        prefill_attention: per (query token x context token).
        kv_token: per KV token read, for all layers with full attention together.
        kv_window_token: per KV token read, for all layers with a sliding window together.
        window: tokens of that window; 0 means none.
        token: per token, whatever the bound.
        fixed: per iteration.
        sequence: per request in the iteration.
        prefill: per prompt, or chunk of one, in the iteration.
        prompts: per iteration with prompts: the CPU engine prepares its kernels for each new number of tokens.
        end: per request that ended, before the next iteration: the CPU engine's server does it in the same thread.
    """

    token_compute: float
    row_compute: float
    weights: float
    head_weights: float
    knee: float = 3.0
    dense_share: float = 1.0
    expert_share: float = 1.0
    prefill_attention: float = 0.0
    kv_token: float = 0.0
    kv_window_token: float = 0.0
    window: int = 0
    token: float = 0.0
    fixed: float = 0.0
    sequence: float = 0.0
    prefill: float = 0.0
    prompts: float = 0.0
    end: float = 0.0

    def array(self) -> Any:
        """Return float64[17]: the fields in order, for the loop."""
        return np.array(_numbers(self), dtype=np.float64)

    def seconds(
        self, tokens: Any, sequences: Any, *, q_ctx: Any = 0.0, kv: Any = 0.0, kv_window: Any = 0.0, prefills: Any = 0.0
    ) -> Any:
        """Return the seconds of an iteration, without `end`; arrays of equal shape give an array.

        Args:
            tokens: T.
            sequences: requests in the iteration.
            q_ctx: sum over prompts of query tokens x mean context they attend to.
            kv: sum over decoding requests of KV tokens read.
            kv_window: the same, with each request capped at the window.
            prefills: prompts or chunks.
        """
        return iteration_seconds(_numbers(self), tokens, sequences, q_ctx, kv, kv_window, prefills)


_numbers = attrgetter(*(field.name for field in fields(IterationCost)))  # astuple copies each of them deeply


@dataclass(frozen=True, slots=True)
class TickCost:
    """The didactic time base: an iteration lasts max(sum of its prefill times, its decode time, 1 tick).

    Attributes:
        prefill: ticks of one whole prompt; a chunk costs its proportion.
        decode: ticks of a decode step, however many requests decode.
        chunks: iterations a prompt is spread over.
    """

    prefill: float = 2.0
    decode: float = 1.0
    chunks: int = 1


Cost = IterationCost | TickCost
