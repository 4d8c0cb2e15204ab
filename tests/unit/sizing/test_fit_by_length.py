"""One short run with mixed lengths is enough for a fit: TTFT and ITL of short and of long prompts are compared."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.domain.benchmark import Distribution
from pipelines.predict.performance.calibrate_command import free_engine
from pipelines.predict.performance.fit import fit
from pipelines.predict.performance.measured import Measured, MeasuredLevel, Sent
from pipelines.predict.performance.modelled import ModelledDeployment, evaluated, run_trial, simulated, trial
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.predict.simulator.run import IterationCost
from pipelines.settings.compose import load

ENGINE = SchedulerLimits("inflight_chunked", slots=32, max_num_tokens=2048)
COST = IterationCost(0, 0, 0, 0, knee=1.0, token=9e-5, fixed=4e-4, sequence=1.2e-3, kv_token=4e-7, prefill=2e-3)
SERVER = ModelledDeployment(ENGINE, COST, overhead_s=2e-3, client_gap_s=1e-3)


def level(users: int, *, seed: int, timed: bool) -> MeasuredLevel:
    """What the server does under a closed loop of mixed lengths."""
    random, count = np.random.default_rng(seed), 40 * users
    isl, osl = random.integers(16, 320, count), random.integers(8, 96, count)
    sent = Sent(np.arange(count) * 0.01, isl, osl, (0.01 * 4 * users, 0.01 * 36 * users))
    nothing = Distribution(0)
    empty = MeasuredLevel(
        "closed", users, None, isl.mean(), osl.mean(), count, 1.0, nothing, nothing, nothing, sent=sent
    )
    columns, window, due = simulated(trial(empty), SERVER)
    found = evaluated(trial(empty), columns, window, due)
    return replace(
        empty,
        requests_per_s=found.requests_per_s,
        ttft_s=found.ttft_s,
        itl_s=found.itl_s,
        e2e_s=found.e2e_s,
        sent=replace(sent, ttft=columns.ttft(), itl=columns.itl()) if timed else sent,
    )


def short_and_long(metric: str, *, timed: bool) -> list[float]:
    """Return the errors of a metric of one user with short and with long prompts, after a fit to one mixed run."""
    run = Measured("a test", tuple(level(n, seed=n, timed=timed) for n in (1, 4)), "m", ("a test",))
    deployment = fit(run, ENGINE).deployment
    errors = []
    for isl in (16, 320):
        nothing = Distribution(0)
        one = MeasuredLevel("closed", 1, None, isl, 32, 30, 1.0, nothing, nothing, nothing, steady=False)
        real, made = (getattr(run_trial(trial(one), each), metric).mean for each in (SERVER, deployment))
        errors.append(abs(made / real - 1))
    return errors


@pytest.mark.thorough
@pytest.mark.parametrize(("metric", "most"), [("ttft_s", 0.1), ("itl_s", 0.02)])
def test_one_mixed_run_tells_prompts_apart(metric: str, most: float) -> None:
    told, untold = (short_and_long(metric, timed=timed) for timed in (True, False))
    assert max(told) < most
    assert max(told) < max(untold)


@pytest.mark.parametrize(
    ("engine", "policy"), [("unknown", "inflight_chunked"), ("openvino", "inflight_chunked"), (None, "inflight")]
)
def test_a_server_elsewhere_is_taken_to_mix_prompts_with_tokens(engine: str | None, policy: str) -> None:
    run = Measured("a test", (), "m", ("a test",), engine=engine)
    assert free_engine(load(()), run).policy == policy
