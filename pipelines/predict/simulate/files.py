"""Tables of simulated requests and iterations as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipelines.predict.simulator.interface import REFUSALS, SimulatedRun

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
