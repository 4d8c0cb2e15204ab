"""Measure how slow the machine currently is, so that limits on time also hold on a slow or busy machine."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time, sleep

QUIET_S = 0.034
"""CPU seconds of `_work` on the machine on which the limits were set, with nothing else running."""


def _work() -> float:
    start = process_time()
    sum({str(number): number for number in range(200_000)}.values())
    return process_time() - start


def slowdown() -> float:
    """Return the CPU time of a fixed piece of work, as a multiple of its time on the quiet machine."""
    return min(_work() for _ in range(3)) / QUIET_S


def as_if_quiet(timed: Callable[[], float], runs: int) -> float:
    """Return the best of several timings, each corrected by the machine's speed just before and after it.

    Args:
        timed: does the work once and returns its CPU time in seconds.
        runs: number of runs; the first may compile or fill caches.

    Returns:
        CPU seconds on the quiet machine.
    """
    before, found = slowdown(), []
    for _ in range(runs):
        seconds = timed()
        after = slowdown()
        found.append(2 * seconds / (before + after))
        before = after
    return min(found)


@contextmanager
def oversleeping() -> Iterator[list[float]]:
    """While the block runs, note by how many seconds each sleep of a millisecond took longer."""
    found, over = list[float](), threading.Event()

    def watch() -> None:
        while not over.is_set():
            start = perf_counter()
            sleep(0.001)
            found.append(perf_counter() - start - 0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
