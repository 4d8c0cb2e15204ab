"""The simulator is fast enough to be asked hundreds of times, on a busy machine too."""

import subprocess
import sys
from time import process_time

import numpy as np
import pytest

from pipelines.predict.simulator.backend import Backend
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import IterationCost, simulate
from tests.support.yardstick import as_if_quiet

COST = IterationCost(1e-5, 1e-6, 8e-3, 1e-4, prefill_attention=1e-10, kv_token=2e-8, fixed=1e-3, sequence=1e-5)
LOADS = {
    "long answers": OfferedLoad(np.full(640, 2000), np.full(640, 200), users=64, client_delay=0.01),
    "short answers": OfferedLoad(np.full(2560, 128), np.full(2560, 20), users=256, client_delay=0.01),
}


@pytest.mark.thorough
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize(("backend", "least"), [("numba", 5e7), ("numpy", 1e6)])
def test_request_iterations_per_second(backend: Backend, least: float, load: OfferedLoad) -> None:
    if backend == "numba":
        pytest.importorskip("numba")

    def seconds_per_request_iteration() -> float:
        start = process_time()
        run = simulate(SchedulerLimits(slots=256), load, COST, backend=backend)
        return (process_time() - start) / run.request_iterations

    assert 1 / as_if_quiet(seconds_per_request_iteration, runs=9) >= least


FIRST_CALL = """
import numpy as np
from pipelines.predict.simulator.run import IterationCost
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import simulate
load = OfferedLoad(np.arange(1, 41), np.arange(1, 41), arrival=np.arange(40.0))
run = simulate(SchedulerLimits(slots=3), load, IterationCost(1e-5, 1e-6, 8e-3, 1e-4), backend="numba")
print(repr(run.end))
"""


def test_what_numba_kept_simulates_like_what_it_compiled() -> None:
    pytest.importorskip("numba")
    first, second = (
        subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert float(first) > 0
    assert second == first
