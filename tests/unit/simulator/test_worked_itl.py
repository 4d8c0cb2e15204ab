"""ITL of the worked tick examples: they pool the gaps between tokens and leave out the gap before the last token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.simulator.cost import TickCost
from pipelines.simulator.interface import Engine, Load
from pipelines.simulator.run import simulate

CASES = json.loads((Path(__file__).parents[2] / "reference/seed_cases.json").read_text())["simulator_tick_model"][
    "cases"
]


@pytest.mark.parametrize(
    ("policy", "chunks", "case"),
    [("static", 1, 0), ("inflight", 1, 0), ("one_prefill", 1, 1), ("one_prefill", 2, 2)],
)
def test_pooled_gaps_without_the_last_are_the_worked_itl(policy, chunks, case) -> None:
    load = Load(np.full(100, 10), np.full(100, 10), np.zeros(100))
    engine = Engine(policy, slots=4, max_num_tokens=None)
    run = simulate(engine, load, TickCost(2, 1, chunks), until=100, iterations=True, backend="numpy")
    gaps: list[float] = []
    stays = zip(run.stays.request, run.stays.began, run.stays.tokens, strict=True)
    for request, began, tokens in stays:
        ended = np.isfinite(run.requests.end[request])
        gaps += run.iterations.seconds[began + 1 : began + tokens - ended].tolist() if tokens else []
    assert round(float(np.mean(gaps)), 4) == CASES[case]["itl"]
