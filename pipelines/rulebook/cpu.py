"""What the CPU engine cannot do, or not together."""

from __future__ import annotations

from pipelines.rulebook.builder import longest
from pipelines.rulebook.record import CPU, Cases, Deployment, Rule, listed

TOPIC = "CPU engine"
BLOCK, LEAST_BLOCKS = 32, 3
"""Tokens of a KV block; the first, the last and one between them stay or go as wholes."""
WINDOW = "pipelines/engines/openvino/window.py: openvino_genai CacheEvictionConfig drops whole blocks (2026.4)"


def _window(d: Deployment) -> int:
    """Tokens of the window; 0 where every token is kept."""
    windows = d.triton.max_attention_window_size or ()
    window, limit = (windows[0] if windows else 0), longest(d)
    return 0 if limit is not None and window >= limit else window


def _not_in_blocks(d: Deployment) -> Cases:
    """Windows of which the engine cannot keep exactly so many tokens."""
    sinks = max(1, -(-(d.triton.sink_token_length or 0) // BLOCK)) * BLOCK
    window, least = _window(d), sinks + (LEAST_BLOCKS - 1) * BLOCK
    if not window or (window % BLOCK == 0 and window >= least):
        return ()
    return ({"window": window, "least": least, "works": max(least, window // BLOCK * BLOCK)},)


def _sizes(d: Deployment) -> Cases:
    windows = d.triton.max_attention_window_size or ()
    return ({"windows": listed(windows), "one": max(windows)},) if len(set(windows)) > 1 else ()


RULES = (
    Rule(
        name="cpu-windows-are-whole-blocks",
        topic=TOPIC,
        engines=CPU,
        when=_not_in_blocks,
        failed="triton.max_attention_window_size={window} with sink_token_length={d.triton.sink_token_length} cannot be"
        " had with engine=openvino: it drops whole blocks of 32 tokens.",
        allowed="There it is a multiple of 32, at least {least}.",
        todo="Set triton.max_attention_window_size=[{works}].",
        source=WINDOW,
    ),
    Rule(
        name="cpu-layers-share-a-window",
        topic=TOPIC,
        engines=CPU,
        when=_sizes,
        failed="triton.max_attention_window_size=[{windows}] cannot be had with engine=openvino: all layers share one.",
        todo="Give one number, e.g. [{one}].",
        source=WINDOW,
    ),
    Rule(
        name="cpu-windows-exclude-reuse",
        topic=TOPIC,
        engines=CPU,
        when=lambda d: d.kv_reuse and bool(_window(d)) and [{"window": _window(d)}],
        failed="triton.max_attention_window_size=[{window}] with KV-cache reuse cannot be had with engine=openvino:"
        " openvino_genai 2026.4 frees dropped blocks twice when they are shared.",
        todo="Set kv_cache.enable_block_reuse=false, as window=sliding and window=sinks do.",
        source=WINDOW,
    ),
    Rule(
        name="cpu-windows-exclude-drafts",
        topic=TOPIC,
        engines=CPU,
        when=lambda d: d.speculation == "draft_target" and bool(_window(d)) and [{"window": _window(d)}],
        failed="triton.max_attention_window_size=[{window}] with speculative={d.speculation} cannot be had with"
        " engine=openvino.",
        todo="Leave one of the two out.",
        source=WINDOW,
    ),
)
