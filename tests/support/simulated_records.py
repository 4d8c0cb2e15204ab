"""Convert a simulated run to token times, and to request records like those of the load generator."""

from typing import Any

import numpy as np

from pipelines.domain.summary import SECOND
from pipelines.predict.simulator.interface import CONTEXT, EOS, GEN, SimulatedRun
from tests.support.load_records import RequestTiming


def stamps(run: SimulatedRun) -> list[Any]:
    """Return the arrival times of each request's tokens, float64[tokens that arrived].

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


def cells_over_time(run: SimulatedRun, slots: int) -> Any:
    """Return int8[iterations, slots]: the activity of each slot (0 NoOp, 1 Context, 2 Gen, 3 EoS)."""
    assert run.iterations is not None
    assert run.stays is not None
    stays = run.stays
    cells = np.zeros((len(run.iterations.start), slots), dtype=np.int8)
    last_stay = dict(zip(stays.request.tolist(), range(len(stays.request)), strict=True))
    rows = zip(stays.request, stays.slot, stays.joined, stays.began, stays.last, strict=True)
    for number, (request, slot, joined, began, last) in enumerate(rows):
        context = (last if began < 0 else began) + 1
        cells[joined:context, slot] = CONTEXT
        cells[context : last + 1, slot] = GEN
        if last_stay[request] == number and not np.isnan(run.requests.end[request]) and context <= last:
            cells[last, slot] = EOS
    return cells


def timings(run: SimulatedRun) -> list[RequestTiming]:
    """Return a record for every finished request, with one response per token. One tick counts as a second.

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
    """Return the mean gap between neighbouring tokens, without the gap before a request's last token.

    This is the inter-token latency of the didactic tick model, which counts the last token as the end and not as a
    token. Unfinished requests count with the tokens that they have.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    kept = [
        np.diff(times[:-1] if len(times) == osl else times)
        for times, osl in zip(stamps(run), run.requests.osl, strict=True)
    ]
    return float(np.concatenate(kept).mean()) if sum(map(len, kept)) else float("nan")
