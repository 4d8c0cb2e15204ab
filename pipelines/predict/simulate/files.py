"""Write the files of a simulation: tables, curves, pictures, a trace, and a page that animates it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from pipelines.document.blocks import Figure
from pipelines.document.canvas import DARK, LIGHT, variables
from pipelines.document.show import csv_text
from pipelines.domain.benchmark import Distribution
from pipelines.domain.summary import CONVENTIONS
from pipelines.host.files import write_bytes, write_json
from pipelines.predict.simulate.case import NAMES, SimulationCase, asked
from pipelines.predict.simulate.loads import Simulated, closed_level, run_one
from pipelines.predict.simulate.outcome import SHORT, WHY, PolicyOutcome, words
from pipelines.predict.simulate.pictures import DrawnRun, Point, PolicyCurve, curves_picture, slots_picture
from pipelines.predict.simulator.interface import NAMES as ACTIVITIES
from pipelines.predict.simulator.interface import REFUSALS, Iterations, Requests, SimulatedRun, boxes
from pipelines.settings.root import Settings

# Tables of simulated requests and iterations as CSV.

REQUEST, ITERATION = (tuple(field.name for field in fields(kind)) for kind in (Requests, Iterations))
Named = Sequence[tuple[str, str, SimulatedRun]]
"""(policy, load, run)."""


def requests_csv(runs: Named) -> bytes:
    """Write one row per request, requests and slots numbered from 1; cells of events that did not happen are empty."""
    rows = (
        (name, load, index, *row, "" if slot == -1 else slot + 1)
        for name, load, run in runs
        for index, (*row, slot) in enumerate(_columns(run.requests, REQUEST), 1)
    )
    return csv_text(("policy", "load", "request", *REQUEST), rows).encode()


def iterations_csv(runs: Named, unit: str) -> bytes:
    """Write one row per iteration; `refused` is what kept the first request of the queue from a slot."""
    head = tuple("ticks" if name == "seconds" and unit == "ticks" else name for name in ITERATION)
    at = ITERATION.index("refused")
    rows = (
        (name, load, *row[:at], REFUSALS[int(row[at])], *row[at + 1 :])
        for name, load, run in runs
        for row in _columns(run.iterations, ITERATION)
    )
    return csv_text(("policy", "load", *head), rows).encode()


def _columns(table: Any, names: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    columns = (np.asarray(getattr(table, name)).tolist() for name in names)
    for row in zip(*columns, strict=True):
        yield tuple(_cell(value) for value in row)


def _cell(value: float) -> float | str:
    """Format a cell: NaN is empty, whole numbers have no decimal point."""
    if value != value:
        return ""
    return int(value) if value == int(value) else value


# Curves of throughput and latency against the load, one per policy.

MOST_USERS = 256


def curves_of(case: SimulationCase, results: Sequence[Simulated]) -> tuple[list[PolicyCurve], str]:
    """Return the curves and the name of their horizontal axis.

    If several loads are given, they are the points; otherwise the same requests are simulated as closed loops of 1, 2,
    4, ... users, up to four times the number of slots.
    """
    _, _, scale = words(case.unit)
    if len({each.outcome.load for each in results}) == 1:
        base = results[-1].level
        users = [2**power for power in range(9) if 2**power <= min(4 * case.slots, MOST_USERS)]
        levels = [closed_level(base, count, case) for count in users]
        outcomes = [[run_one(engine, level, case).outcome for level in levels] for engine in case.engines]
        axis = "concurrency"
    else:
        outcomes = [[each.outcome for each in results if each.engine is engine] for engine in case.engines]
        per = f"requests per {'tick' if case.unit == 'ticks' else 's'}"
        axis = per if results[0].outcome.concurrency is None else "concurrency"
    curves = []
    for engine, own in zip(case.engines, outcomes, strict=True):
        points = sorted((_point(outcome, scale) for outcome in own), key=lambda point: point.load)
        curves.append(PolicyCurve(NAMES[engine.policy], tuple(points)))
    return curves, axis


def _point(outcome: PolicyOutcome, scale: float) -> Point:
    return Point(
        load=float(outcome.concurrency or outcome.request_rate or 0),
        requests=outcome.requests_rate * scale,
        tokens=outcome.tokens_rate * scale,
        ttft=_both(outcome.ttft),
        e2e=_both(outcome.e2e),
    )


def _both(latency: Distribution) -> tuple[float, float] | None:
    return None if latency.p50 is None or latency.p95 is None else (latency.p50, latency.p95)


# Write the files of a simulation: tables, pictures, trace, page.

DRAWN_TICKS = 100.0
DRAWN_ANSWERS = 2.5
"""Default time span of the picture of the slots: ticks, or this multiple of the median stay in a slot if that is
longer, so that answers end within it; where time is in seconds, a multiple of the median E2E."""


def write_all(
    folder: Path, settings: Settings, case: SimulationCase, results: Sequence[Simulated]
) -> Iterator[tuple[str, Path]]:
    """Write all files, yielding names and paths of those that people open as soon as they exist."""
    named = [(NAMES[each.engine.policy], each.level.title, each.run) for each in results]
    write_bytes(folder / "requests.csv", requests_csv(named))
    write_bytes(folder / "iterations.csv", iterations_csv(named, case.unit))
    drawn = _drawn(results)
    curves, axis = curves_of(case, results)
    yield (
        "numbers",
        write_json(folder / "summary.json", _summary(settings, case, results, curves, axis), sort_keys=False),
    )
    events = trace({NAMES[each.engine.policy]: each.run for each in drawn}, case.unit)
    yield "trace", write_bytes(folder / "trace.json", json.dumps(events).encode())
    for figure in _pictures(settings, case, drawn, curves, axis):
        assert figure.png is not None  # requested by the settings
        yield "picture", write_bytes(folder / f"{figure.name}.png", figure.png)
    if case.unit == "ticks":
        yield "page", write_bytes(folder / "simulator.html", _page(settings, case, drawn).encode())


def figures_of(settings: Settings, case: SimulationCase, results: Sequence[Simulated]) -> tuple[Figure, ...]:
    """Draw the pictures that `write_all` writes."""
    return tuple(_pictures(settings, case, _drawn(results), *curves_of(case, results)))


def _drawn(results: Sequence[Simulated]) -> list[Simulated]:
    return [each for each in results if each.level is results[-1].level]


def _summary(
    settings: Settings, case: SimulationCase, results: Sequence[Simulated], curves: Sequence[Any], axis: str
) -> dict[str, Any]:
    return {
        "unit": case.unit,
        "what": asked(settings, case),
        "cost": case.reason,
        "notes": list(case.notes),
        "definitions": DEFINITIONS,
        "outcomes": [each.outcome.to_json() for each in results],
        "curves": {"against": axis, "of": [curve.to_json() for curve in curves]},
    }


DEFINITIONS = {
    "times": "in `unit`; rates are per one of it",
    "window": "from the first request to the last response, or from the end of the warm-up to the last request",
    "waiting": "share of the run in which requests waited, by what kept the first of them from a slot",
    "batches": "static batching: number of batches, by what closed them; empty if nobody else waited",
    "capacity": "requests served per unit of time without a pause, if an open loop (`offered`) exceeds it",
    **CONVENTIONS,
}


def _pictures(
    settings: Settings, case: SimulationCase, drawn: Sequence[Simulated], curves: Sequence[Any], axis: str
) -> Iterator[Figure]:
    _, per, _ = words(case.unit)
    what = asked(settings, case, drawn[0].level.title)
    runs = [DrawnRun(NAMES[each.engine.policy], each.run, each.engine.slots, case.overhead) for each in drawn]
    yield slots_picture(runs, unit=case.unit, until=_until(settings, case, drawn), caption=what)
    if curves:
        yield curves_picture(curves, unit=case.unit, rate_unit=per, load=axis, caption=asked(settings, case, ""))


def _until(settings: Settings, case: SimulationCase, drawn: Sequence[Simulated]) -> float:
    end = max(each.run.end for each in drawn)
    if settings.simulator.drawn is not None:
        return min(settings.simulator.drawn, end)
    if case.unit == "ticks":
        stays = [stay for each in drawn for stay in each.run.requests.end - each.run.requests.admitted]
        finished = [stay for stay in stays if not np.isnan(stay)]
        return float(min(max(DRAWN_TICKS, DRAWN_ANSWERS * np.median(finished or [0.0])), end))
    arrival = drawn[0].level.load.arrival
    first = 0.0 if arrival is None else float(arrival[0])
    return min(first + DRAWN_ANSWERS * max((each.outcome.e2e.p50 or end) for each in drawn), end)


def _page(settings: Settings, case: SimulationCase, drawn: Sequence[Simulated]) -> str:
    """Build the page with this engine, and with this load if the page can show it."""
    simulator, engine, requests = settings.simulator, case.engines[0], drawn[0].level.load
    policies = list(simulator.policy)[:2]
    policies += [policy for policy in ("inflight", "static") if policy not in policies][: 2 - len(policies)]
    controls = {
        "slots": min(engine.slots, MAX_SLOTS),
        "prefill": simulator.prefill,
        "decode": simulator.decode,
        "chunks": simulator.chunks,
        "left": policies[0],
        "right": policies[1],
        "isl": round(settings.workload.expected("isl") or 1),
        "mean": settings.workload.expected("osl") or 1.0,
        # the page stops before the step at `until`, but requests that end there still count
        "until": simulator.until or float(np.ceil(max(each.run.end for each in drawn))) + 1,
        "requests": min(len(requests.isl), MAX_REQUESTS),
        "arrival": "once" if drawn[0].outcome.offered is None else "random",
    }
    if drawn[0].outcome.offered is not None:
        controls["rate"] = 100 * drawn[0].outcome.offered
    budgets = [each.max_num_tokens for each in case.engines if each.policy == "inflight_chunked"]
    controls |= {"max_num_tokens": budgets[0]} if budgets and budgets[0] is not None else {}
    if not _page_can(case, drawn[0].run) or requests.arrival is None:
        return page(controls)
    rows = zip(*(np.asarray(c).tolist() for c in (requests.arrival, requests.isl, requests.osl)), strict=True)
    return page(controls, [{"arrival": at, "isl": isl, "osl": osl} for at, isl, osl in rows])


def _page_can(case: SimulationCase, run: SimulatedRun) -> bool:
    """Return whether the page can show the same run: it has no KV cache, and a token budget only with chunks."""
    plain = all(
        engine.kv_blocks is None
        and not engine.prefix_tokens
        and (engine.max_num_tokens is None or engine.policy == "inflight_chunked")
        for engine in case.engines
    )
    return plain and case.slots <= MAX_SLOTS and len(run.requests.arrival) <= MAX_REQUESTS


# Export runs as a trace for ui.perfetto.dev and chrome://tracing, in the JSON trace event format.
#
# One process per run, with a track that says why requests wait, one track per slot, and counters for the queue, the
# batch and the KV cache. Format: "Trace Event Format",
# docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; Perfetto reads complete events ("X"),
# counters ("C") and metadata ("M").

MICROSECONDS = {"s": 1e6, "ticks": 1e3}
"""Trace units per unit of time; a tick is shown as a millisecond."""


def trace(runs: Mapping[str, SimulatedRun], unit: str) -> dict[str, Any]:
    """Build the trace as plain JSON values, from runs simulated with iterations; `unit` is that of their time."""
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

    They are on thread 0, above the slots. While the engine is idle between two iterations, no request waits.
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
    rows, drawn = run.requests, boxes(run)
    for slot in sorted({box.slot for box in drawn}):
        yield _named("thread_name", process, slot + 1, f"slot {slot + 1}")
    for box in drawn:
        assert box.request is not None  # empty slots have no boxes
        yield {
            "name": f"{ACTIVITIES[box.kind]} {box.request + 1}",
            "cat": ACTIVITIES[box.kind],
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


# The page that animates batching in a browser: a single file that loads nothing else.
#
# `page/model.js` reimplements the simulator in ticks; a test checks in a real browser that both give the same numbers.

FOLDER, PARTS = Path(__file__).resolve().parent / "page", ("page.html", "page.css", "model.js", "page.js")
MAX_SLOTS, MAX_REQUESTS = 64, 2000
"""Range of the page's controls."""
CONTROLS: Mapping[str, Any] = {
    "slots": 4,
    "prefill": 2,
    "decode": 1,
    "chunks": 1,
    "max_num_tokens": 68,
    "requests": 100,
    "isl": 128,
    "mean": 10,
    "spread": 8,
    "arrival": "once",
    "rate": 30,
    "seed": 1,
    "left": "static",
    "right": "inflight",
    "until": 100,
}
"""Initial values of the controls."""


def page(controls: Mapping[str, Any] | None = None, load: Sequence[Mapping[str, float]] | None = None) -> str:
    """Return the whole page as text.

    Args:
        controls: values that replace those of `CONTROLS`.
        load: initial requests ({"arrival": ticks, "isl": ..., "osl": ...}); with None the page draws them.
    """
    initial = {"controls": {**CONTROLS, **(controls or {})}, "load": None if load is None else list(load)}
    html, style, model, script = ((FOLDER / name).read_text(encoding="utf-8") for name in PARTS)
    return Template(html).substitute(
        light=variables(LIGHT),
        dark=variables(DARK),
        style=style,
        model=model,
        page=script,
        initial=json.dumps(initial).replace("<", "\\u003c"),
    )
