"""`calibrate` with measurements of the real engine and server: a load that was not fitted is predicted."""

import json
import shutil

import numpy as np
import pytest

from pipelines.domain.benchmark import RESULT, BenchmarkResult
from pipelines.predict.performance.calibrate_command import METRICS
from pipelines.predict.performance.deployment import load_fit
from pipelines.predict.performance.fit import FittedLevel
from pipelines.predict.performance.modelled import run_trial, trial
from pipelines.predict.performance.read_measured import read_measured

pytestmark = pytest.mark.thorough

QUICK = ["quant=int4_wo", "build.max_batch_size=32", "engine=openvino", "engine.openvino.num_threads=1"]
LENGTHS = [
    "workload.isl={distribution: normal, mean: 64, stdev: 16, min: 16}",
    "workload.osl={distribution: normal, mean: 24, stdev: 6, min: 4}",
]
SHORT = ["benchmark.warmup_s=0.5", "benchmark.duration_s=1.5", *LENGTHS]
BOUND = 0.4
"""Median error over the metrics of the unseen load; machines that run tests are busy with other things."""
ROUNDS = 3
"""Measurements of fit and unseen load until the error is within it."""
TRIES = 5
"""Benchmarks until every load counts; on a busy machine the load generator may be the limit."""


def benchmark(cli, concurrency):
    before = set((cli.store / "benchmark").glob("*")) if (cli.store / "benchmark").exists() else set()
    cli.run("benchmark", *QUICK, *SHORT, f"benchmark.concurrency={concurrency}")
    (folder,) = set((cli.store / "benchmark").glob("*")) - before
    return folder / RESULT


def counted(result):
    """The levels of a result that describe the server."""
    levels = BenchmarkResult.from_json(json.loads(result.read_text()), str(result)).levels
    return [level for level in levels if level.counts]


def measured(cli, *concurrency):
    """Results in which each of the loads counts once."""
    results, wanted = [], list(concurrency)
    for _ in range(TRIES):
        result = benchmark(cli, wanted)
        if found := [level.concurrency for level in counted(result)]:
            results.append(result)
            wanted = [load for load in wanted if load not in found]
        if not wanted:
            return results
    pytest.skip(f"this machine is too busy to measure concurrency {wanted}: {TRIES} benchmarks were client-limited")


def fit(cli, folder):
    """Measure three loads, fit them, and return the results and what `calibrate` prints of them."""
    for result in measured(cli, 1, 4, 12):
        shutil.copytree(result.parent, folder / result.parent.name)
    return sorted(folder.glob(f"*/{RESULT}")), cli.run("calibrate", *QUICK, f"sizing.measured={folder}")


@pytest.fixture(scope="module")
def fitted(cli):
    """Benchmarks of three loads, and what `calibrate` prints of them."""
    return fit(cli, cli.folder / "measured")


def test_a_fit_prints_measured_beside_modelled_and_keeps_a_file(cli, fitted):
    _, text = fitted
    assert "concurrency 12" in text
    assert "median error" in text
    made = load_fit(cli.store / "fits" / "tiny_gemma-int4_wo-openvino-tp1.json")
    assert made.deployment.engine.slots == 32
    assert made.deployment.engine.kv_blocks  # as the server's own gauge tells it
    assert len(made.levels) == 3


def test_a_load_that_was_not_fitted_is_predicted(cli, fitted):
    """A machine with other work may be twice as fast a minute later, so both sides are measured up to three times."""
    for attempt in range(1, ROUNDS + 1):
        made = load_fit(cli.store / "fits" / "tiny_gemma-int4_wo-openvino-tp1.json")
        (level,) = read_measured(measured(cli, 8)).levels
        errors = FittedLevel(level, run_trial(trial(level), made.deployment)).errors()
        assert set(METRICS) <= set(errors)
        found = np.median([abs(errors[name]) for name in METRICS])
        if found < BOUND:
            break
        assert attempt < ROUNDS, errors
        fit(cli, cli.folder / f"measured-{attempt}")


def test_plan_and_report_show_modelled_numbers(cli, fitted):
    plan = " ".join(cli.run("plan", *QUICK, *LENGTHS).split())
    assert "modelled under workload=fixed (fitted to 3 loads measured with trtllm-pipelines" in plan
    cli.run("report", *QUICK)
    (page,) = (cli.folder / "reports").glob("*/report.md")
    text = page.read_text()
    assert "Modelled: simulated with the same requests, not measured; fitted" in text
    assert "Dotted: modelled, not measured" in text


def test_a_result_of_the_store_is_read_back_with_its_requests(cli, fitted):
    results, _ = fitted
    levels = read_measured(results).levels
    assert all(level.sent is not None for level in levels)
    assert [level.requests for level in levels] == [
        level.summary.requests for result in results for level in counted(result)
    ]
