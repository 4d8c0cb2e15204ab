"""Export runs as a trace for ui.perfetto.dev and chrome://tracing, in the JSON trace event format.

One process per run, with a track that says why requests wait, one track per slot, and counters for the queue, the batch
and the KV cache. Format: "Trace Event
Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; Perfetto reads complete events ("X"),
counters ("C") and metadata ("M").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipelines.predict.simulate.outcome import SHORT, WHY
from pipelines.predict.simulator.interface import NAMES, REFUSALS, Iterations, SimulatedRun, boxes

MICROSECONDS = {"s": 1e6, "ticks": 1e3}
"""Trace units per unit of time; a tick is shown as a millisecond."""


def trace(runs: Mapping[str, SimulatedRun], unit: str) -> dict[str, Any]:
    """Build the trace as plain JSON values.

    Args:
        runs: runs simulated with iterations, by name.
        unit: unit of their time, "s" or "ticks".
    """
    scale = MICROSECONDS[unit]
    events: list[dict[str, Any]] = []
    for process, (name, run) in enumerate(runs.items(), 1):
        events += [
            _named("process_name", process, 0, name),
            *_reasons(run, process, scale),
            *_slots(run, process, scale),
            *_counters(run, process, scale),
        ]
    note = {"unit": unit, "shown as": f"1 {unit.rstrip('s') or unit} = {scale:g} µs"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": note}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _reasons(run: SimulatedRun, process: int, scale: float) -> Iterator[dict[str, Any]]:
    """Build one event per stretch of iterations in which the same thing kept the first request of the queue waiting.

    They are on thread 0, above the slots. Where the engine stands idle between two iterations, nobody waits.
    """
    assert run.iterations is not None  # runs without iterations have failed in boxes() already
    table = run.iterations
    yield _named("thread_name", process, 0, "why requests wait")
    ends = table.start + table.seconds
    for first, last in _stretches(table):
        reason = REFUSALS[int(table.refused[first])]
        if reason:
            yield {
                "name": SHORT[reason],
                "cat": "waiting",
                "ph": "X",
                "ts": float(table.start[first]) * scale,
                "dur": float(ends[last] - table.start[first]) * scale,
                "pid": process,
                "tid": 0,
                "args": {"because": WHY[reason], "most in the queue": int(table.queue[first : last + 1].max())},
            }


def _stretches(table: Iterations) -> Iterator[tuple[int, int]]:
    """Yield first and last iteration of every stretch without a pause in which `refused` is the same."""
    begins = np.append(True, (np.diff(table.refused) != 0) | (table.start[1:] > (table.start + table.seconds)[:-1]))
    firsts = np.flatnonzero(begins)
    yield from zip(firsts.tolist(), [*(firsts[1:] - 1).tolist(), len(begins) - 1], strict=True)


def _slots(run: SimulatedRun, process: int, scale: float) -> Iterator[dict[str, Any]]:
    """Build the events of the requests, on the track of their slot."""
    rows, found = run.requests, boxes(run)
    for slot in sorted({box.slot for box in found}):
        yield _named("thread_name", process, slot + 1, f"slot {slot + 1}")
    for box in found:
        assert box.request is not None  # empty slots have no boxes
        yield {
            "name": f"{NAMES[box.kind]} {box.request + 1}",
            "cat": NAMES[box.kind],
            "ph": "X",
            "ts": box.start * scale,
            "dur": (box.end - box.start) * scale,
            "pid": process,
            "tid": box.slot + 1,
            "args": {
                "request": box.request + 1,
                "waited": float(rows.admitted[box.request] - rows.arrival[box.request]) * scale / 1e3,
                "isl": int(rows.isl[box.request]),
                "osl": int(rows.osl[box.request]),
                "preemptions": int(rows.preemptions[box.request]),
            },
        }


def _counters(run: SimulatedRun, process: int, scale: float) -> Iterator[dict[str, Any]]:
    """Build counter events where a value changes, stamped at the start of the iteration; all are 0 at the end."""
    assert run.iterations is not None  # runs without iterations have failed in boxes() already
    table = run.iterations
    for name, values in (
        ("requests in the queue", table.queue),
        ("decoding requests", table.decoding),
        ("tokens of the iteration", table.tokens),
        ("KV blocks in use", table.kv_blocks),
    ):
        changes = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)
        for index in changes.tolist():
            yield _count(name, process, float(table.start[index]) * scale, float(values[index]))
        yield _count(name, process, run.end * scale, 0.0)


def _count(name: str, process: int, at: float, value: float) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": at, "pid": process, "tid": 0, "args": {"value": value}}
