"""Simulated requests as columns, so that one function computes the figures of measured and of simulated requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.domain.summary import RequestColumns, Responses
from pipelines.predict.simulator.interface import Requests, SimulatedRun


def request_columns(requests: Requests, *, overhead: float = 0.0, responses: Responses | None = None) -> RequestColumns:
    """Requests on the clock of their client.

    Args:
        requests: of a run.
        overhead: of a request on its way to the engine and back; it comes after the stamps of the engine.
        responses: the single tokens, where they are known.
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
    """When the tokens of a run came that was simulated with iterations; every token is a response of its own."""

    def __init__(self, run: SimulatedRun, overhead: float = 0.0) -> None:
        """Read a run.

        Raises:
            ValueError: it was simulated without iterations.
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
        """See `pipelines.domain.summary.Responses.before`."""
        done = np.searchsorted(self._ends, time)  # iterations that ended before
        came = np.clip(done - self._began, 0, self._tokens)
        return np.bincount(self._request, weights=came, minlength=len(self.count)).astype(np.int64)

    def gaps(self, which: Any) -> Any:
        """None: they are as many as there are tokens, and no simulation is asked for them."""
        return np.empty(0)
