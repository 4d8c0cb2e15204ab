"""Blocks of the CPU engine's KV cache, and the attention windows it supports. Pure: the rules use it as well."""

from __future__ import annotations

from dataclasses import dataclass

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
