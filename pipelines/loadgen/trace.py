"""Real traffic as a load: a file of requests with times and lengths, in any of several column layouts."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.summary import SECOND
from pipelines.host.files import small_text
from pipelines.loadgen.config import TRACE_COLUMNS, TRACE_UNITS, WorkloadSettings
from pipelines.settings.base import flat

MOST_TRACE_BYTES = 2**30
"""Largest trace that is read: 250,000 prompts of 4,000 characters."""
LONGEST_S = 10**9
"""Longest trace, as it is sent: 31 years."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests of a trace, in order of time; turns that wait for an answer are behind the turn that it answers.

    Attributes:
        offset_ns: int64[n], ns from the first request, as they are sent; of turns that wait, from the answer's end.
        isl: int64[n], input tokens; 0 where the prompt itself is given.
        osl: int64[n], output tokens.
        prompts: the prompts that are given, by place.
        notes: what a reader of figures should know of the file.
        waiting: places of the turns that wait for the answer to the request before them.
    """

    offset_ns: array[int]
    isl: array[int]
    osl: array[int]
    prompts: Mapping[int, str]
    notes: tuple[str, ...]
    waiting: Set[int] = frozenset()


class TraceFormat(NamedTuple):
    """A published format: the names of each column, and the unit of times that are numbers ("": told by their size)."""

    title: str
    time: tuple[str, ...]
    isl: tuple[str, ...]
    osl: tuple[str, ...]
    prompt: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    delay: tuple[str, ...] = ()
    unit: str = "s"


_IN, _OUT = ("input_length", "input_tokens"), ("output_length", "output_tokens")
_LOGGED = ("timestamp", "time", "start_time", "startTime", "created", "created_at")
_USAGE = (("prompt_tokens", "usage.prompt_tokens"), ("completion_tokens", "usage.completion_tokens"))
FORMATS = (
    TraceFormat("ours", ("time",), ("isl",), ("osl",), ("prompt",)),
    TraceFormat(
        "Mooncake",
        ("timestamp", "created_time"),
        _IN,
        _OUT,
        ("text_input",),
        ("session_id",),
        ("delay", "delay_ms"),
        "ms",
    ),
    TraceFormat("Weka", ("t",), ("in",), ("out",)),
    TraceFormat("Azure", ("TIMESTAMP",), ("ContextTokens",), ("GeneratedTokens",)),
    TraceFormat("BurstGPT", ("Timestamp",), ("Request tokens",), ("Response tokens",)),
    TraceFormat("gateways", _LOGGED, *_USAGE, unit=""),
)
"""Mooncake has Dynamo's aliases, Weka is a session of AgentX, gateways are logs with OpenAI's counts."""
KNOWN = f"Known: {'; '.join(f'{row.title}: {row.time[0]}, {row.isl[0]}, {row.osl[0]}' for row in FORMATS)}."
EPOCH = {"s": 1e9, "ms": 1e12, "us": 1e15, "ns": 1e18}
"""A time from this number up to ten times as much counts from 1970 in the unit: the years 2001 to 2286."""
Row = tuple[int, tuple[Any, ...]]
"""Number of a line (of a request in a session), and its values in the order of `TRACE_COLUMNS`."""


def read_trace(workload: WorkloadSettings) -> Trace:
    """Read the trace of a workload.

    Raises:
        UserError: it cannot be read, a column is missing, or a value is wrong.
    """
    path, columns = workload.trace, tuple((workload.columns or {}).items())
    assert path is not None  # checked by the settings
    try:
        state = path.stat()
        return _read(path, workload.trace_speed, columns, (state.st_mtime_ns, state.st_size))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"workload.trace={path} cannot be read: {error}.") from None


def known_times(workload: WorkloadSettings, todo: str) -> array[int]:
    """Return int64[n], ns of each request of a trace from the first.

    Raises:
        UserError: it cannot be read, or some turns wait for an answer.
    """
    trace = read_trace(workload)
    if trace.waiting:
        turns = count(len(trace.waiting), "turn")
        raise UserError(
            f"workload.trace={workload.trace} has {turns} with a delay after the answer before, whose end depends on "
            "the server.",
            todo=todo,
        )
    return trace.offset_ns


@lru_cache(maxsize=1)
def _read(path: Path, speed: float, columns: tuple[tuple[str, str], ...], _state: object) -> Trace:
    """Read a file once, although its lengths, rate and day are asked for one by one."""
    try:
        text = small_text(path, MOST_TRACE_BYTES).removeprefix("\ufeff")
    except UserError as error:
        raise UserError(f"workload.trace={path} cannot be read: {error}") from None
    return _TraceReader(path, dict(columns)).read(text, speed)


class _TraceReader:
    """Reads one file: chooses its columns by the first row, and judges every value."""

    def __init__(self, path: Path, fields: Mapping[str, str]) -> None:
        self._file, self._fields = f"workload.trace={path}", fields
        self._names, self._unit, self._line, self._notes = dict[str, str](), "", "line", list[str]()
        self._delays = tuple[str, ...]()
        self._begins, self._last = dict[int, int](), dict[str, int]()

    def read(self, text: str, speed: float) -> Trace:
        seconds, isl, osl, prompts = array("d"), array("q"), array("q"), dict[int, str]()
        scale, last, early = 0.0, -math.inf, 0
        rows = self._json(text) if text.lstrip()[:1] == "{" else self._csv(text)
        for number, (time, tokens, answer, prompt, session, delay) in rows:
            if delay not in (None, ""):
                moment = self._waits(time, delay, session, len(osl), number) * scale
            else:
                scale = scale or self._scale(time, number)
                moment = self._moment(time, scale, number)
                early += moment < last
                last = moment
            if session not in (None, ""):
                self._last[str(session)] = len(osl)
            if prompt in (None, ""):
                isl.append(self._tokens(tokens, "isl", number))
            elif tokens not in (None, ""):
                raise self._wrong(
                    number, f"has {self._names['isl']} and {self._names['prompt']}; one of them is enough"
                )
            elif not isinstance(prompt, str):
                raise self._bad(prompt, "prompt", "a prompt", "text", number)
            else:
                prompts[len(isl)] = prompt
                isl.append(0)
            osl.append(self._tokens(answer, "osl", number))
            seconds.append(moment)
        if not osl:
            raise UserError(f"{self._file} is empty.", allowed=KNOWN)
        if early:
            lines = f"{early:,} {self._line}{'s were' if early > 1 else ' was'} earlier than the one before"
            self._notes.append(f"{lines}: sorted by time")
        return self._trace(seconds, isl, osl, prompts, speed, sort=early > 0)

    def _trace(self, seconds: Any, isl: Any, osl: Any, prompts: dict[int, str], speed: float, *, sort: bool) -> Trace:
        """Order the requests by time, and turns that wait behind the first of their session's requests."""
        begins, waiting = self._begins, set(self._begins)
        if waiting:
            turns = f"{len(waiting):,} of {len(osl):,} requests"
            self._notes.append(f"{turns} are turns with a delay: each begins so long after the answer before")
        first = min(moment for row, moment in enumerate(seconds) if row not in waiting)
        seconds = [(moment if row in waiting else moment - first) / speed for row, moment in enumerate(seconds)]
        if (lasts := max(seconds)) > LONGEST_S:
            raise UserError(
                f"{self._file} lasts {lasts:,.3g} s.",
                allowed=f"At most {LONGEST_S:,} s.",
                todo="Give the unit of its times, e.g. workload.columns={unit: ms}, or a higher workload.trace_speed.",
            )
        if sort or waiting:
            firsts = [begins.get(row, row) for row in range(len(osl))]
            order = sorted(range(len(osl)), key=lambda row: (seconds[firsts[row]], firsts[row]))
            prompts = {place: prompts[row] for place, row in enumerate(order) if row in prompts}
            waiting = {place for place, row in enumerate(order) if row in waiting}
            seconds = map(seconds.__getitem__, order)
            isl, osl = (array("q", map(column.__getitem__, order)) for column in (isl, osl))
        offsets = array("q", (round(moment * SECOND) for moment in seconds))
        return Trace(offsets, isl, osl, prompts, tuple(self._notes), waiting)

    def _waits(self, time: Any, delay: Any, session: Any, row: int, number: int) -> float:
        """Return the delay of a turn, and note behind which row it is to be sent."""
        if time not in (None, ""):
            raise self._wrong(number, f"has {self._names['time']} and {self._names['delay']}; one of them is enough")
        if (before := None if session is None else self._last.get(str(session))) is None:
            raise UserError(
                f"{self._at('delay', number)}: there is no answer before it in its session from which to count.",
                todo=f"Give the first turn of each session a {self._names['time']}, and each turn its "
                f"{self._names['session'] or 'session, workload.columns={session: ...}'}.",
            )
        if (value := _number(delay)) is None or value < 0:
            raise self._bad(delay, "delay", "a delay", "a number from 0", number)
        self._begins[row] = self._begins.get(before, before)
        return value

    def _csv(self, text: str) -> Iterator[Row]:
        reader = csv.reader((f"{line}\n" for line in text.removesuffix("\n").split("\n")), skipinitialspace=True)
        try:
            header = [name.strip() for name in next((row for row in reader if row), ())]
            if header:
                self._choose(header)
            places = [header.index(name) if name in header else -1 for name in self._names.values()]
            for row in filter(None, reader):
                if len(row) != len(header):
                    raise self._wrong(reader.line_num, f"has {len(row)} values, and the header {len(header)}")
                row.append("")  # of columns that it does not have
                yield reader.line_num, tuple(map(row.__getitem__, places))
        except csv.Error as error:
            raise self._wrong(reader.line_num, f"is not CSV: {error}") from None

    def _json(self, text: str) -> Iterator[Row]:
        """Read one object a line, or a session: one object with all its requests."""
        rest: Iterator[tuple[int, str]] = (
            (number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()
        )
        number, line = next(rest)
        try:
            first = from_json(line)
        except ValueError:  # a session on several lines, or a mistake in the first one
            try:
                first, rest = from_json(text), iter(())
            except ValueError:
                first = self._parsed(number, line)
        if isinstance(first.get("requests"), list):
            if more := next(rest, None):
                raise self._wrong(more[0], "begins another session; when it starts is not in the file")
            self._line = "request"
            rows: Iterator[tuple[int, Any]] = enumerate(_of_session(first["requests"]), 1)
        else:
            rows = chain([(number, first)], ((number, self._parsed(number, line)) for number, line in rest))
        for number, row in rows:
            if not isinstance(row, dict):
                raise self._wrong(number, "is no JSON object")
            if not self._names:
                self._choose([*flat(row)])
                nested = any("." in name for name in self._names.values())
                if "hash_ids" in row:
                    self._notes.append("hash_ids are not used: prompts share what workload.shared_prefix_share says")
            row = flat(row) if nested else row
            if row.get(self._names["time"]) is None:
                self._names["delay"] = next((name for name in self._delays if name in row), self._names["delay"])
            yield number, tuple(map(row.get, self._names.values()))

    def _parsed(self, number: int, line: str) -> Any:
        try:
            return from_json(line)
        except ValueError as error:
            raise self._wrong(number, f"is not JSON ({error}): '{line.strip()[:60]}'") from None

    def _choose(self, header: list[str]) -> None:
        """Choose the columns: those that are given, and for the rest those of the first format that has them."""
        fields = {key: name for key, name in self._fields.items() if key != "unit"}
        for row in (*FORMATS, TraceFormat("", (), (), (), unit="")):
            names = {key: next((name for name in getattr(row, key) if name in header), "") for key in TRACE_COLUMNS}
            names |= fields
            if enough := (names["time"] or names["delay"]) and names["osl"] and (names["isl"] or names["prompt"]):
                break
        absent = next((name for name in fields.values() if name not in header), "")
        if absent or not enough:
            what = f"no column {absent}" if absent else "no columns that are known"
            raise UserError(
                f"{self._file} has {what}; it has {', '.join(header[:20])}.",
                allowed=KNOWN,
                todo="Name its own: workload.columns={time: ..., isl: ..., osl: ...}.",
            )
        for key in TRACE_COLUMNS:  # JSON may have the one in this line and the other in the next
            names[key] = names[key] or next(iter(getattr(row, key)), "")
        self._names, self._unit, self._delays = names, "" if "time" in fields else row.unit, row.delay

    def _scale(self, time: Any, number: int) -> float:
        """Return the seconds of one unit of the times, by the first of them; 1 for dates, which have no unit."""
        first = _number(time)
        if first is None or "unit" in self._fields:
            return TRACE_UNITS[self._fields.get("unit", "s")]
        since_1970 = next((unit for unit, least in EPOCH.items() if least <= first < 10 * least), "")
        unit = self._unit or since_1970
        if unit and since_1970 in ("", unit):
            return TRACE_UNITS[unit]
        what = f"{unit} by the format, and looks like {since_1970} since 1970" if unit else "not known"
        raise UserError(
            f"{self._at('time', number)}: the unit of {time} is {what}.",
            allowed=f"One of {', '.join(TRACE_UNITS)}.",
            todo=f"Say it: workload.columns={{unit: {since_1970 or 'ms'}}}.",
        )

    def _moment(self, time: Any, scale: float, number: int) -> float:
        if isinstance(time, str) and time[4:5] == "-":
            try:
                date = datetime.fromisoformat(time)
                return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
            except ValueError:
                pass
        if (value := time if type(time) is int else _number(time)) is None:
            raise self._bad(time, "time", "a time", "a number, or a date such as 2023-11-16 18:17:03.97", number)
        return value * scale

    def _tokens(self, value: Any, key: str, number: int) -> int:
        if type(value) is int and 0 < value < 2**31:
            return value
        tokens = _number(value)
        if tokens is None or tokens != int(tokens) or not 0 < tokens < 2**31:
            raise self._bad(value, key, "a number of tokens", "a whole number from 1", number)
        return int(tokens)

    def _bad(self, value: Any, key: str, what: str, allowed: str, number: int) -> UserError:
        if value not in (None, ""):
            wrong = f"'{str(value)[:40]}' is not {what}"
            failed = key == "osl" and _number(value) == 0
            todo = "Leave out requests that failed, as BurstGPT_without_fails_1.csv does." if failed else ""
            return UserError(f"{self._at(key, number)}: {wrong}.", allowed=f"It is {allowed}.", todo=todo)
        return UserError(f"{self._at(key, number)} is empty.", allowed=f"It is {allowed}.")

    def _at(self, key: str, number: int) -> str:
        return f"{self._file}, {self._line} {number}, column {self._names[key]}"

    def _wrong(self, number: int, what: str) -> UserError:
        return UserError(f"{self._file}, {self._line} {number} {what}.")


def _of_session(requests: list[Any]) -> list[Any]:
    """List the requests of a Weka session, those of its subagents included, by time.

    The times of a subagent's requests count from the session's start, or from its own if the first is before it.
    """
    records: list[Any] = []
    for entry in requests:
        inner = entry.get("requests") if isinstance(entry, dict) else None
        if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
            records.append(entry)
            continue
        start, times = entry.get("t"), [each.get("t") for each in inner]
        own = times and all(isinstance(time, int | float) for time in (start, *times)) and times[0] < start
        records += [each | {"t": start + each["t"]} for each in inner] if own else inner
    return sorted(records, key=lambda each: (_number(each.get("t")) if isinstance(each, dict) else None) or 0.0)


def _number(value: Any) -> float | None:
    """Return a finite number, also one that is written as text; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
