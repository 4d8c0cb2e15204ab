"""The same requests through everything that summarises requests: every figure is the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.domain.benchmark import BenchmarkResult, ClientHealth, LoadPoint, Slo, Summary
from pipelines.domain.summary import summarise, whole_window
from pipelines.predict.performance.modelled import ModelledDeployment, Trial, run_trial
from pipelines.predict.performance.read_measured import from_result
from pipelines.predict.simulate.outcome import SimulatedLevel, measure
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits, SimulatedRun
from pipelines.predict.simulator.run import IterationCost, simulate
from pipelines.predict.sizing.instance import WARM_UP, watch
from pipelines.report.tables_load import levels_table
from scripts.published.bench import Protocol, _serve, _statistic
from tests.support.load_records import columns_of
from tests.support.simulated_records import timings

COUNT = 60
COST = IterationCost(0.0, 0.0, 0.0, 0.0, fixed=0.01, sequence=0.001, prefill=0.02)
ENGINE = SchedulerLimits(
    policy="inflight",
    slots=1024,
    max_num_tokens=8192,
    admission="MAX_UTILIZATION",
    kv_blocks=4000,
    tokens_per_block=32,
)
DRAW = np.random.default_rng(7)
LOAD = OfferedLoad(
    isl=DRAW.integers(10, 400, COUNT),
    osl=DRAW.integers(1, 40, COUNT),  # some have one token, so no ITL
    arrival=np.sort(DRAW.uniform(0.5, 3.0, COUNT)),  # the first request is not due at 0
)
RUN = simulate(ENGINE, LOAD, COST, iterations=True, backend="numpy")


def by_the_load_generator(run: SimulatedRun, first: int = 0) -> Summary:
    """Of the records that the load generator would have kept."""
    records = timings(run)
    return summarise(columns_of(records), whole_window(columns_of(records)), due=np.arange(COUNT) >= first)


def same(one: Any, other: Any) -> None:
    """Two distributions have equal values."""
    assert one.count == other.count > 0
    for name in ("mean", "min", "p50", "p90", "p95", "p99", "max"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=2e-9), name


def test_the_simulator_says_what_the_load_generator_says() -> None:
    expected = by_the_load_generator(RUN)
    found = measure(RUN, ENGINE, SimulatedLevel(LOAD, None, 0, COUNT, True, "x"), overhead=0.0)
    assert found.requests == expected.requests == COUNT
    assert found.requests_rate == pytest.approx(expected.requests_per_s)
    assert found.tokens_rate == pytest.approx(expected.output_tokens_per_s)
    for mine, theirs in ((found.ttft, expected.ttft_s), (found.itl, expected.itl_s), (found.e2e, expected.e2e_s)):
        same(mine, theirs)


def test_the_fit_of_the_performance_model_says_so_too() -> None:
    expected = by_the_load_generator(RUN)
    found = run_trial(
        Trial(LOAD, (0.0, np.inf), 0, COUNT, whole=True), ModelledDeployment(ENGINE, COST), backend="numpy"
    )
    for name in ("window_s", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name
    for name in ("isl", "osl", "ttft_s", "itl_s", "e2e_s"):
        same(getattr(found, name), getattr(expected, name))


def test_sizing_says_so_too() -> None:
    """Of the requests after its warm-up."""
    expected = by_the_load_generator(RUN, first=int(WARM_UP * COUNT))
    one: Any = SimpleNamespace(
        engine=ENGINE, costed=SimpleNamespace(cost=COST, overhead_s=0.0), setup=SimpleNamespace(lanes=1)
    )
    question: Any = SimpleNamespace(isl=LOAD.isl, osl=LOAD.osl)
    found = watch(question, one, LOAD.arrival, 20.0)
    for percent, name in ((50, "p50"), (90, "p90"), (95, "p95"), (99, "p99")):
        for metric, seconds in found.at(percent).items():
            assert seconds == pytest.approx(getattr(getattr(expected, f"{metric}_s"), name), abs=2e-9), (metric, name)
    queue = (RUN.requests.admitted - RUN.requests.arrival)[int(WARM_UP * COUNT) :]
    assert found.queue == pytest.approx(queue.mean())


def test_published_protocols_say_so_too() -> None:
    expected = by_the_load_generator(RUN)
    protocol = Protocol(1, 1.0, ENGINE.policy, ENGINE.admission, ENGINE.max_num_tokens or 0)
    found = _serve(protocol, LOAD, COST, kv_tokens=4000 * 32)
    assert found.requests_s == pytest.approx(expected.requests_per_s)
    assert found.output_tok_s == pytest.approx(expected.output_tokens_per_s)
    for times, theirs in ((found.ttft, expected.ttft_s), (found.itl, expected.itl_s), (found.e2e, expected.e2e_s)):
        for stat, name in (("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p99", "p99")):
            assert _statistic(times, stat) == pytest.approx(getattr(theirs, name), abs=2e-9), (stat, name)


def test_report_and_fit_read_what_the_load_generator_wrote() -> None:
    summary = by_the_load_generator(RUN)
    level = LoadPoint("trace", None, None, summary, ClientHealth(False, "", {}), {}, "")
    result = BenchmarkResult("m", "fp8", "openvino", 1, 1, {"name": "trace"}, {}, {}, {}, {}, "2026-01-02T03:04:05",
                             Slo(), (level,))  # fmt: skip
    read = BenchmarkResult.from_json(result.to_json())
    assert read == result
    measured = from_result(read, Path("benchmark.json")).levels[0]
    assert (measured.ttft_s, measured.itl_s, measured.e2e_s) == (summary.ttft_s, summary.itl_s, summary.e2e_s)
    assert measured.requests_per_s == summary.requests_per_s
    run: Any = SimpleNamespace(result=read, modelled=None)
    row = levels_table(run).rows[0]
    assert f"{summary.requests_per_s:.1f}" in row
    assert f"{1000 * (summary.itl_s.p99 or 0):.1f}" in row


def test_a_client_sees_every_response_later_by_the_overhead() -> None:
    """TTFT and E2E are longer by it, ITL is not, and a whole run ends later by it."""
    at_once, later = (
        run_trial(Trial(LOAD, (0.0, np.inf), 0, COUNT, whole=True), ModelledDeployment(ENGINE, COST, overhead_s=s))
        for s in (0.0, 0.25)
    )
    assert later.window_s == pytest.approx(at_once.window_s + 0.25)
    assert (later.ttft_s.p50, later.e2e_s.p50) == pytest.approx((at_once.ttft_s.p50 + 0.25, at_once.e2e_s.p50 + 0.25))  # type: ignore[operator]
    assert later.itl_s.p50 == pytest.approx(at_once.itl_s.p50)


def test_without_stamps_of_single_tokens_they_count_as_evenly_spaced() -> None:
    """Tokens at 1, 2, 3, 4 and 5 s: 2 of them lie in [2, 4); a token at the end of a window is not inside."""
    from pipelines.domain.summary import RequestColumns, rates

    one = RequestColumns(np.array([0.0]), np.array([1.0]), np.array([5.0]), np.array([8]), np.array([5]))
    assert rates(one, (2.0, 4.0)).output_tokens_per_s == 1.0
    assert rates(one, (0.0, 5.0)).output_tokens_per_s == pytest.approx(4 / 5)
    assert rates(one, one.whole()).output_tokens_per_s == pytest.approx(5 / 5)
