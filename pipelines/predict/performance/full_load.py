"""Closed form for an engine that always has work."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.predict.simulator.cost import IterationCost


def full_load_rate(cost: IterationCost, isl: Any, osl: Any, slots: Any, max_num_tokens: Any) -> Any:
    """Return the output tokens per second of one engine whose queue never empties.

    With all slots busy, each request yields a token per iteration and leaves after osl of them, so an iteration brings
    slots / osl new prompts. They are processed in iterations filled with prompt tokens up to `max_num_tokens` (at least
    one whole prompt); the others only decode. If prompts alone would overfill every iteration, fewer slots are
    busy.

    Args:
        cost: cost of an iteration; its window is not used.
        isl: input tokens.
        osl: output tokens.
        slots: requests that fit together.
        max_num_tokens: tokens of an iteration.
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
