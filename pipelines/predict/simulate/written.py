"""Write the files of a simulation: tables, pictures, trace, page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.domain.summary import CONVENTIONS
from pipelines.host.files import write_bytes, write_json
from pipelines.predict.simulate.case import SimulationCase
from pipelines.predict.simulate.curves import curves_of
from pipelines.predict.simulate.files import iterations_csv, requests_csv
from pipelines.predict.simulate.reasons import words
from pipelines.predict.simulate.simulated import Simulated
from pipelines.predict.simulate.table import NAMES, asked
from pipelines.predict.simulator.interface import SimulatedRun
from pipelines.settings.root import Settings

if TYPE_CHECKING:
    from pipelines.document.blocks import Figure

DRAWN_TICKS = 100.0
DRAWN_ANSWERS = 2.5
"""Default time span of the picture of the slots: ticks, or this multiple of the median stay in a slot if that is
longer, so that answers end within it; where time is in seconds, a multiple of the median E2E."""


def write_all(
    folder: Path, settings: Settings, case: SimulationCase, results: Sequence[Simulated]
) -> Iterator[tuple[str, Path]]:
    """Write all files, yielding names and paths of those that people open as soon as they exist."""
    named = [(NAMES[each.engine.policy], each.level.load.text, each.run) for each in results]
    write_bytes(folder / "requests.csv", requests_csv(named))
    write_bytes(folder / "iterations.csv", iterations_csv(named, case.unit))
    drawn = [each for each in results if each.level is results[-1].level]
    curves, axis = curves_of(case, results)
    yield (
        "numbers",
        write_json(folder / "summary.json", _summary(settings, case, results, curves, axis), sort_keys=False),
    )
    yield "trace", write_bytes(folder / "trace.json", _trace(drawn, case.unit))
    for figure in _pictures(settings, case, drawn, curves, axis):
        assert figure.png is not None  # requested by the settings
        yield "picture", write_bytes(folder / f"{figure.name}.png", figure.png)
    if case.unit == "ticks":
        yield "page", write_bytes(folder / "simulator.html", _page(settings, case, drawn).encode())


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


def _trace(drawn: Sequence[Simulated], unit: str) -> bytes:
    from pipelines.predict.simulate.perfetto import trace

    return json.dumps(trace({NAMES[each.engine.policy]: each.run for each in drawn}, unit)).encode()


def _pictures(
    settings: Settings, case: SimulationCase, drawn: Sequence[Simulated], curves: Sequence[Any], axis: str
) -> Iterator[Figure]:
    from pipelines.predict.simulate.pictures import Shown, curves_picture, slots_picture

    _, per, _ = words(case.unit)
    what = asked(settings, case, drawn[0].level.load.text)
    shown = [Shown(NAMES[each.engine.policy], each.run, each.engine.slots, case.overhead) for each in drawn]
    yield slots_picture(shown, unit=case.unit, until=_until(settings, case, drawn), caption=what)
    if curves:
        yield curves_picture(curves, unit=case.unit, rate_unit=per, load=axis, caption=asked(settings, case, ""))


def _until(settings: Settings, case: SimulationCase, drawn: Sequence[Simulated]) -> float:
    """Return the end of the picture's time axis."""
    end = max(each.run.end for each in drawn)
    if settings.simulator.drawn is not None:
        return min(settings.simulator.drawn, end)
    if case.unit == "ticks":
        stays = [stay for each in drawn for stay in each.run.requests.end - each.run.requests.admitted]
        known = [stay for stay in stays if not np.isnan(stay)]
        return float(min(max(DRAWN_TICKS, DRAWN_ANSWERS * np.median(known or [0.0])), end))
    return min(DRAWN_ANSWERS * max((each.outcome.e2e.p50 or end) for each in drawn), end)


def _page(settings: Settings, case: SimulationCase, drawn: Sequence[Simulated]) -> str:
    """Build the page with this engine, and with this load if the page can show it."""
    from pipelines.document.canvas import DARK, LIGHT
    from pipelines.predict.simulate.page import MAX_REQUESTS, MAX_SLOTS, page

    wanted, engine, requests = settings.simulator, case.engines[0], drawn[0].level.requests
    policies = list(wanted.policy)[:2]
    policies += [policy for policy in ("inflight", "static") if policy not in policies][: 2 - len(policies)]
    controls = {
        "slots": min(engine.slots, MAX_SLOTS),
        "prefill": wanted.prefill,
        "decode": wanted.decode,
        "chunks": wanted.chunks,
        "left": policies[0],
        "right": policies[1],
        "isl": round(settings.workload.isl.expected or 1),
        "mean": settings.workload.osl.expected or 1.0,
        # the page stops before the step at `until`, but what ends there must still be counted
        "until": wanted.until or float(np.ceil(max(each.run.end for each in drawn))) + 1,
        "requests": min(len(requests.isl), MAX_REQUESTS),
        "arrival": "once" if drawn[0].outcome.offered is None else "random",
    }
    if drawn[0].outcome.offered is not None:
        controls["rate"] = 100 * drawn[0].outcome.offered
    budgets = [each.max_num_tokens for each in case.engines if each.policy == "inflight_chunked"]
    controls |= {"max_num_tokens": budgets[0]} if budgets and budgets[0] is not None else {}
    if not _page_can(case, drawn[0].run) or requests.arrival is None:
        return page(LIGHT, DARK, controls)
    rows = zip(*(np.asarray(c).tolist() for c in (requests.arrival, requests.isl, requests.osl)), strict=True)
    return page(LIGHT, DARK, controls, [{"arrival": at, "isl": isl, "osl": osl} for at, isl, osl in rows])


def _page_can(case: SimulationCase, run: SimulatedRun) -> bool:
    """Return whether the page can show the same run: it has no KV cache, and a token budget only with chunks."""
    from pipelines.predict.simulate.page import MAX_REQUESTS, MAX_SLOTS

    plain = all(
        engine.kv_blocks is None
        and not engine.prefix_tokens
        and (engine.max_num_tokens is None or engine.policy == "inflight_chunked")
        for engine in case.engines
    )
    return plain and case.slots <= MAX_SLOTS and len(run.requests.arrival) <= MAX_REQUESTS
