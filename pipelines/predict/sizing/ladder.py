"""Simulate one instance at a ladder of loads, for the replay of a day."""

from __future__ import annotations

import numpy as np

from pipelines.predict.sizing.answer import FleetOption
from pipelines.predict.sizing.autoscale import LoadCurve
from pipelines.predict.sizing.instance import see
from pipelines.predict.sizing.question import Question

RUNGS = (0.02, 0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0)
"""Loads, as shares of the most that an instance can serve."""


def curve(question: Question, option: FleetOption) -> LoadCurve:
    """Simulate the instance of an option at every rung."""
    most = option.capacity.most
    seen = [see(question, option.instance, share * most) for share in RUNGS]
    return LoadCurve(
        loads=np.array([one.rate for one in seen]),
        ttft=np.stack([one.ttft for one in seen]),
        itl=np.stack([one.itl for one in seen]),
        e2e=np.stack([one.e2e for one in seen]),
        queue=np.array([one.queue for one in seen]),
        kv_use=np.array([one.kv_use for one in seen]),
        kv_limit=option.capacity.seen.kv_use,
        most=most,
    )
