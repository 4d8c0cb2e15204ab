"""Blocks of the CPU engine's KV cache, and which windows of attention it can keep. Pure: the rules read it as well."""

from __future__ import annotations

from dataclasses import dataclass

KV_BLOCK_TOKENS = 32
"""Tokens of one paged KV block on the CPU plugin; not configurable there. Source: openvinotoolkit/openvino
`src/plugins/intel_cpu`."""
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


def least_window(sinks: int) -> int:
    """Tokens of the smallest window with so many sinks: 96 without, as at least one block of sinks is kept."""
    return _start(sinks) + (LEAST_WINDOW_BLOCKS - 1) * KV_BLOCK_TOKENS


def nearest_window(window: int, sinks: int) -> int:
    """The window itself where the engine can keep exactly so many tokens, else one that it can: 100 -> 96."""
    return max(least_window(sinks), window // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS)


def eviction(window: int, sinks: int) -> Eviction:
    """What is kept of a window that the engine can keep."""
    start = _start(sinks)
    return Eviction(start, window - start - KV_BLOCK_TOKENS, window)


def _start(sinks: int) -> int:
    return max(1, blocks_of(sinks)) * KV_BLOCK_TOKENS
