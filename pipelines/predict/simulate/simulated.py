"""Run every policy under every load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.predict.simulate.capacity import capacity, offered
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.loads import SimulatedLevel
from pipelines.predict.simulate.outcome import PolicyOutcome, measure
from pipelines.predict.simulator.interface import SchedulerLimits, SimulatedRun
from pipelines.settings.root import Settings


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a policy under a load."""

    engine: SchedulerLimits
    level: SimulatedLevel
    run: SimulatedRun
    outcome: PolicyOutcome


def run_all(settings: Settings, case: SimulationCase, levels: Sequence[SimulatedLevel]) -> list[Simulated]:
    """Simulate every policy under every load, in the order of the table."""
    from pipelines.predict.simulator.run import simulate as run_load

    found = []
    for level in levels:
        for engine in case.engines:
            run = run_load(engine, level.requests, case.cost, until=settings.simulator.until, iterations=True)
            outcome = measure(run, engine, level.load, level.window(run, case.overhead), case.overhead)
            rates = replace(outcome, offered=offered(level), capacity=capacity(level, engine, case.cost, run))
            found.append(Simulated(engine, level, run, rates))
    return found
