"""Simulated requests as columns, so that one function computes the figures of measured and simulated requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.domain.summary import RequestColumns, Responses
from pipelines.predict.simulator.interface import Requests, SimulatedRun


def request_columns(requests: Requests, *, overhead: float = 0.0, responses: Responses | None = None) -> RequestColumns:
    """Return the requests as seen by the clock of their client.

    Args:
        requests: requests of a run.
        overhead: time a request spends on its way to the engine and back, added after the engine's timestamps.
        responses: times of single tokens, if known.
    """
    return RequestColumns(
        due=requests.arrival,
        first_token=requests.first_token + overhead,
        end=requests.end + overhead,
        isl=requests.isl,
        osl=requests.osl,
        responses=responses,
        admitted=requests.admitted,
    )


class IterationTokens:
    """Token times of a run simulated with iterations; every token is a separate response."""

    def __init__(self, run: SimulatedRun, overhead: float = 0.0) -> None:
        """Read the token times of a run.

        Raises:
            ValueError: the run was simulated without iterations.
        """
        if run.iterations is None or run.stays is None:
            raise ValueError("the run was simulated without iterations")
        given = run.stays.tokens > 0
        self.count: Any = run.requests.osl
        self._ends = run.iterations.start + run.iterations.seconds + overhead
        self._request, self._began, self._tokens = (
            column[given] for column in (run.stays.request, run.stays.began, run.stays.tokens)
        )

    def before(self, time: float) -> Any:
        """Count tokens before a time; see `pipelines.domain.summary.Responses.before`."""
        done = np.searchsorted(self._ends, time)  # iterations that had ended by then
        came = np.clip(done - self._began, 0, self._tokens)
        return np.bincount(self._request, weights=came, minlength=len(self.count)).astype(np.int64)

    def gaps(self, which: Any) -> Any:
        """Return no gaps: there would be one per token, and no caller needs them for a simulation."""
        return np.empty(0)
