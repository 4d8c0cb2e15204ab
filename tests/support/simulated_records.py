"""Single tokens of a simulated run, and its requests as the records that a load generator keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.domain.summary import SECOND
from pipelines.domain.timing import RequestTiming
from pipelines.predict.simulator.interface import SimulatedRun


def stamps(run: SimulatedRun) -> list[Any]:
    """float64[tokens that came] per request: when its tokens came.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    if run.iterations is None or run.stays is None:
        raise ValueError("the run was simulated without iterations")
    ends = run.iterations.start + run.iterations.seconds
    found: list[list[Any]] = [[] for _ in run.requests.osl]
    rows = zip(run.stays.request.tolist(), run.stays.began.tolist(), run.stays.tokens.tolist(), strict=True)
    for request, began, tokens in rows:
        if tokens:
            found[request].append(ends[began : began + tokens])
    return [np.concatenate(parts) if parts else np.empty(0) for parts in found]


def timings(run: SimulatedRun) -> list[RequestTiming]:
    """A record for every request that ended; every token is a response of its own. One tick counts as a second.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    found = []
    for index, times in enumerate(stamps(run)):
        if len(times) < run.requests.osl[index]:
            continue
        chunks = tuple(np.rint(times * SECOND).astype(np.int64).tolist())
        sent, isl = round(run.requests.arrival[index] * SECOND), int(run.requests.isl[index])
        found.append(RequestTiming(index, sent, sent, chunks[0], chunks[-1], isl, len(chunks), chunks))
    return found


def gap_before_last(run: SimulatedRun) -> float:
    """Mean gap between neighbouring tokens, that before a request's last token left out.

    It is the inter-token latency of the didactic tick model, which notes the last token as the end and not as a token.
    Requests that had not ended count with the tokens they had.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    kept = [
        np.diff(times[:-1] if len(times) == osl else times)
        for times, osl in zip(stamps(run), run.requests.osl, strict=True)
    ]
    return float(np.concatenate(kept).mean()) if sum(map(len, kept)) else float("nan")
