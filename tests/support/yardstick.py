"""How slow the machine is at this moment, so that a limit on processor time holds on a slow or a busy one too."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

QUIET_S = 0.034
"""Processor seconds of `_work` on the machine on which the limits were set, with nothing else running."""


def _work() -> float:
    start = process_time()
    sum({str(number): number for number in range(200_000)}.values())
    return process_time() - start


def slowdown() -> float:
    """Processor time of a fixed piece of work here, as a multiple of what it takes on the quiet machine."""
    return min(_work() for _ in range(3)) / QUIET_S


def as_if_quiet(timed: Callable[[], float], runs: int) -> float:
    """The best of several timings, each corrected by the machine's speed just before and after it.

    Args:
        timed: does the work once; returns its processor time, seconds.
        runs: how often; the first may compile or fill caches.

    Returns:
        Seconds of processor time on the quiet machine.
    """
    before, found = slowdown(), []
    for _ in range(runs):
        seconds = timed()
        after = slowdown()
        found.append(2 * seconds / (before + after))
        before = after
    return min(found)
