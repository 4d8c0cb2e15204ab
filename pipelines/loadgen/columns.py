"""Convert request records to columns, the form that `pipelines.domain.summary` reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from pipelines.domain.summary import SECOND, RequestColumns, RequestTiming


class Chunks:
    """Arrival times of the responses of requests, ns."""

    def __init__(self, timings: Sequence[RequestTiming]) -> None:
        self.count: Any = np.array([len(t.chunk_ns) for t in timings], dtype=np.int64)
        stamps = chain.from_iterable(t.chunk_ns for t in timings)
        self._stamps: Any = np.fromiter(stamps, np.float64, int(self.count.sum()))
        self._request: Any = np.repeat(np.arange(len(timings)), self.count)

    def before(self, time: float) -> Any:
        """See `pipelines.domain.summary.Responses.before`."""
        return np.bincount(self._request[self._stamps < time], minlength=len(self.count))

    def gaps(self, which: Any) -> Any:
        """See `pipelines.domain.summary.Responses.gaps`."""
        kept = which[self._request]
        stamps, request = self._stamps[kept], self._request[kept]
        return np.diff(stamps)[request[1:] == request[:-1]]


def columns_of(timings: Sequence[RequestTiming]) -> RequestColumns:
    """Convert records to columns. A float64 holds ns exactly for 104 days."""
    return RequestColumns(
        due=np.array([t.intended_ns for t in timings], dtype=np.float64),
        first_token=np.array([np.nan if (at := t.first_token_ns) is None else at for t in timings], dtype=np.float64),
        end=np.array([t.end_ns for t in timings], dtype=np.float64),
        isl=np.array([t.isl for t in timings], dtype=np.int64),
        osl=np.array([t.osl for t in timings], dtype=np.int64),
        errors=tuple(t.error for t in timings),
        responses=Chunks(timings),
        per_second=SECOND,
    )
