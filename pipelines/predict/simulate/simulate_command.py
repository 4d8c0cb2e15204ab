"""The command `simulate`: compose the settings, simulate, print and write."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.domain.benchmark import Distribution
from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.summary import CONVENTIONS, summarise
from pipelines.host.disk import check_folders, relative_to_cwd
from pipelines.host.files import write_bytes, write_json
from pipelines.host.machine import Machine, gather
from pipelines.host.screen import say, wrapped
from pipelines.loadgen.config import OPEN_RATE, load_faults
from pipelines.predict.performance.placement import Judge
from pipelines.predict.simulate.case import NAMES, SimulationCase, asked, faults_of, in_ticks, make_case, outcome_table
from pipelines.predict.simulate.loads import Simulated, SimulatedLevel, closed_level, make_levels, run_all
from pipelines.predict.simulate.outcome import words
from pipelines.predict.simulate.pictures import Point, PolicyCurve
from pipelines.predict.simulator.interface import (
    REFUSALS,
    IterationTokens,
    SchedulerLimits,
    SimulatedRun,
    request_columns,
)
from pipelines.settings.compose import load
from pipelines.settings.root import Settings, as_yaml
from pipelines.store.run_folder import run_folder

if TYPE_CHECKING:
    from pipelines.document.blocks import Figure

# Tables of simulated requests and iterations as CSV.

REQUEST = ("request", "arrival", "admitted", "first_token", "end", "isl", "osl", "produced", "preemptions", "slot")
ITERATION = ("start", "seconds", "decoding", "prefilling", "tokens", "queue", "refused", "kv_blocks", "kv_tokens")
Named = Sequence[tuple[str, str, SimulatedRun]]
"""(policy, load, run)."""


def requests_csv(runs: Named) -> bytes:
    """Write one row per request, requests and slots numbered from 1; cells of events that did not happen are empty."""
    return _csv(("policy", "load", *REQUEST), (row for name, load, run in runs for row in _requests(name, load, run)))


def iterations_csv(runs: Named, unit: str) -> bytes:
    """Write one row per iteration; `refused` is what kept the first request of the queue from a slot."""
    head = tuple("ticks" if name == "seconds" and unit == "ticks" else name for name in ITERATION)
    at = ITERATION.index("refused")
    rows = (
        (name, load, *row[:at], REFUSALS[int(row[at])], *row[at + 1 :])
        for name, load, run in runs
        for row in _columns(run.iterations, ITERATION)
    )
    return _csv(("policy", "load", *head), rows)


def _requests(name: str, load: str, run: SimulatedRun) -> Iterable[tuple[Any, ...]]:
    for index, (*row, slot) in enumerate(_columns(run.requests, REQUEST[1:])):
        yield name, load, index + 1, *row, "" if slot == -1 else slot + 1


def _columns(table: Any, names: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    columns = (np.asarray(getattr(table, name)).tolist() for name in names)
    for row in zip(*columns, strict=True):
        yield tuple(_cell(value) for value in row)


def _cell(value: float) -> float | str:
    """Format a cell: NaN is empty, whole numbers have no decimal point."""
    if value != value:
        return ""
    return int(value) if value == int(value) else value


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue().encode()


# Curves of throughput and latency against the load, one per policy.

MOST_USERS = 256


def curves_of(case: SimulationCase, results: Sequence[Simulated]) -> tuple[list[PolicyCurve], str]:
    """Return the curves and the name of their horizontal axis.

    If several loads are given, they are the points; otherwise the same requests are simulated as closed loops of 1, 2,
    4, ... users, up to four times the number of slots.
    """
    several = len({each.outcome.load for each in results}) > 1
    if not several:
        base = results[-1].level
        users = [2**power for power in range(9) if 2**power <= min(4 * case.slots, MOST_USERS)]
        return [_swept(case, engine, base, users) for engine in case.engines], "concurrency"
    _, _, scale = words(case.unit)
    curves = []
    for engine in case.engines:
        own = [each.outcome for each in results if each.engine is engine]
        points = [
            Point(
                load=float(o.concurrency or o.request_rate or 0),
                requests=o.requests_rate * scale,
                tokens=o.tokens_rate * scale,
                ttft=_both(o.ttft),
                e2e=_both(o.e2e),
            )
            for o in own
        ]
        curves.append(PolicyCurve(NAMES[engine.policy], tuple(sorted(points, key=lambda point: point.load))))
    closed = results[0].outcome.concurrency is not None
    return curves, "concurrency" if closed else f"requests per {'tick' if case.unit == 'ticks' else 's'}"


def _both(found: Distribution) -> tuple[float, float] | None:
    return None if found.p50 is None or found.p95 is None else (found.p50, found.p95)


def _swept(case: SimulationCase, engine: SchedulerLimits, base: SimulatedLevel, users: Sequence[int]) -> PolicyCurve:
    return PolicyCurve(
        NAMES[engine.policy], tuple(_point(case, engine, closed_level(base, count, case)) for count in users)
    )


def _point(case: SimulationCase, engine: SchedulerLimits, level: SimulatedLevel) -> Point:
    from pipelines.predict.simulator.run import simulate

    run = simulate(engine, level.requests, case.cost, iterations=True)
    window, (_, _, scale) = level.window(run, case.overhead), words(case.unit)
    tokens = IterationTokens(run, case.overhead)
    requests = request_columns(run.requests, overhead=case.overhead, responses=tokens)
    found = summarise(requests, window.bounds, due=window.due(run))
    return Point(
        load=float(level.load.concurrency or 0),
        requests=found.requests_per_s * scale,
        tokens=found.output_tokens_per_s * scale,
        ttft=_both(found.ttft_s),
        e2e=_both(found.e2e_s),
    )


# Write the files of a simulation: tables, pictures, trace, page.

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


CLASSIC, REQUESTS = "workload=classic", "benchmark.num_requests=100"
"""Simulated when nothing is specified: the short answers of the classic drawing."""
RATE = "benchmark.request_rate=0.22"
"""Between what 4 slots serve with static batching (178 requests per 1,000 ticks) and with in-flight batching (267):
with one the queue grows, with the other it comes and goes."""


def simulate(overrides: Sequence[str], judge_of: Callable[[Settings, Machine], Judge]) -> int:
    """Simulate the policies under the loads, print the table, write files and pictures into a run folder.

    Args:
        overrides: as typed.
        judge_of: makes the rules of a plan from settings.
    """
    words, settings = with_defaults(overrides)
    check_folders({"paths.runs": settings.paths.runs})
    case, levels = _judged(settings, judge_of)
    with run_folder("simulate", settings.paths.runs, as_yaml(settings), words) as folder:
        say(wrapped(f"time: {'seconds' if case.unit == 's' else case.unit} ({case.reason})"))
        for note in case.notes:
            say(wrapped(note))
        results = run_all(settings, case, levels)
        say(wrapped(asked(settings, case, _load(levels))) + "\n")
        say(outcome_table([each.outcome for each in results], case.unit) + "\n")
        for name, path in write_all(folder, settings, case, results):
            say(f"{name + ':':<9} {relative_to_cwd(path)}")
    return 0


def with_defaults(overrides: Sequence[str]) -> tuple[list[str], Settings]:
    """Return the overrides, preceded by the defaults for a run in ticks, and the resulting settings.

    In ticks, answers are as short as in the classic drawing unless a workload is chosen, and requests arrive at random
    unless a load is given.
    """
    settings = load(overrides)
    words = [*_beginning(settings, overrides), *overrides]
    return words, load(words) if len(words) > len(overrides) else settings


def _beginning(settings: Settings, overrides: Sequence[str]) -> list[str]:
    given = [text.lstrip("+") for text in overrides]
    if not in_ticks(settings) or settings.workload.name != "fixed" or any(w.startswith("workload=") for w in given):
        return []
    set_here = {text.partition("=")[0] for text in given}
    arrival = "closed" if "benchmark.concurrency" in set_here else "poisson"
    words = [CLASSIC, f"workload.arrival={arrival}"]
    arrival = settings.workload.arrival if "workload.arrival" in set_here else arrival
    if arrival in OPEN_RATE and "benchmark.request_rate" not in set_here:
        words += [RATE, REQUESTS]
    return [*words, REQUESTS] if arrival == "burst" else words


def _load(levels: Sequence[SimulatedLevel]) -> str | None:
    """Return the concurrency or rate if there is only one."""
    (load, *others) = (level.load for level in levels)
    one = not others and (load.concurrency is not None or load.request_rate is not None)
    return load.text if one else None


def _judged(
    settings: Settings, judge_of: Callable[[Settings, Machine], Judge]
) -> tuple[SimulationCase, list[SimulatedLevel]]:
    """Return the case and its loads, or raise one error with everything that is wrong."""
    faults: list[Fault] = [*load_faults(settings.workload, settings.benchmark), *faults_of(settings)]
    case = None
    with collecting(faults):
        machine = gather()
        case = make_case(settings, machine, judge_of(settings, machine))
    if faults or case is None:
        raise UserError.of(faults)
    levels = make_levels(settings, case)
    faults = [fault for level in levels for fault in level.faults(case.engines[0])]
    if faults:
        raise UserError.of(faults[:1])
    return case, levels
