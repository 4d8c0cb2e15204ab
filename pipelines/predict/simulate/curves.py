"""Curves of throughput and latency against the load, one per policy."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import summarise
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.loads import SimulatedLevel, closed_level
from pipelines.predict.simulate.pictures import Point, PolicyCurve
from pipelines.predict.simulate.reasons import words
from pipelines.predict.simulate.simulated import Simulated
from pipelines.predict.simulate.table import NAMES
from pipelines.predict.simulator.interface import SchedulerLimits
from pipelines.predict.simulator.records import IterationTokens, request_columns

MOST_USERS = 256


def curves_of(case: SimulationCase, results: Sequence[Simulated]) -> tuple[list[PolicyCurve], str]:
    """Return the curves and the name of their horizontal axis.

    If several loads are given, they are the points; otherwise the same requests are simulated as closed loops of 1, 2,
    4, ... users, up to four times the number of slots.
    """
    several = len({each.outcome.load for each in results}) > 1
    if not several:
        base = results[-1].level
        users = [2**power for power in range(9) if 2**power <= min(4 * case.slots, MOST_USERS)]
        return [_swept(case, engine, base, users) for engine in case.engines], "concurrency"
    _, _, scale = words(case.unit)
    curves = []
    for engine in case.engines:
        own = [each.outcome for each in results if each.engine is engine]
        points = [
            Point(
                load=float(o.concurrency or o.request_rate or 0),
                requests=o.requests_rate * scale,
                tokens=o.tokens_rate * scale,
                ttft=_both(o.ttft),
                e2e=_both(o.e2e),
            )
            for o in own
        ]
        curves.append(PolicyCurve(NAMES[engine.policy], tuple(sorted(points, key=lambda point: point.load))))
    closed = results[0].outcome.concurrency is not None
    return curves, "concurrency" if closed else f"requests per {'tick' if case.unit == 'ticks' else 's'}"


def _both(found: Distribution) -> tuple[float, float] | None:
    return None if found.p50 is None or found.p95 is None else (found.p50, found.p95)


def _swept(case: SimulationCase, engine: SchedulerLimits, base: SimulatedLevel, users: Sequence[int]) -> PolicyCurve:
    return PolicyCurve(
        NAMES[engine.policy], tuple(_point(case, engine, closed_level(base, count, case)) for count in users)
    )


def _point(case: SimulationCase, engine: SchedulerLimits, level: SimulatedLevel) -> Point:
    from pipelines.predict.simulator.run import simulate

    run = simulate(engine, level.requests, case.cost, iterations=True)
    window, (_, _, scale) = level.window(run, case.overhead), words(case.unit)
    tokens = IterationTokens(run, case.overhead)
    requests = request_columns(run.requests, overhead=case.overhead, responses=tokens)
    found = summarise(requests, window.bounds, due=window.due(run))
    return Point(
        load=float(level.load.concurrency or 0),
        requests=found.requests_per_s * scale,
        tokens=found.output_tokens_per_s * scale,
        ttft=_both(found.ttft_s),
        e2e=_both(found.e2e_s),
    )
