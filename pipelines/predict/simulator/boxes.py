"""Turn the stays of requests in slots into boxes that can be drawn or exported as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.predict.simulator.interface import SimulatedRun

NOOP, CONTEXT, GEN, EOS = range(4)
"""Activities of a slot in an iteration, numbered as in `Run.slots_over_time`."""
NAMES = ("NoOp", "Context", "Gen", "EoS")


@dataclass(frozen=True, slots=True)
class Box:
    """A stretch of time in which one request did the same thing in one slot.

    Attributes:
        slot: index, from 0.
        kind: NOOP, CONTEXT, GEN or EOS.
        start: time.
        end: time.
        request: index, None when the slot was empty.
    """

    slot: int
    kind: int
    start: float
    end: float
    request: int | None


def boxes(run: SimulatedRun) -> list[Box]:
    """Return the boxes of all requests, in the order they left their slots; empty slots have none.

    Raises:
        ValueError: the run was simulated without iterations.
    """
    if run.iterations is None or run.stays is None:
        raise ValueError("the run was simulated without iterations")
    stays, ended = run.stays, np.isfinite(run.requests.end)
    begin = run.iterations.start
    finish = begin + run.iterations.seconds
    last_of = dict(zip(stays.request.tolist(), range(len(stays.request)), strict=True))
    found: list[Box] = []
    columns = (stays.request, stays.slot, stays.joined, stays.began, stays.last)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (request, slot, joined, began, last) in enumerate(rows):
        context = min(last if began < 0 else began, len(begin) - 1)
        last = min(last, len(begin) - 1)
        eos = last if ended[request] and last_of[request] == number and last > context else last + 1
        parts = ((CONTEXT, joined, context), (GEN, context + 1, eos - 1), (EOS, eos, last))
        found += [
            Box(slot, kind, float(begin[first]), float(finish[final]), request)
            for kind, first, final in parts
            if first <= final
        ]
    return found


def with_gaps(found: Iterable[Box], slots: int, until: float) -> list[Box]:
    """Return the boxes of the first `slots` slots that begin before `until`, by slot, with NoOp in all gaps."""
    rows: list[list[Box]] = [[] for _ in range(slots)]
    for box in found:
        if box.slot < slots and box.start < until:
            rows[box.slot].append(box)
    return [box for slot, row in enumerate(rows) for box in _filled(slot, sorted(row, key=_start), until)]


def _start(box: Box) -> float:
    return box.start


def _filled(slot: int, row: Sequence[Box], until: float) -> list[Box]:
    found, now = [], 0.0
    for box in row:
        if box.start > now:
            found.append(Box(slot, NOOP, now, box.start, None))
        found.append(box)
        now = box.end
    if now < until:
        found.append(Box(slot, NOOP, now, until, None))
    return found
