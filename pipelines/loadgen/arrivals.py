"""Arrival processes: when requests of an open loop are due, in ns from the start of the level."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipelines.domain.errors import UserError
from pipelines.domain.summary import SECOND
from pipelines.host.files import small_text


def offsets(arrival: str, rate: float, cv: float, rng: Random) -> Iterator[int]:
    """Yield due times forever, ascending, the first after one gap.

    Args:
        arrival: "constant", "poisson" or "gamma".
        rate: requests per second.
        cv: gamma: coefficient of variation of the gaps (shape 1/cv^2, mean 1/rate).
        rng: random number generator.
    """
    count, now = 0, 0.0
    while True:
        count += 1
        if arrival == "constant":
            now = count / rate  # no running sum, so that rounding errors do not accumulate
        elif arrival == "poisson":
            now += rng.expovariate(rate)
        else:
            now += rng.gammavariate(1 / cv**2, cv**2 / rate)
        yield round(now * SECOND)


@dataclass(frozen=True, slots=True)
class TraceItem:
    """One line of a trace: ns from its first line; `isl` tokens, or the prompt itself; `osl` tokens wanted."""

    offset_ns: int
    osl: int
    isl: int | None = None
    prompt: str | None = None


MOST_TRACE_BYTES = 2**30
"""Largest trace that is read: 250,000 prompts of 4,000 characters."""


def read_trace(path: Path, speed: float, key: str = "workload.trace") -> list[TraceItem]:
    """Read a trace of JSON lines, sorted by time, with its first request at 0.

    Args:
        path: the file; each line has `time` (seconds), `osl`, and `isl` or `prompt`.
        speed: 2 plays it twice as fast.
        key: setting that names it, for messages.

    Raises:
        UserError: it cannot be read, or a line has another form.
    """
    try:
        lines = small_text(path, MOST_TRACE_BYTES).splitlines()
    except UserError as error:
        raise UserError(f"{key}={path} cannot be read: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={path} cannot be read: {error}.") from None
    rows = [_row(path, number, line, key) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{key}={path} is empty.", allowed=_FORM)
    rows.sort(key=lambda row: float(row["time"]))
    first = float(rows[0]["time"])
    return [
        TraceItem(round((row["time"] - first) / speed * SECOND), row["osl"], row.get("isl"), row.get("prompt"))
        for row in rows
    ]


_FORM = 'Each line is {"time": 0.5, "isl": 128, "osl": 64} or {"time": 0.5, "prompt": "...", "osl": 64}.'


def _row(path: Path, number: int, line: str, key: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not _fine(row):
        raise UserError(f"{key}={path}, line {number}: '{line[:60]}' is not a request.", allowed=_FORM)
    return row


def _fine(row: dict[str, Any]) -> bool:
    time, isl, osl, prompt = (row.get(key) for key in ("time", "isl", "osl", "prompt"))
    return (
        isinstance(time, int | float)
        and math.isfinite(time)
        and _count(osl)
        and ((prompt is None and _count(isl)) or (isl is None and isinstance(prompt, str) and prompt != ""))
    )


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
