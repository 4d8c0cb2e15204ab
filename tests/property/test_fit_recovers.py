"""A fit to what the simulator itself measured finds its coefficients and predicts loads it has not seen."""

from dataclasses import replace

import numpy as np
import pytest

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import UserError
from pipelines.predict.performance.fit import FREE_KNOBS, fit, guess, moved
from pipelines.predict.performance.measured import Measured, MeasuredLevel
from pipelines.predict.performance.modelled import ModelledDeployment, run_trial, trial
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.predict.simulator.run import IterationCost

pytestmark = pytest.mark.thorough

ENGINE = SchedulerLimits(policy="inflight_chunked", slots=64, max_num_tokens=8192, kv_blocks=4096)
COST = IterationCost(
    0.0, 0.0, 0.0, 0.0, knee=1.0, prefill_attention=6e-8, kv_token=5e-7, token=4e-5, fixed=5e-4, sequence=1.5e-4,
    prompts=2e-3, end=5e-4,
)  # fmt: skip
TRUE = ModelledDeployment(ENGINE, COST, overhead_s=2e-3, client_gap_s=3e-4)
NOTHING = Distribution(0)


def load(users=None, rate=None, isl=128, osl=64, arrival=None):
    """A level that nobody has measured yet; lengths vary by a quarter."""
    how = arrival or ("closed" if rate is None else "poisson")
    return MeasuredLevel(
        how, users, rate, isl, osl, 300, 1.0, NOTHING, NOTHING, NOTHING, isl_stdev=isl / 4, osl_stdev=osl / 4,
        steady=how != "burst",
    )  # fmt: skip


def measured(level, deployment, noise=0.0, seed=0):
    """The level as the simulator measures it, with noise on every number."""
    found, random = run_trial(trial(level), deployment), np.random.default_rng(seed)

    def noisy(values):
        return replace(
            values, **{n: getattr(values, n) * np.exp(random.normal(0, noise)) for n in ("mean", "p50", "p95")}
        )

    return replace(
        level,
        requests_per_s=found.requests_per_s * float(np.exp(random.normal(0, noise))),
        ttft_s=noisy(found.ttft_s),
        itl_s=noisy(found.itl_s),
        e2e_s=found.e2e_s,
    )


FITTED = [
    load(1), load(4), load(16), load(32), load(1, isl=400, osl=48), load(16, isl=400, osl=48), load(6, isl=64, osl=160),
    load(rate=10.0), load(isl=400, osl=48, arrival="burst"),
]  # fmt: skip
UNSEEN = [load(2, isl=256), load(8, osl=128), load(24, isl=200, osl=100), load(rate=6.0, isl=300), load(rate=12.0)]


def benchmark(deployment, noise=0.0):
    levels = tuple(measured(level, deployment, noise, seed) for seed, level in enumerate(FITTED))
    return Measured("trtllm-pipelines", levels, "m", ("a test",), engine="openvino")


def errors(levels, truth, found):
    rows = [(run_trial(trial(level), truth), run_trial(trial(level), found)) for level in levels]
    for real, made in rows:
        yield from (
            made.requests_per_s / real.requests_per_s - 1,
            made.ttft_s.p50 / real.ttft_s.p50 - 1,
            made.ttft_s.p95 / real.ttft_s.p95 - 1,
            made.itl_s.mean / real.itl_s.mean - 1,
        )


@pytest.mark.parametrize("seed", range(2))
def test_a_fit_to_the_simulator_predicts_unseen_loads_within_half_a_percent(seed):
    """Median over loads and metrics; what the loads decide well comes back as well."""
    truth = moved(TRUE, FREE_KNOBS, np.random.default_rng(seed).uniform(-0.4, 0.4, len(FREE_KNOBS)))
    found = fit(benchmark(truth), ENGINE)
    assert np.median([abs(error) for error in errors(UNSEEN, truth, found.deployment)]) < 0.005
    for name in ("fixed", "sequence", "token", "kv_token"):
        assert getattr(found.deployment.cost, name) == pytest.approx(getattr(truth.cost, name), rel=0.15), name


def test_noise_of_the_measurement_is_not_taken_for_structure():
    found = fit(benchmark(TRUE, noise=0.05), ENGINE)
    assert np.median([abs(error) for error in errors(UNSEEN, TRUE, found.deployment)]) < 0.05


def test_what_a_single_load_cannot_decide_is_said():
    one = benchmark(TRUE)
    found = fit(replace(one, levels=one.levels[:1]), ENGINE)
    assert {"sequence", "kv_token"} & set(found.undecided)
    low, high = found.intervals["fixed"]
    assert low < found.deployment.cost.fixed < high


def test_a_measurement_without_streaming_cannot_be_fitted_for_a_machine_without_a_model():
    level = replace(load(4), e2e_s=Distribution(1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2))
    with pytest.raises(UserError, match="no level has TTFT and ITL"):
        guess(Measured("aiperf", (level,), "m", ("results.json",)), ENGINE)
