"""The simulator against one that does every iteration the plain way, and its two backends against each other."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.predict.simulator.interface import (
    REFUSALS,
    Iterations,
    OfferedLoad,
    Requests,
    SchedulerLimits,
    SimulatedRun,
)
from pipelines.predict.simulator.run import Cost, simulate
from tests.support.plain_simulator import PlainSimulator
from tests.support.random_loads import simulations

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def assert_same(left: SimulatedRun, right: SimulatedRun) -> None:
    for table in (Requests, Iterations):
        a, b = (getattr(run, table.__name__.lower()) for run in (left, right))
        for field in fields(table) if a is not None and b is not None else ():
            np.testing.assert_allclose(getattr(a, field.name), getattr(b, field.name), **CLOSE, err_msg=field.name)
    assert left.request_iterations == right.request_iterations
    assert left.end == pytest.approx(right.end, rel=1e-9)


@settings(max_examples=150)
@given(simulations())
def test_every_request_and_iteration_is_as_the_plain_simulator_says(
    case: tuple[SchedulerLimits, OfferedLoad, Cost],
) -> None:
    plain = PlainSimulator(*case).run()
    run = simulate(*case, iterations=True, backend="numpy")
    found = run.requests
    np.testing.assert_allclose(found.arrival, [r.arrival for r in plain.requests], **CLOSE)
    np.testing.assert_allclose(found.admitted, [r.admitted for r in plain.requests], **CLOSE)
    np.testing.assert_allclose(found.first_token, [r.stamps[0] for r in plain.requests], **CLOSE)
    np.testing.assert_allclose(found.end, [r.stamps[-1] for r in plain.requests], **CLOSE)
    assert found.preemptions.tolist() == [r.preemptions for r in plain.requests]
    assert found.produced.tolist() == found.osl.tolist()
    assert run.iterations is not None
    for field in fields(Iterations):
        expected = [getattr(row, field.name) for row in plain.rows]
        if field.name == "refused":
            expected = [REFUSALS.index(reason) for reason in expected]
        np.testing.assert_allclose(getattr(run.iterations, field.name), expected, **CLOSE, err_msg=field.name)


@settings(max_examples=150)
@given(simulations())
def test_skipping_ahead_changes_nothing(case: tuple[SchedulerLimits, OfferedLoad, Cost]) -> None:
    assert_same(simulate(*case, iterations=True, backend="numpy"), simulate(*case, backend="numpy"))


@settings(max_examples=150)
@given(simulations())
def test_the_compiled_loop_says_what_the_plain_one_says(case: tuple[SchedulerLimits, OfferedLoad, Cost]) -> None:
    pytest.importorskip("numba")
    assert_same(simulate(*case, backend="numba"), simulate(*case, backend="numpy"))
    assert_same(simulate(*case, iterations=True, backend="numba"), simulate(*case, iterations=True, backend="numpy"))


@settings(max_examples=100)
@given(simulations(), st.floats(0.01, 60))
def test_a_run_that_is_cut_is_the_beginning_of_the_whole_run(
    case: tuple[SchedulerLimits, OfferedLoad, Cost], until: float
) -> None:
    whole = simulate(*case, backend="numpy").requests
    for iterations in (False, True):
        cut = simulate(*case, until=until, iterations=iterations, backend="numpy").requests
        for name in ("first_token", "end"):
            times = getattr(whole, name)
            expected = np.where(times < until, times, np.nan)
            np.testing.assert_allclose(getattr(cut, name), expected, **CLOSE)
