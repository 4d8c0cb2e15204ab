"""The simulator is fast enough to be asked hundreds of times. Processor time, so that other work does not disturb."""

from __future__ import annotations

from time import process_time

import numpy as np
import pytest

from pipelines.simulator.backend import Backend
from pipelines.simulator.cost import IterationCost
from pipelines.simulator.interface import Engine, Load
from pipelines.simulator.run import simulate

COST = IterationCost(1e-5, 1e-6, 8e-3, 1e-4, prefill_attention=1e-10, kv_token=2e-8, fixed=1e-3, sequence=1e-5)
LOADS = {
    "long answers": Load(np.full(640, 2000), np.full(640, 200), users=64, client_delay=0.01),
    "short answers": Load(np.full(2560, 128), np.full(2560, 20), users=256, client_delay=0.01),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize(("backend", "least"), [("numba", 5e7), ("numpy", 1e6)])
def test_request_iterations_per_second(backend: Backend, least: float, load: Load) -> None:
    if backend == "numba":
        pytest.importorskip("numba")
    rates = []
    for _ in range(9):
        start = process_time()
        run = simulate(Engine(slots=256), load, COST, backend=backend)
        rates.append(run.request_iterations / (process_time() - start))
    assert max(rates) >= least
