"""The trace for Perfetto: of the trace event format, one track per slot, nothing on top of another."""

import json
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest

from pipelines.predict.simulate.files import trace
from pipelines.predict.simulator.interface import OfferedLoad, SchedulerLimits
from pipelines.predict.simulator.run import TickCost, simulate

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
    tracks = ("why requests wait", "slot 1", "slot 2", "slot 3")
    assert names == [
        (kind, process, track, name)
        for process, policy in ((1, "static"), (2, "inflight"))
        for kind, track, name in (
            ("process_name", 0, policy),
            *(("thread_name", track, name) for track, name in enumerate(tracks)),
        )
    ]


def waits(made: dict[str, Any], process: int) -> list[dict[str, Any]]:
    return [e for e in made["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, 0)]


def test_it_shows_why_requests_waited(made) -> None:
    """40 requests, 3 slots: static batching waits for its batch, in-flight batching for a slot."""
    static, inflight = waits(made, 1), waits(made, 2)
    assert {e["name"] for e in static} == {"slots", "batch"}  # the iteration that fills a batch is stopped by the slots
    assert {(e["name"], e["args"]["because"]) for e in inflight} == {("slots", "all slots were in use")}
    assert inflight[0]["ts"] == 0
    assert inflight[0]["args"]["most in the queue"] == 37


def test_reasons_end_with_the_queue(made) -> None:
    queue = [
        e for e in made["traceEvents"] if e["ph"] == "C" and e["name"] == "requests in the queue" and e["pid"] == 2
    ]
    empty = next(e["ts"] for e in queue if e["args"]["value"] == 0)
    last = waits(made, 2)[-1]
    assert last["ts"] + last["dur"] == pytest.approx(empty)


def test_a_pause_between_two_requests_is_no_reason_to_wait() -> None:
    """One slot; two requests at 0, two at 100: the second of each waits, and nobody in between."""
    load = OfferedLoad(np.full(4, 8), np.full(4, 2), np.array([0.0, 0.0, 100.0, 100.0]))
    run = simulate(SchedulerLimits("inflight", slots=1), load, TickCost(), iterations=True, backend="numpy")
    first, second = waits(trace({"inflight": run}, "ticks"), 1)
    assert first["ts"] + first["dur"] < 100_000 <= second["ts"]


def test_a_request_says_how_long_it_waited(made) -> None:
    waited = {e["args"]["request"]: e["args"]["waited"] for e in made["traceEvents"] if e["ph"] == "X" and e["tid"]}
    assert waited[1] == 0
    assert waited[40] > 0


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
    assert {e["args"]["request"] for e in made["traceEvents"] if e["ph"] == "X" and e["pid"] == 1 and e["tid"]} == set(
        range(1, 41)
    )


def test_counters_start_with_the_queue_and_end_with_nothing(made) -> None:
    queue = [
        e for e in made["traceEvents"] if e["ph"] == "C" and e["name"] == "requests in the queue" and e["pid"] == 1
    ]
    assert (queue[0]["ts"], queue[0]["args"]["value"]) == (0, 37)
    assert queue[-1]["args"]["value"] == 0
    assert [e["ts"] for e in queue] == sorted(e["ts"] for e in queue)
