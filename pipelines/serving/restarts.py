"""How often, and after which pause, a server that ended by itself is started again."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
STEADY_S = 600.0
"""A server that ran this long was healthy: the count of its restarts begins anew."""


class RestartBudget:
    """Counts restarts in a row.

    Attributes:
        used: restarts since the server last ran for `STEADY_S`.
    """

    def __init__(self, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = allowed
        self.used = 0
        self._clock = clock
        self._ready = clock()

    def take(self) -> float | None:
        """Return how many seconds to wait before the next restart, or None when there is none left."""
        if self._clock() - self._ready >= STEADY_S:
            self.used = 0
        if self.used >= self.allowed:
            return None
        self.used += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self.used - 1), LONGEST_PAUSE_S)

    def ready(self) -> None:
        """Note that the server is ready again."""
        self._ready = self._clock()
