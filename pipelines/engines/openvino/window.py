"""KV cache of constant size for the CPU engine: attention sinks, a window, and what is dropped between them."""

from __future__ import annotations

from pipelines.domain.errors import UserError
from pipelines.engines.openvino.blocks import KV_BLOCK_TOKENS, Eviction, eviction, least_window, nearest_window


def eviction_of(window: int | None, sinks: int, max_seq_len: int, *, reuse: bool, drafting: bool) -> Eviction | None:
    """Return the tokens that a window keeps, or None if nothing is ever dropped.

    TensorRT-LLM drops the oldest token after the sinks; openvino_genai drops whole blocks, keeps at least one block of
    sinks, and chooses among the oldest blocks after them by the attention they received.

    Args:
        window: tokens of a sequence that are kept (max_attention_window_size); None means all.
        sinks: how many of these are the first tokens (sink_token_length).
        max_seq_len: longest sequence of the engine.
        reuse: whether blocks of equal prompt prefixes are shared.
        drafting: whether there is a draft model.

    Raises:
        UserError: the engine cannot keep exactly this many tokens, or not with shared prefixes or a draft model.
    """
    if window is None or window >= max_seq_len:
        if sinks and window is None:
            raise UserError(
                f"sink_token_length={sinks} was given without max_attention_window_size.",
                todo="Set both or neither.",
            )
        return None
    works = nearest_window(window, sinks)
    if works != window:
        raise UserError(
            f"max_attention_window_size={window} with sink_token_length={sinks} is not supported by the CPU engine.",
            allowed=f"It must be a multiple of {KV_BLOCK_TOKENS}, at least {least_window(sinks)}: whole KV blocks are"
            " dropped.",
            todo=f"Set {works}.",
        )
    if reuse:
        raise UserError(
            f"max_attention_window_size={window} together with KV reuse is not supported by the CPU engine:"
            " openvino_genai 2026.4 frees dropped blocks twice when they are shared.",
            todo="Set kv_cache.enable_block_reuse=false (enable_kv_cache_reuse of the model tensorrt_llm).",
        )
    if drafting:
        raise UserError(
            f"max_attention_window_size={window} together with a draft model is not supported by the CPU engine.",
            todo="Leave one of the two out.",
        )
    return eviction(window, sinks)
