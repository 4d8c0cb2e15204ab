"""Closed forms for published measurements of a static batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.predict.simulator.cost import IterationCost


def prefill_seconds(cost: IterationCost, isl: Any, batch: Any) -> Any:
    """Return the seconds to process `batch` prompts of `isl` tokens. A token attends to half its prompt on average."""
    return cost.seconds(batch * isl, batch, q_ctx=batch * isl * isl / 2.0, prefills=batch)


def decode_seconds(cost: IterationCost, isl: Any, osl: Any, batch: Any) -> Any:
    """Return the mean seconds of a decode step of `batch` requests that go from `isl` to `isl + osl` tokens."""
    context = isl + osl / 2.0
    windowed = np.minimum(context, np.where(np.asarray(cost.window) > 0, cost.window, context))
    return cost.seconds(batch, batch, kv=batch * context, kv_window=batch * windowed)
