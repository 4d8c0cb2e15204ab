"""The trace for Perfetto: of the trace event format, one track per slot, nothing on top of another."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest

from pipelines.predict.simulate.perfetto import trace
from pipelines.predict.simulator.cost import TickCost
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import simulate

NUMBER = {"type": "number", "minimum": 0}
COMMON = {"name": {"type": "string", "minLength": 1}, "pid": {"type": "integer"}, "tid": {"type": "integer"}}
NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


def event(phase: str, **properties: Any) -> dict[str, Any]:
    every = {"ph": {"const": phase}, **COMMON, **properties}
    return {"type": "object", "required": list(every), "properties": every}


COMPLETE = event("X", ts=NUMBER, dur={"type": "number", "exclusiveMinimum": 0}, cat={"type": "string"}, args={})
COUNTER = event("C", ts=NUMBER, args={"type": "object", "additionalProperties": NUMBER, "minProperties": 1})
METADATA = event("M", name={"enum": ["process_name", "thread_name"]}, args=NAMED)
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {"type": "array", "items": {"oneOf": [COMPLETE, COUNTER, METADATA]}},
    },
}
"""What the trace event format asks of the phases that are used ("Trace Event Format", chapters 2 and 3)."""


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    osl = np.random.default_rng(1).integers(1, 12, 40)
    load = OfferedLoad(np.full(40, 64), osl, np.zeros(40))
    runs = {
        policy: simulate(SchedulerLimits(policy, slots=3), load, TickCost(), iterations=True, backend="numpy")
        for policy in ("static", "inflight")
    }
    return json.loads(json.dumps(trace(runs, "ticks")))


def test_it_is_of_the_trace_event_format(made) -> None:
    import jsonschema

    jsonschema.validate(made, SCHEMA)


def test_every_run_is_a_process_with_a_named_track_per_slot(made) -> None:
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in made["traceEvents"] if e["ph"] == "M"]
    assert names == [
        (kind, process, slot, f"slot {slot}" if slot else policy)
        for process, policy in ((1, "static"), (2, "inflight"))
        for slot, kind in ((0, "process_name"), (1, "thread_name"), (2, "thread_name"), (3, "thread_name"))
    ]


def test_nothing_overlaps_on_a_track(made) -> None:
    def track(e: dict[str, Any]) -> tuple[int, int]:
        return e["pid"], e["tid"]

    spans = sorted((e for e in made["traceEvents"] if e["ph"] == "X"), key=lambda e: (*track(e), e["ts"]))
    for _, of_track in groupby(spans, key=track):
        for before, after in pairwise(of_track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_a_tick_is_a_millisecond_and_requests_count_from_1(made) -> None:
    first = next(e for e in made["traceEvents"] if e["ph"] == "X" and e["name"] == "Context 1")
    assert (first["ts"], first["dur"]) == (0, 6000)  # three prompts of 2 ticks
    assert {e["args"]["request"] for e in made["traceEvents"] if e["ph"] == "X" and e["pid"] == 1} == set(range(1, 41))


def test_counters_start_with_the_queue_and_end_with_nothing(made) -> None:
    queue = [
        e for e in made["traceEvents"] if e["ph"] == "C" and e["name"] == "requests in the queue" and e["pid"] == 1
    ]
    assert (queue[0]["ts"], queue[0]["args"]["value"]) == (0, 37)
    assert queue[-1]["args"]["value"] == 0
    assert [e["ts"] for e in queue] == sorted(e["ts"] for e in queue)
