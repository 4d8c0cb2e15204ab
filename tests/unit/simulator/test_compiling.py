"""The first run of a version compiles the loop: it says so, and the second one has nothing to say."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.thorough

RUN = """
import numpy as np
from pipelines.predict.simulator.run import TickCost
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import simulate
simulate(SchedulerLimits(), OfferedLoad(np.ones(1), np.ones(1), users=1), TickCost(), backend="numba")
"""


def test_a_loop_that_has_to_be_compiled_says_so_and_is_kept(tmp_path):
    pytest.importorskip("numba")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = [subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=env, capture_output=True) for _ in range(2)]
    assert [each.stderr.decode() for each in done] == [
        "compiling the simulator, once per version: about 10 s\n",
        "",
    ]
