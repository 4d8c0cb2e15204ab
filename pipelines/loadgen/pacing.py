"""Wait for an exact moment inside an event loop.

Timers of event loops are accurate to a millisecond. So the loop sleeps until shortly before the moment and then spins,
still reading responses, until it has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns as now

_SPIN_NS = 1_500_000
_SPIN_SHARE = 0.15
_LOOK_S = 0.25


class Pacer:
    """Waits for absolute times, and counts the CPU time spent on waiting."""

    def __init__(self, mean_gap_ns: float) -> None:
        """Prepare.

        Args:
            mean_gap_ns: expected between two waits; spinning takes at most a seventh of it.
        """
        self._spin_ns = min(_SPIN_NS, int(_SPIN_SHARE * mean_gap_ns))
        self.spun_ns = 0

    async def until(self, due_ns: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at `due_ns` on CLOCK_MONOTONIC, at once if it has passed, or soon after `stopped()` becomes true."""
        while (left := due_ns - now() - self._spin_ns) > 0 and not stopped():
            await asyncio.sleep(min(left / 1e9, _LOOK_S))
        start = now()
        if start >= due_ns:
            return
        while now() < due_ns and not stopped():
            await asyncio.sleep(0)
        self.spun_ns += now() - start
