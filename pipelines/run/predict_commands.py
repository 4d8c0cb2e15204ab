"""The commands `size` and `simulate`: predictions about an engine that a plan accepts."""

from collections.abc import Sequence

from pipelines.plan.candidates import judge_of
from pipelines.predict.simulate import simulate_command
from pipelines.predict.sizing import size_command


def size(overrides: Sequence[str]) -> int:
    """Size a fleet of engines that a plan accepts."""
    return size_command.size(overrides, judge_of)


def simulate(overrides: Sequence[str]) -> int:
    """Simulate an engine that a plan accepts."""
    return simulate_command.simulate(overrides, judge_of)
