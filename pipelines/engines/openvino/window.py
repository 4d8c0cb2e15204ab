"""The CPU engine's KV cache of constant size: attention sinks, a window, and what is dropped between them."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.domain.errors import UserError
from pipelines.sizing import cpu_memory

KV_BLOCK_TOKENS = cpu_memory.KV_BLOCK_TOKENS
"""Tokens of one paged KV block on the CPU plugin; not configurable there."""
LEAST_WINDOW_BLOCKS = 3
"""The engine drops blocks from between the first and the last, so that there must be one of each."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What a sequence keeps while it generates, in tokens; multiples of a block.

    Attributes:
        start: of the beginning, never dropped.
        recent: of the end, never dropped.
        total: altogether; between the two, blocks that got little attention are dropped.
    """

    start: int
    recent: int
    total: int

    def blocks_at_most(self, prompt: int, new: int) -> int:
        """Blocks that a sequence comes to hold: a prompt is computed with full attention before anything is dropped."""
        everything = blocks_of(prompt + new)
        return min(everything, max(blocks_of(prompt), blocks_of(self.total)) + 1)


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // KV_BLOCK_TOKENS)


def eviction_of(window: int | None, sinks: int, max_seq_len: int, *, reuse: bool, drafting: bool) -> Eviction | None:
    """Return what a window means, or None when nothing is ever dropped.

    TensorRT-LLM drops the oldest token after the sinks; openvino_genai drops whole blocks, keeps at least one block of
    sinks, and chooses between the oldest blocks after them by the attention they got.

    Args:
        window: tokens of a sequence that are kept (max_attention_window_size); None is all.
        sinks: of them, tokens of the beginning (sink_token_length).
        max_seq_len: of the engine.
        reuse: whether blocks of equal prompt prefixes are shared.
        drafting: whether a draft model guesses.

    Raises:
        UserError: the engine cannot keep exactly so many tokens, or not together with the other two.
    """
    if window is None or window >= max_seq_len:
        if sinks and window is None:
            raise UserError(
                f"sink_token_length={sinks} was given without max_attention_window_size.",
                todo="Give both, or neither.",
            )
        return None
    start = max(1, blocks_of(sinks)) * KV_BLOCK_TOKENS
    least = start + (LEAST_WINDOW_BLOCKS - 1) * KV_BLOCK_TOKENS
    if window % KV_BLOCK_TOKENS or window < least:
        raise UserError(
            f"max_attention_window_size={window} with sink_token_length={sinks} is not possible on the CPU engine.",
            allowed=f"It must be a multiple of {KV_BLOCK_TOKENS}, at least {least}: whole KV blocks are dropped.",
            todo=f"Set {max(least, window // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)}.",
        )
    if reuse:
        raise UserError(
            f"max_attention_window_size={window} together with KV reuse is not possible on the CPU engine:"
            " openvino_genai 2026.4 frees dropped blocks twice when they are shared.",
            todo="Set kv_cache.enable_block_reuse=false (enable_kv_cache_reuse of the model tensorrt_llm).",
        )
    if drafting:
        raise UserError(
            f"max_attention_window_size={window} together with a draft model is not possible on the CPU engine.",
            todo="Leave one of the two out.",
        )
    return Eviction(start, window - start - KV_BLOCK_TOKENS, window)
